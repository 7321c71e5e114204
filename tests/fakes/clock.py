"""A clock that tests move by hand.

`advance` goes from alarm to alarm and lets every task that wakes run until it waits again, so the code under test sees
time pass in order. Only network input and output take real time.
"""

import asyncio
import heapq
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

SETTLE_ROUNDS_MAX = 10_000


class ManualClock:
    """Implements the Clock protocols of atoll.kube and atoll.service."""

    def __init__(self, start: datetime = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = 0.0
        self._alarms: list[tuple[float, int, asyncio.Future[None]]] = []
        self._sequence = 0

    def monotonic_seconds(self) -> float:
        return 1000.0 + self._elapsed

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        alarm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._alarms, (self._elapsed + seconds, self._sequence, alarm))
        await alarm

    @property
    def sleepers(self) -> int:
        return sum(1 for _, _, alarm in self._alarms if not alarm.done())

    def next_alarm_seconds(self) -> float | None:
        """Return the seconds until the next alarm, or None."""
        pending = [due for due, _, alarm in self._alarms if not alarm.done()]
        return min(pending) - self._elapsed if pending else None

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, waking sleepers in order."""
        await settle()
        target = self._elapsed + seconds
        while self._alarms and self._alarms[0][0] <= target:
            due, _, alarm = heapq.heappop(self._alarms)
            if alarm.done():
                continue
            self._elapsed = max(self._elapsed, due)
            alarm.set_result(None)
            await settle()
        self._elapsed = target
        await settle()


async def settle() -> None:
    """Run all tasks until they wait for the clock, for input, or for each other."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(SETTLE_ROUNDS_MAX):
        await asyncio.sleep(0)
        if not ready:
            return
    raise AssertionError("tasks keep waking each other without waiting: a busy loop")


async def until(condition: Callable[[], object], *, timeout_seconds: float = 10.0) -> None:
    """Wait for a condition that depends on network input. Raises TimeoutError."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - the condition belongs to code that knows no test
            await asyncio.sleep(0.001)
