"""An event loop without sockets whose time passes only when nothing is left to do now.

A history of minutes takes milliseconds, and the same seed gives the same interleaving: whatever order callbacks run in
follows from the delays that the simulation draws, and from nothing of this machine.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


class Deadlock(Exception):
    """Every task waits for another one; no time will wake any of them."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Jumps from timer to timer. `time` is virtual seconds since the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_seconds = 0.0
        self._clock_resolution = 1e-9
        self._selector = self

    def __del__(self) -> None:
        """Nothing was opened, and tasks that are thrown away may still look for their loop."""

    def time(self) -> float:
        """Return virtual seconds."""
        return self._virtual_seconds

    def select(self, timeout: float | None) -> list[Any]:
        """Take the place of the selector: nothing ever comes from outside, so only time can go on."""
        if timeout is None:
            raise Deadlock("all tasks wait for each other")
        self._virtual_seconds += max(0.0, timeout)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class VirtualClock:
    """Fits the Clock protocols. Every process has its own idea of the wall time and its own zero of elapsed time."""

    def __init__(self, loop: VirtualLoop, *, skew_seconds: float = 0.0) -> None:
        self._loop = loop
        self._skew = skew_seconds

    def monotonic_seconds(self) -> float:
        """Seconds since an arbitrary moment."""
        return 1000.0 + self._loop.time()

    def now(self) -> datetime:
        """Wall time of this machine."""
        return START + timedelta(seconds=self._loop.time() + self._skew)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(max(0.0, seconds))
