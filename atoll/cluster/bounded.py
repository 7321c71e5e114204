"""Bounds what a large object keeps in memory.

Pure. A pod of the API server may have 100,000 tolerations or a condition of a megabyte, and every part that watches
pods would keep them. Of a large pod only the first entries stay, in the order of its fields: its own tenant is
misjudged and nobody else, because kube-scheduler sees the whole pod.
"""

from itertools import takewhile
from typing import Any, Final, TypeVar

import msgspec

LARGE_BYTES: Final = 16 * 1024
"""Size as JSON from which on an object is bounded; ordinary pods are smaller."""
TEXT_MAX: Final = 512
"""Characters kept of one text, such as the message of a condition."""

T = TypeVar("T")


def first(value: T, *, entries_max: int, more: T | None = None) -> T:
    """Return `value` with the first `entries_max` entries of all lists and mappings in it, and its texts cut.

    more: what to add to a sequence that lost anything.
    """
    room = _Room(entries_max)
    kept: T = room.first(value)
    return kept if more is None or room.entries >= 0 else kept + more  # type: ignore[operator]


class _Room:
    """Counts the entries that may still be kept; negative once anything was left out."""

    def __init__(self, entries: int) -> None:
        self.entries = entries

    def first(self, value: Any) -> Any:  # noqa: ANN401 - any field of any object
        if not value:
            return value
        if isinstance(value, str):
            return value[:TEXT_MAX]
        if isinstance(value, msgspec.Struct):
            return type(value)(*(self.first(getattr(value, name)) for name in value.__struct_fields__))
        if isinstance(value, tuple | list):
            return type(value)(self.first(entry) for entry in takewhile(self._takes, value))
        if isinstance(value, dict):
            return {key: self.first(value[key]) for key in takewhile(self._takes, value)}
        return value

    def _takes(self, _entry: object) -> bool:
        self.entries -= 1
        return self.entries >= 0
