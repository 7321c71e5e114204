"""Computes the page's overview while somebody watches: bounded, in one thread, never while nobody watches.

The thread rests 24 times as long as it worked (LOOK_PARTS), so that reconcilers keep the core. Explanations of single
pods are computed on the same snapshot. `atoll.explain` builds a ledger of its own: nothing here touches what the
controllers decide on.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import structlog

from atoll.cluster.reports import as_stored
from atoll.explain.decision import IndexedSnapshot, index_snapshot
from atoll.explain.overview import overview
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.cache import Change
from atoll.kube.clock import Clock
from atoll.kube.mirror import AUDIT_REFUSALS, ClusterMirror, WatchedKind
from atoll.service.collector import without_collector
from controllers.page.view import PageView, explanation_of, view_of

log = structlog.get_logger(__name__)

REST_SECONDS_MIN: Final = 2.0
"""Looks are at least this far apart."""
LOOK_PARTS: Final = 25
"""At most this part of a core, 4 %, goes into overviews."""
EXPLAIN_PARTS: Final = 4
"""At most this part of a core goes into explanations, while people ask without pause."""
QUIET_SECONDS_MAX: Final = 15.0
"""An agent becomes stale by time alone, so that an unchanged cluster is read again after this."""
FORGET_SECONDS: Final = 60.0
"""How long the last overview is kept after the last watcher has gone."""
QUESTIONS_MAX: Final = 8
"""Questions that wait for an answer at a time."""

T = TypeVar("T")


class TooManyExplanations(Exception):
    """So many questions wait already that this one is not taken."""


class SnapshotUnavailable(Exception):
    """Nothing can be told of the cluster now; the text says why."""


class OverviewRefresher:
    """The newest overview, and who waits for the next."""

    def __init__(self, mirror: ClusterMirror, clock: Clock) -> None:
        self._mirror = mirror
        self._clock = clock
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="page")
        self._working = asyncio.Lock()
        self._changes_count = 0
        self._looked_at_change = -1
        self.refreshed_seconds = -math.inf
        self.rest_seconds = 0.0
        self._next_answer_seconds = 0.0
        self._answers: dict[tuple[str, str], bytes] = {}
        self._questions = 0
        self._snapshot: IndexedSnapshot | None = None
        self._news = asyncio.Event()
        self.watchers = 0
        self.spent_seconds = 0.0
        """CPU time of overviews and explanations since the start."""
        self.view: PageView | None = None
        self.trouble = ""
        self.is_over = False
        mirror.on_change(self._count_change)

    async def run(self) -> None:
        """Look while somebody watches, until cancelled."""
        while True:
            await self._clock.sleep(0.5 if self._snapshot is None else REST_SECONDS_MIN)
            if self.watchers:
                await self.refresh()
            elif self._clock.monotonic_seconds() - self.refreshed_seconds > FORGET_SECONDS:
                self._snapshot, self.view, self._answers = None, None, {}

    async def refresh(self) -> None:
        """Compute an overview, unless the last is fresh or the worker has to rest; then wake whoever waits."""
        if self._working.locked():
            return
        reason = self._mirror.unready_reason()
        if reason:
            self._notify(reason)
            return
        if not self._is_due():
            return
        try:
            await self._compute()
        except Exception:
            log.exception("Failed to compute the overview")
            self.rest_seconds = QUIET_SECONDS_MAX
            self._notify("the cluster cannot be shown: the log of the controllers says why")
        else:
            self._notify("")

    async def changed(self, seconds: float) -> None:
        """Return when there is something new to tell, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    async def explanation(self, namespace: str, name: str) -> bytes | None:
        """Return why a pod waits and what would help, as of the last overview; None where there is no such pod.

        Raises TooManyExplanations and SnapshotUnavailable.
        """
        known = self._answers.get((namespace, name))
        if known is not None:
            return known
        if self._questions >= QUESTIONS_MAX:
            raise TooManyExplanations
        self._questions += 1
        try:
            return await self._answer(namespace, name)
        finally:
            self._questions -= 1

    def begin(self) -> None:
        """Let watchers come."""
        self.is_over = False

    def end(self) -> None:
        """Let whoever waits go: the server stops."""
        self.is_over = True
        self._news.set()

    def close(self) -> None:
        """Give the thread back."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _is_due(self) -> bool:
        age = self._clock.monotonic_seconds() - self.refreshed_seconds
        if age < max(REST_SECONDS_MIN, self.rest_seconds):
            return False
        return self._looked_at_change != self._changes_count or age > QUIET_SECONDS_MAX or bool(self.trouble)

    async def _compute(self) -> None:
        async with self._working:
            snapshot = snapshot_of(self._mirror, self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
            count = self._changes_count
            (indexed, view), spent = await self._work(lambda: _overview_of(snapshot))
            self._snapshot, self.view, self._answers = indexed, view, {}
            self._looked_at_change, self.refreshed_seconds = count, self._clock.monotonic_seconds()
            self.rest_seconds = spent * (LOOK_PARTS - 1)

    async def _answer(self, namespace: str, name: str) -> bytes | None:
        if self._snapshot is None:
            await self.refresh()
        async with self._working:
            indexed = self._snapshot
            if indexed is None:
                raise SnapshotUnavailable(self.trouble or "there is no overview of the cluster yet")
            if (namespace, name) in self._answers:
                return self._answers[(namespace, name)]
            pod = indexed.snapshot.pod(namespace, name)
            if pod is None:
                return None
            await self._clock.sleep(self._next_answer_seconds - self._clock.monotonic_seconds())
            answer, spent = await self._work(lambda: explanation_of(indexed, pod))
            self._next_answer_seconds = self._clock.monotonic_seconds() + spent * (EXPLAIN_PARTS - 1)
            self._answers[(namespace, name)] = answer
            return answer

    async def _work(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run in the one thread; return the result and how many seconds of a core it took."""
        result, spent = await asyncio.get_running_loop().run_in_executor(self._worker, _undisturbed, work)
        self.spent_seconds += spent
        return result, spent

    def _notify(self, trouble: str) -> None:
        self.trouble = trouble
        self._news.set()
        if not self.is_over:
            self._news = asyncio.Event()

    def _count_change(self, _kind: WatchedKind, _change: Change[Any]) -> None:
        self._changes_count += 1


