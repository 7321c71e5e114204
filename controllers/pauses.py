"""Keys that are left alone for a while, also when changes wake them: their last write was refused.

A refusal lasts, and the writes around it change objects that wake the same key again. Without a pause that is a loop
without end.
"""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from atoll.kube.clock import Clock

K = TypeVar("K", bound=Hashable)
REFUSED_SECONDS: Final = 30.0


class Pauses(Generic[K]):
    """When each refused key may be worked on again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[K, float] = {}

    def begin(self, key: K) -> float:
        """Leave a key alone from now on; return for how long."""
        now = self._clock.monotonic_seconds()
        self._ends = {one: end for one, end in self._ends.items() if end > now} | {key: now + REFUSED_SECONDS}
        return REFUSED_SECONDS

    def left_seconds(self, key: K) -> float:
        """Return how long a key is left alone yet; 0 when it may be worked on."""
        return max(0.0, self._ends.get(key, 0.0) - self._clock.monotonic_seconds())
