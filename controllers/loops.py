"""One loop around each reconciler: changes and resyncs add keys, workers reconcile them.

Each key is reconciled by one worker at a time; a failed key comes back after a back-off.
"""

import asyncio
from collections.abc import Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import structlog

from atoll.kube.cache import Change
from atoll.kube.errors import truncate
from atoll.kube.mirror import WatchedKind
from atoll.kube.workqueue import WorkQueue
from atoll.service.clock import Clock
from controllers.errors import NotLeading
from controllers.metrics import ControllerMetrics

log = structlog.get_logger(__name__)

WORKERS = 8
"""Keys that one loop works on at a time: a hundred pods that end at once are not released one after another."""

KEY = TypeVar("KEY", bound=Hashable)


class Reconciler(Protocol[KEY]):
    """Brings the objects of one key to what they should be."""

    name: str

    def affected(self, kind: WatchedKind, change: Change[Any]) -> Iterable[KEY]:
        """Return the keys that a change concerns; called for every change, so it must be quick."""
        ...

    def all_keys(self) -> Iterable[KEY]:
        """Return every key that a resync must look at."""
        ...

    async def reconcile(self, key: KEY) -> float | None:
        """Act on one key; return seconds after which to look again. Raises KubeError to be called again later."""
        ...


class Loop(Generic[KEY]):
    """The queue and the workers of one reconciler."""

    def __init__(
        self, reconciler: Reconciler[KEY], clock: Clock, metrics: ControllerMetrics, *, delay_seconds: float = 0.0
    ) -> None:
        """`delay_seconds` lets changes that belong together arrive before their key is looked at."""
        self._reconciler = reconciler
        self._metrics = metrics
        self._delay_seconds = delay_seconds
        self._queue: WorkQueue[KEY] = WorkQueue(clock, backoff_max_seconds=30.0)
        self.name = reconciler.name
        self._queue.observer = metrics.queue_seconds.labels(self.name).observe
        metrics.reconcile_failures.labels(self.name)
        metrics.queue_keys.labels(self.name).set_function(lambda: float(len(self._queue)))

    def observe(self, kind: WatchedKind, change: Change[Any]) -> None:
        """Take a change of the mirror."""
        for key in self._reconciler.affected(kind, change):
            self._queue.add_after(key, self._delay_seconds)

    def add(self, key: KEY) -> None:
        """Look at a key soon."""
        self._queue.add(key)

    def add_after(self, key: KEY, seconds: float) -> None:
        """Look at a key after a while."""
        self._queue.add_after(key, seconds)

    def resync(self) -> None:
        """Look at everything again."""
        for key in self._reconciler.all_keys():
            self._queue.add(key)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._queue.work(self._handle))

    async def run_once(self) -> None:
        """Look at everything once, key by key; what fails is logged."""
        for key in sorted(self._reconciler.all_keys(), key=str):
            try:
                await self._handle(key)
            except Exception as error:  # noqa: BLE001 - one key's trouble must not stop the others
                log.warning("Could not reconcile", loop=self.name, key=str(key), err=truncate(str(error)))

    async def _handle(self, key: KEY) -> float | None:
        """Reconcile one key, then let others run: most keys of a resync need no waiting at all."""
        try:
            with self._metrics.reconcile_seconds.labels(self.name).time():
                return await self._reconciler.reconcile(key)
        except NotLeading:
            raise
        except Exception:
            self._metrics.reconcile_failures.labels(self.name).inc()
            raise
        finally:
            await asyncio.sleep(0)
