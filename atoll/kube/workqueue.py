"""Queue of keys that need work, each at most once in the queue and never processed concurrently.

A key added during its processing comes back afterwards. Failed keys come back after an exponential wait per key.

    add ──► waiting ──► get ──► processing ──► done
             ▲  ▲                   │ add meanwhile
             │  └───────────────────┘ (comes back at done)
    add_after / retry: delayed until due, then waiting
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

import structlog

from atoll.kube.clock import Clock, end
from atoll.kube.errors import truncate

log = structlog.get_logger(__name__)
K = TypeVar("K", bound=Hashable)


def _ignore(_seconds: float) -> None:
    """Observe nothing."""


class WorkQueue(Generic[K]):
    """A queue of distinct keys with delays and per-key back-off."""

    def __init__(self, clock: Clock, *, backoff_base_seconds: float = 0.1, backoff_max_seconds: float = 60.0) -> None:
        self._clock = clock
        self._base_seconds = backoff_base_seconds
        self._max_seconds = backoff_max_seconds
        self._waiting: OrderedDict[K, float] = OrderedDict()
        self._processing: set[K] = set()
        self._again: set[K] = set()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()
        self.observer: Callable[[float], None] = _ignore
        """Called for every key taken, with the seconds it waited for a worker."""

    def __len__(self) -> int:
        """Return the number of keys that wait now."""
        return len(self._waiting)

    @property
    def delayed_count(self) -> int:
        return len(self._due)

    def add(self, key: K) -> None:
        """Work on `key` soon. Adding it again before its work starts changes nothing."""
        self._due.pop(key, None)
        if key in self._processing:
            self._again.add(key)
            return
        self._waiting.setdefault(key, self._clock.monotonic_seconds())
        self._wake.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Work on `key` after `seconds`; of several requests for one key the earliest counts."""
        due = self._clock.monotonic_seconds() + seconds
        if seconds <= 0 or key in self._waiting:
            self.add(key)
        elif due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._sequence += 1
            heapq.heappush(self._heap, (due, self._sequence, key))
            if self._heap[0][2] == key:
                self._wake.set()

    def retry(self, key: K) -> None:
        """Work on `key` again after its own back-off, which doubles until `forget`."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self.add_after(key, min(self._max_seconds, self._base_seconds * 2.0 ** min(failures, 32)))

    def forget(self, key: K) -> None:
        """Start the back-off of `key` from the beginning."""
        self._failures.pop(key, None)

    async def get(self) -> K:
        """Wait for a key and take it; the caller must call `done` for it."""
        while True:
            self._collect_due()
            if self._waiting:
                key, since_seconds = self._waiting.popitem(last=False)
                self.observer(self._clock.monotonic_seconds() - since_seconds)
                self._processing.add(key)
                return key
            await self._wait_for_change()

    def done(self, key: K) -> None:
        """End the work on `key`; if it was added meanwhile it waits again."""
        self._processing.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    async def work(self, handle: Callable[[K], Awaitable[float | None]]) -> None:
        """Process keys for ever. `handle` returns None, or seconds after which the key comes back; if it raises, the
        key comes back after its back-off. Run several of these for several workers."""
        while True:
            key = await self.get()
            try:
                again_seconds = await handle(key)
            except Exception as error:  # noqa: BLE001 - one key's trouble must not stop the others
                log.warning("Will try again", key=str(key), err=truncate(f"{type(error).__name__}: {error}"))
                self.retry(key)
            else:
                self.forget(key)
                if again_seconds is not None:
                    self.add_after(key, again_seconds)
            finally:
                self.done(key)

    def _collect_due(self) -> None:
        now = self._clock.monotonic_seconds()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                self.add(key)

    async def _wait_for_change(self) -> None:
        """Return when a key was added or the next delayed one is due."""
        self._wake.clear()
        if not self._heap:
            await self._wake.wait()
            return
        alarm = asyncio.ensure_future(self._clock.sleep(self._heap[0][0] - self._clock.monotonic_seconds()))
        added = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({alarm, added}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(alarm, added)
