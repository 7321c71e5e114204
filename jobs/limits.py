"""Rate limits of users: each has a bucket of requests that refills."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from atoll.kube.limits import TokenBucket

USERS_MAX: Final = 10_000
"""Users that are remembered; whoever was away longest begins anew."""


class UserLimits:
    """How many requests each user may send."""

    def __init__(self, per_second: float, burst: int, *, now: Callable[[], float]) -> None:
        self._per_second = per_second
        self._burst = burst
        self._now = now
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def try_take(self, user: str) -> bool:
        """Count a request; False if the user sent too many."""
        bucket = self._buckets.get(user)
        if bucket is None:
            bucket = self._buckets[user] = TokenBucket(rate=self._per_second, burst=self._burst, now=self._now)
        self._buckets.move_to_end(user)
        while len(self._buckets) > USERS_MAX:
            self._buckets.popitem(last=False)
        return bucket.try_take()
