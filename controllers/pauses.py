"""Keys that are left alone for a while, also when changes wake them: their last write was refused.

Most refusals last, and the writes around them change objects that wake the same key again. Without a pause that is a
loop without end. The first pause is short: an API server that has just started refuses what it cannot judge yet.
"""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from atoll.kube.clock import Clock

K = TypeVar("K", bound=Hashable)
FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0
FORGET_SECONDS: Final = 60.0
"""A key that was not refused for so long after its pause begins anew."""


class Pauses(Generic[K]):
    """When each refused key may be worked on again; each pause in a row is twice as long."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[K, tuple[float, float]] = {}
        """The end of the last pause, and its length."""

    def begin(self, key: K) -> float:
        """Leave a key alone from now on; return for how long."""
        now = self._clock.monotonic_seconds()
        self._known = {one: pause for one, pause in self._known.items() if pause[0] + FORGET_SECONDS > now}
        _, last_seconds = self._known.get(key, (0.0, FIRST_SECONDS / 2))
        seconds = min(LONGEST_SECONDS, 2 * last_seconds)
        self._known[key] = (now + seconds, seconds)
        return seconds

    def left_seconds(self, key: K) -> float:
        """Return how long a key is left alone yet; 0 when it may be worked on."""
        end, _ = self._known.get(key, (0.0, 0.0))
        return max(0.0, end - self._clock.monotonic_seconds())
