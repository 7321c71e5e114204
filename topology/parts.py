"""Part of a machine's devices as a machine of their own.

Whole GPUs and slices of GPUs (MIG instances of one profile, replicas of a GPU that several pods share) never serve one
request together: each kind is a class of devices with its own tables. A SubMachine has the devices of one kind and
translates masks both ways, so that the engine need not know why devices are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from topology.errors import PositionError
from topology.model import Machine, Rows, mask_of, near_nics, positions_of
from topology.quality import Ints

PARTS_MAX = 1024


@dataclass(frozen=True, slots=True)
class SubMachine:
    """positions: in the whole machine, ascending; position i of the part is positions[i]."""

    machine: Machine
    positions: tuple[int, ...]
    is_whole: bool

    def inside(self, mask: int) -> int:
        """Translate a mask over the whole to the part; bits outside the part are dropped."""
        if self.is_whole:
            return mask & self.machine.full
        return sum((mask >> position & 1) << index for index, position in enumerate(self.positions))

    def inside_all(self, masks: Ints) -> Ints:
        """`inside` for many masks of a machine with fewer than 63 devices."""
        if self.is_whole:
            return masks & self.machine.full
        inside = masks & 0
        for index, position in enumerate(self.positions):
            inside |= (masks >> position & 1) << index
        return inside

    def outside(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Translate positions in the part to the whole."""
        return tuple(self.positions[position] for position in positions)


@lru_cache(maxsize=PARTS_MAX)
def part_of(machine: Machine, mask: int) -> SubMachine:
    """The devices of the mask as a machine. Raises PositionError if the mask is empty or has positions outside the
    machine."""
    if not 0 < mask <= machine.full:
        raise PositionError(f"a part needs some of positions 0 to {machine.count - 1}", value=mask)
    positions = positions_of(mask)
    if mask_of(positions) == machine.full:
        return SubMachine(machine, positions, is_whole=True)
    small = replace(
        machine,
        links=_cut(machine.links, positions),
        pcie=_cut(machine.pcie, positions) if machine.pcie is not None else None,
        numa=tuple(machine.numa[position] for position in positions),
        nics=_near_nics(machine, positions),
    )
    return SubMachine(small, positions, is_whole=False)


def _near_nics(machine: Machine, positions: tuple[int, ...]) -> Rows | None:
    if machine.nics is None:
        return None
    return near_nics([machine.nics[position] for position in positions], count=len(positions))


def _cut(rows: Rows, positions: tuple[int, ...]) -> Rows:
    return tuple(tuple(rows[row][column] for column in positions) for row in positions)
