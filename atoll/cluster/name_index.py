"""Rows of thousands of names at once, looked up by arrays.

In: names and their rows. Out: for a sequence of names an array of rows, 0 for a name that is not known. Separate, and
not a dict, because looking five thousand fresh texts up in a dict spends its time waiting for memory: for each name it
visits the key's text and the row's number, wherever they lie. Here the names' hashes are compared in two small arrays
(open addressing, linear probing), so that only the names that are asked for are touched.

Two names count as equal when Python's hashes of them are: 64 bits of SipHash under a secret of this process. Known
names with equal hashes are found when the index is built, and then a dict answers.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

SPACE: Final = 2
"""Slots per name: most names are found in their first slot, and all slots stay in the processor's near memory."""

Ints = npt.NDArray[np.int64]


class NameIndex:
    """The rows of some names; another set of names needs another index."""

    def __init__(self, row_of: Mapping[str, int]) -> None:
        hashes = _hashes(list(row_of))
        slots = 1 << (SPACE * len(row_of) + 1).bit_length()
        self._mask = slots - 1
        self._hashes: Ints = np.zeros(slots, dtype=np.int64)
        self._rows: Ints = np.zeros(slots, dtype=np.int64)
        self._slow = dict(row_of) if len(np.unique(hashes)) < len(hashes) else None
        self._insert(hashes, np.fromiter(row_of.values(), dtype=np.int64, count=len(row_of)))

    def rows_of(self, names: Sequence[str]) -> Ints:
        """Return the row of each name; 0 for one that is not known."""
        if self._slow is not None:
            return np.array([self._slow.get(name, 0) for name in names], dtype=np.int64)
        hashes = _hashes(names)
        slots: Ints = hashes & self._mask
        rows: Ints = self._rows.take(slots)
        others = np.flatnonzero(self._hashes.take(slots) != hashes)
        while len(others):
            strangers = rows[others] == 0
            others = others[~strangers]
            slots[others] = slots[others] + 1 & self._mask
            rows[others] = self._rows[slots[others]]
            others = others[self._hashes[slots[others]] != hashes[others]]
        return rows

    def _insert(self, hashes: Ints, rows: Ints) -> None:
        """Put every name into the first free slot from its own; rows are never 0."""
        slots = hashes & self._mask
        waiting = np.arange(len(rows))
        while len(waiting):
            free = waiting[self._rows[slots[waiting]] == 0]
            _, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            self._hashes[slots[placed]] = hashes[placed]
            self._rows[slots[placed]] = rows[placed]
            waiting = np.setdiff1d(waiting, placed)
            slots[waiting] = np.where(self._rows[slots[waiting]] != 0, slots[waiting] + 1 & self._mask, slots[waiting])


def _hashes(names: Sequence[str]) -> Ints:
    return np.fromiter(map(hash, names), dtype=np.int64, count=len(names))
