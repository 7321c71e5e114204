"""Ranks of a pod set's members: members that communicate most get neighbouring ranks.

Job controllers write an index on each pod. If one is missing or repeated, the pods' names give the order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_NUMBER: Final = re.compile(r"([0-9]+)")


def ranks(members: Sequence[tuple[str, int | None]]) -> tuple[int, ...]:
    """Return one rank per member, in the order given. A member is its name and its index.

    The indices are the ranks if every member has one and all differ. Otherwise ranks are 0..n-1 in the order of the
    names, with numbers inside names by value: worker-2 comes before worker-10. Equal names keep their order.
    """
    indices = [index for _, index in members if index is not None]
    if len(set(indices)) == len(members):
        return tuple(indices)
    order = sorted(range(len(members)), key=lambda position: _natural(members[position][0]))
    rank_of = {position: rank for rank, position in enumerate(order)}
    return tuple(rank_of[position] for position in range(len(members)))


def _natural(name: str) -> tuple[tuple[str, int, str], ...]:
    """Return the texts of a name, each with the number after it as (length, digits) without leading zeros."""
    pieces = [*_NUMBER.split(name), ""]
    digits = [piece.lstrip("0") for piece in pieces[1::2]]
    return tuple((text, len(digit), digit) for text, digit in zip(pieces[::2], digits, strict=True))
