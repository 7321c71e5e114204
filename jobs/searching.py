"""Searches of whole clusters, which take seconds, on threads beside those on which the service reads its database.

A search cannot be interrupted, so its caller keeps the turn until it has ended, also a caller who went away.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from jobs.errors import SearchesBusy, SearchTooLong

T = TypeVar("T")


class SearchThread:
    """Runs searches of one kind one at a time. `what`: their name in messages, in the plural. `turns_max`: callers at a
    time. `seconds_max`: how long a turn may take."""

    def __init__(self, what: str, *, turns_max: int, seconds_max: float) -> None:
        self._what = what
        self._turns_max = turns_max
        self._seconds_max = seconds_max
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._turns_count = 0
        self._left: list[Future[Any]] = []
        """Searches whose callers went away."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Self]:
        """Have a turn, in which to `run` searches. Raises SearchesBusy if there is none, SearchTooLong after a time."""
        self._left = [one for one in self._left if not one.done()]
        if self._turns_count + len(self._left) >= self._turns_max:
            raise SearchesBusy(self._what)
        self._turns_count += 1
        limit = asyncio.timeout(self._seconds_max)
        try:
            async with limit:
                yield self
        except TimeoutError:
            if limit.expired():
                raise SearchTooLong(self._what, self._seconds_max) from None
            raise
        finally:
            self._turns_count -= 1

    async def run(self, compute: Callable[[], T]) -> T:
        """Return what a search returns; for a caller who has a turn."""
        search = self._threads.submit(compute)
        try:
            return await asyncio.wrap_future(search)
        finally:
            if not search.done():
                self._left.append(search)