def snapshot_of(mirror: ClusterMirror, taken_at: str) -> ClusterSnapshot:
    """Return the objects that the mirror holds now, as commands of `atoll` would list them."""
    return ClusterSnapshot(
        taken_at=taken_at,
        nodes=tuple(mirror.nodes.store.values()),
        pods=tuple(mirror.pods.store.values()),
        claims=tuple(mirror.claims.store.values()),
        reports=tuple(mirror.node_statuses.store.values()),
        leases=tuple(mirror.leases.store.values()),
        heartbeats=tuple(map(as_stored, mirror.heartbeats.store.values())),
        reservations=tuple(mirror.reservations.store.values()),
        gangs=tuple(mirror.gangs.store.values()) if mirror.gangs is not None else (),
        topologies=tuple(mirror.topologies.store.values()) if mirror.topologies is not None else (),
        volumes=tuple(mirror.volumes.store.values()) if mirror.volumes is not None else (),
        volume_claims=tuple(mirror.volume_claims.store.values()) if mirror.volume_claims is not None else (),
        storage_classes=tuple(mirror.storage_classes.store.values()) if mirror.storage_classes is not None else None,
        csi_nodes=tuple(mirror.csi_nodes.store.values()) if mirror.csi_nodes is not None else (),
        csi_drivers=tuple(mirror.csi_drivers.store.values()) if mirror.csi_drivers is not None else (),
        storage_capacities=tuple(mirror.capacities.store.values()) if mirror.capacities is not None else (),
        namespaces=tuple(mirror.namespaces.store.values()) if mirror.namespaces is not None else (),
        refused={node: why for node, why in mirror.ledger.uncounted.items() if why in AUDIT_REFUSALS},
    )


def _undisturbed(work: Callable[[], T]) -> tuple[T, float]:
    """A full collection among the objects of an overview would delay the event loop; there are no cycles in them."""
    before = time.thread_time()
    with without_collector():
        result = work()
    return result, time.thread_time() - before


def _overview_of(snapshot: ClusterSnapshot) -> tuple[IndexedSnapshot, PageView]:
    indexed = index_snapshot(snapshot)
    return indexed, view_of(overview(indexed))
