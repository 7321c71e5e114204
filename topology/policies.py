"""The policies as rows of weights over one scoring loop.

A set's cost on a machine, comparable across machines (the least cost wins, then the node's name):

    cost = alpha x (1 - relative quality)      link quality lost
         + apart   if it spans islands         one island if one fits
         + unlinked if its ring needs PCIe     an NVLink ring beats any PCIe ring
         + crowd x crowding of its pairs       only for spreading
         + loss x (lost[free - set] - lost[free])  fragmentation it causes, in expected GPUs
         + near x (closeness cut - inside)     close groups torn apart, less those taken; used neighbours when spreading
         + pack x |free|                       fuller machines first (emptier ones when spreading)

Within one machine `ranks_quality` makes links decide before everything else; across machines alpha weighs them against
fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from topology.device_requests import Policy

ALPHA: Final = 12.0
PACK: Final = 0.09
LOSS: Final = 0.5
"""Tuned together with PACK, topology.fragmentation.WHOLE and topology.scores on seeded churns of several machines."""
APART: Final = 100.0
UNLINKED: Final = 20.0
CROWD: Final = 10.0
NEAR: Final = 0.0005
"""Closeness sums over the pairs of eight devices stay below 28: the tie-break stays below the loss of a rare size."""
QUALITY_FIRST: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Weights:
    """One policy's row; see the formula above. one_island: sets that span islands are refused."""

    one_island: bool
    ranks_quality: bool
    alpha: float
    apart: float
    unlinked: float
    crowd: float
    loss: float
    near: float
    pack: float


POLICIES: Final[dict[Policy, Weights]] = {
    Policy.CONTIGUOUS: Weights(
        one_island=False,
        ranks_quality=True,
        alpha=ALPHA,
        apart=APART,
        unlinked=UNLINKED,
        crowd=0.0,
        loss=LOSS,
        near=NEAR,
        pack=PACK,
    ),
    Policy.ISLAND: Weights(
        one_island=True,
        ranks_quality=True,
        alpha=ALPHA,
        apart=0.0,
        unlinked=UNLINKED,
        crowd=0.0,
        loss=LOSS,
        near=NEAR,
        pack=PACK,
    ),
    Policy.PACKED: Weights(
        one_island=False,
        ranks_quality=False,
        alpha=0.0,
        apart=0.0,
        unlinked=0.0,
        crowd=0.0,
        loss=LOSS,
        near=NEAR,
        pack=PACK,
    ),
    Policy.SPREAD: Weights(
        one_island=False,
        ranks_quality=False,
        alpha=0.0,
        apart=0.0,
        unlinked=0.0,
        crowd=CROWD,
        loss=0.0,
        near=NEAR,
        pack=-PACK,
    ),
}
