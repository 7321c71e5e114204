"""Fragmentation: how much of a machine's free GPUs the sizes in demand can no longer use well.

For each size k in demand, a free set can use `k x (most disjoint k-sets of full quality)` of its GPUs at full
quality; the rest is lost to that size. The measure is the expected loss over the sizes, in GPUs:

    loss[free] = sum over k of weight(k) x (|free| - k x fits_k[free])

where weight(k) is the share of size k in all GPUs asked for, times WHOLE for the whole machine. Counting pods instead
of GPUs would let the many small requests, which fit nearly anywhere, outweigh the few large ones.

A capacity has no plateaus, unlike a count of whether one more pod fits (Weng et al., ATC'23). The result is one array
over free masks. Bounded: a size with more than SETS_MAX full-quality sets counts as if any set of that size would do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from topology.demand import PRIOR, Demand
from topology.model import Machine
from topology.quality import Bools, Floats, Ints, qualities, sizes_of

SETS_MAX: Final = 512
WHOLE: Final = 1.5
"""A request for a whole machine has no second-best place, so it counts more than its share."""
FULL: Final = 1e-9
"""Relative slack below which two ring bandwidths count as equal."""


@lru_cache(maxsize=256)
def relative_qualities(machine: Machine) -> Floats:
    """Ring bandwidth of every set, relative to the best set of its size on the empty machine; 1 below two members."""
    ring = qualities(machine).ring_gbps
    sizes = sizes_of(machine.count)
    relative = np.ones(len(ring))
    for size in range(2, machine.count + 1):
        members = sizes == size
        relative[members] = ring[members] / ring[members].max()
    relative.flags.writeable = False
    return relative


@lru_cache(maxsize=256)
def losses(machine: Machine, demand: Demand = PRIOR) -> Floats:
    """Expected GPUs lost to fragmentation, for every free mask."""
    sizes = sizes_of(machine.count)
    loss = np.zeros(1 << machine.count)
    for count, share in served_shares(machine, demand):
        weight = share * (WHOLE if count == machine.count else 1)
        loss += weight * (sizes - count * fits(machine, count).most)
    loss.flags.writeable = False
    return loss


def served_shares(machine: Machine, demand: Demand) -> tuple[tuple[int, float], ...]:
    """Sizes that the machine can serve, each with its share of the GPUs of all those sizes."""
    asked = [(count, count * share) for count, share in demand.shares if count <= machine.count]
    total = sum(gpus for _, gpus in asked)
    return tuple((count, gpus / total) for count, gpus in asked)


@dataclass(frozen=True, slots=True, eq=False)
class Fits:
    """most: disjoint sets that fit, per free mask; exact: SETS_MAX was not reached."""

    most: Ints
    exact: bool


@lru_cache(maxsize=1024)
def fits(machine: Machine, count: int) -> Fits:
    """Most disjoint sets of `count` GPUs of full quality, for every free mask."""
    sizes = sizes_of(machine.count)
    full = np.flatnonzero((sizes == count) & (relative_qualities(machine) >= 1 - FULL))
    alike = len(full) == int((sizes == count).sum())
    if alike or len(full) > SETS_MAX:
        return Fits(most=sizes // count, exact=alike)
    return Fits(most=_most_disjoint(machine.count, [int(mask) for mask in full]), exact=True)


def losses_exact(machine: Machine, demand: Demand = PRIOR) -> bool:
    """True if the losses contain no estimate."""
    return all(fits(machine, count).exact for count, _ in demand.shares if count <= machine.count)


def _most_disjoint(count: int, sets: list[int]) -> Ints:
    """Dynamic program over masks by their highest position: leave it out, or take one set that contains it."""
    most = np.zeros(1 << count, dtype=np.int64)
    below = np.arange(1 << count, dtype=np.int64)
    for position in range(count):
        bit = 1 << position
        best = most[:bit].copy()
        for chosen in (mask for mask in sets if mask.bit_length() == position + 1):
            others = chosen ^ bit
            holders = below[:bit][_contains(below[:bit], others)]
            best[holders] = np.maximum(best[holders], most[holders ^ others] + 1)
        most[bit : 2 * bit] = best
    return most


def _contains(masks: npt.NDArray[np.int64], part: int) -> Bools:
    contains: Bools = masks & part == part
    return contains
