"""Which rank a member has, from the indices that job controllers write on pods.

In: per member, its name, index and sub-group as text. Out: ranks 0..n-1, so that members that talk most to each other
are neighbours. Separate, because labels are somebody else's words and may be missing, repeated or no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

INDEX_MAX: Final = 1 << 20
_NUMBER: Final = re.compile(r"([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Indexed:
    """One member as its labels tell. index: within its sub-group; subgroup: None without sub-groups."""

    name: str
    index: str | None
    subgroup: str | None = None


def ranks(members: Sequence[Indexed], *, count: int, subgroups: int = 0) -> tuple[int, ...] | None:
    """Ranks in the order given, each below `count`; None when the indices are not all there, distinct and in range.

    With sub-groups, rank = sub-group x (count / sub-groups) + index. Callers then fall back to `by_name`.
    """
    size = count // subgroups if subgroups else count
    found: list[int] = []
    for member in members:
        index, subgroup = _number(member.index), _number(member.subgroup) if subgroups else 0
        if index is None or subgroup is None or index >= size or (subgroups and subgroup >= subgroups):
            return None
        found.append(subgroup * size + index)
    return tuple(found) if len(set(found)) == len(found) else None


def by_name(members: Sequence[Indexed]) -> tuple[int, ...]:
    """Ranks by name, numbers inside names by value: worker-2 comes before worker-10."""
    order = sorted(range(len(members)), key=lambda position: (_parts(members[position].name), position))
    rank_of = {position: rank for rank, position in enumerate(order)}
    return tuple(rank_of[position] for position in range(len(members)))


def _number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > len(str(INDEX_MAX)):
        return None
    return int(text)


def _parts(name: str) -> tuple[tuple[str, int], ...]:
    """Text and numbers in turn: re.split puts the numbers at odd places."""
    pieces = _NUMBER.split(name)
    return tuple(
        (pieces[position], int(pieces[position + 1]) if position + 1 < len(pieces) else -1)
        for position in range(0, len(pieces), 2)
    )
