"""Protocol of a clock for this package.

`atoll.service.clock.SystemClock` implements it; tests pass one that they move by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import datetime
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time, wall time and waiting."""

    def monotonic_seconds(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def now(self) -> datetime:
        """Wall time, timezone-aware."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` for at most `seconds` of `clock`; then cancel it, wait until it ended, and raise TimeoutError."""
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError(f"no result within {seconds:g} s")
        return task.result()
    finally:
        await end(task, alarm)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until every one has ended; their outcomes are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
