"""Rate limits and retry budgets of one component's calls to the API server, and turns of the event loop between large
answers. The clock is passed in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable

BACKOFF_BASE_SECONDS = 0.2
BACKOFF_MAX_SECONDS = 30.0
LARGE_BYTES = 64 * 1024


async def in_turns(objects: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the objects of a page; after each large one whatever else waits on the event loop has a turn."""
    for raw in objects:
        yield raw
        if len(raw) > LARGE_BYTES:
            await asyncio.sleep(0)


class TokenBucket:
    """`rate` tokens per second, at most `burst` saved up. A reservation may go into debt: its caller waits first."""

    def __init__(self, *, rate: float, burst: float, now: Callable[[], float]) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError(f"rate must be > 0 and burst >= 1, not {rate} and {burst}")
        self._rate = rate
        self._burst = burst
        self._now = now
        self._tokens = burst
        self._updated = now()

    def reserve(self) -> float:
        """Take one token and return the seconds until it is available."""
        self._refill()
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)

    def try_take(self) -> bool:
        """Take one token if there is one."""
        self._refill()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """Return a reserved token that was not used."""
        self._tokens = min(self._burst, self._tokens + 1)

    def _refill(self) -> None:
        now = self._now()
        self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        self._updated = now


class RetryBudget:
    """Limits retries while most calls fail: a retry costs one token, a success earns a tenth of one.

    So an API server in trouble sees at most about 10 % more calls than without retries.
    """

    def __init__(self, *, tokens_max: float = 10.0, earned_per_success: float = 0.1) -> None:
        self._tokens_max = tokens_max
        self._earned = earned_per_success
        self._tokens = tokens_max

    def try_spend(self) -> bool:
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def earn(self) -> None:
        self._tokens = min(self._tokens_max, self._tokens + self._earned)


class Backoff:
    """Exponential waits with jitter: half of the step is fixed, half random, so that peers spread out."""

    def __init__(
        self,
        rng: random.Random,
        *,
        base_seconds: float = BACKOFF_BASE_SECONDS,
        max_seconds: float = BACKOFF_MAX_SECONDS,
    ) -> None:
        self._rng = rng
        self._base = base_seconds
        self._max = max_seconds
        self.failures = 0

    def next_seconds(self) -> float:
        """Return the next wait, between half and the whole of min(max, base * 2**failures)."""
        step = min(self._max, self._base * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return step * (0.5 + 0.5 * self._rng.random())

    def reset(self) -> None:
        self.failures = 0
