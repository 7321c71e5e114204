"""Decodes objects that are nested deeper than Python's own limit.

The API server takes 10,000 levels of `metadata.managedFields` from whoever may write an object, and a watch that fails
at one object fails for all others.
"""

import sys
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

LEVELS_MAX: Final = 10_000
"""Of one object in the API server."""
_AROUND: Final = 1_000
"""Levels of lists and events around an object, and calls of the decoder."""


def at_any_depth(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Return the decoder, which passes over whatever depth the API server stores; what it keeps is shallow."""

    def decode_deep(raw: bytes) -> T:
        try:
            return decode(raw)
        except RecursionError:
            usual = sys.getrecursionlimit()
        sys.setrecursionlimit(usual + LEVELS_MAX + _AROUND)
        try:
            return decode(raw)
        finally:
            sys.setrecursionlimit(usual)

    return decode_deep
