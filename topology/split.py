"""Splits one allocation into disjoint, well-linked parts, one per container with its own count.

Parts are in container order. Up to EXACT_POSITIONS_MAX positions all splits are tried; above, each container in turn
takes its best part. Order of splits: most relative quality summed over the parts, then the parts, lexicographically.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from topology.errors import PositionError
from topology.fragmentation import relative_qualities
from topology.model import Machine, mask_of
from topology.quality import TABLE_DEVICES_MAX, rate

EXACT_POSITIONS_MAX: Final = 8
DECIMALS: Final = 6

Parts = tuple[tuple[int, ...], ...]


def split(machine: Machine, positions: Sequence[int], counts: Sequence[int]) -> Parts:
    """Parts of the given sizes, in the order of `counts`; a count of 0 gives an empty part.

    Raises PositionError if the counts do not add up to the positions, or the positions are not the machine's.
    """
    ordered = tuple(sorted(set(positions)))
    if len(ordered) != len(positions) or not ordered or not 0 <= ordered[0] <= ordered[-1] < machine.count:
        raise PositionError(f"needs distinct positions below {machine.count}", value=tuple(positions))
    if any(count < 0 for count in counts) or sum(counts) != len(ordered):
        raise PositionError(f"counts must add up to {len(ordered)}", value=tuple(counts))
    return _split(machine, ordered, tuple(counts))


@lru_cache(maxsize=4096)
def _split(machine: Machine, positions: tuple[int, ...], counts: tuple[int, ...]) -> Parts:
    if len(positions) > EXACT_POSITIONS_MAX:
        return _one_by_one(machine, positions, counts)
    return _best_split(machine, positions, counts)[1]


@lru_cache(maxsize=16384)
def _best_split(machine: Machine, positions: tuple[int, ...], counts: tuple[int, ...]) -> tuple[float, Parts]:
    """(minus the worth, parts) of the best split: the first part tried in every way, the others by recursion."""
    if not counts:
        return 0.0, ()

    def with_first(part: tuple[int, ...]) -> tuple[float, Parts]:
        others = tuple(position for position in positions if position not in part)
        worth, parts = _best_split(machine, others, counts[1:])
        return round(worth - _worth(machine, part), DECIMALS), (part, *parts)

    return min(with_first(part) for part in itertools.combinations(positions, counts[0]))


def _one_by_one(machine: Machine, positions: tuple[int, ...], counts: tuple[int, ...]) -> Parts:
    parts: list[tuple[int, ...]] = []
    left = positions
    for count in counts:
        part = _best_part(machine, left, count)
        parts.append(part)
        left = tuple(position for position in left if position not in part)
    return tuple(parts)


def _best_part(machine: Machine, positions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy: from every start, grow by the device that keeps the ring best."""
    if count == 0:
        return ()

    def grown(start: int) -> tuple[int, ...]:
        members: tuple[int, ...] = (start,)
        while len(members) < count:
            others = (tuple(sorted((*members, other))) for other in positions if other not in members)
            members = min(others, key=lambda part: (-rate(machine, part).ring_gbps, part))
        return members

    return min((grown(start) for start in positions), key=lambda part: (-_worth(machine, part), part))


def _worth(machine: Machine, part: tuple[int, ...]) -> float:
    """Quality of one part: relative to the best set of its size if the machine has tables, else GB/s."""
    if len(part) < 2:
        return 0.0
    if machine.count <= TABLE_DEVICES_MAX:
        return float(relative_qualities(machine)[mask_of(part)])
    return rate(machine, part).ring_gbps
