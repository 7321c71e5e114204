"""Rate limits of users and of queues: each has a bucket of requests that refills."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from atoll.kube.limits import TokenBucket

NAMES_MAX: Final = 10_000
"""Users or queues that are remembered; whoever was away longest begins anew."""


class RateLimits:
    """How many requests each user may send, or each queue take."""

    def __init__(self, per_second: float, burst: int, *, now: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._now = now
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def try_take(self, name: str) -> bool:
        """Count a request; False if there were too many."""
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = TokenBucket(rate=self._per_second, burst=self._burst, now=self._now)
        self._buckets.move_to_end(name)
        while len(self._buckets) > NAMES_MAX:
            self._buckets.popitem(last=False)
        return bucket.try_take()
