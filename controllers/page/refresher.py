"""Looks at the cluster for whoever watches the page: bounded, off the event loop, and none while nobody watches.

In: the mirror of the controllers, a clock. Out: the newest View, explanations of single pods on the same state, and a
word when something changed. One thread computes; it rests 24 times as long as it worked (LOOK_PARTS), so reconcilers
keep the core. Looks and answers are computed by `atoll.explain` on a ledger of their own: nothing here touches what
the controllers decide on.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import structlog

from atoll.explain.decision import IndexedSnapshot, index_snapshot
from atoll.explain.overview import overview
from atoll.explain.snapshot import ClusterSnapshot
from atoll.kube.cache import Change
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror, WatchedKind
from atoll.service.collector import without_collector
from controllers.page.view import PageView, explanation_of, view_of

log = structlog.get_logger(__name__)

REST_SECONDS_MIN: Final = 2.0
"""Looks are at least this far apart."""
LOOK_PARTS: Final = 25
"""At most this part of a core, 4 %, goes into looks."""
EXPLAIN_PARTS: Final = 4
"""At most this part of a core goes into explanations, while people ask without pause."""
QUIET_SECONDS_MAX: Final = 15.0
"""An agent falls silent by time alone, so a cluster without any change is looked at all the same."""
FORGET_SECONDS: Final = 60.0
"""How long the last look is kept after the last watcher has gone."""
QUESTIONS_MAX: Final = 8
"""Questions that wait for an answer at a time."""

T = TypeVar("T")


class TooManyExplanations(Exception):
    """So many questions wait already that this one is not taken."""


class SnapshotUnavailable(Exception):
    """Nothing can be told of the cluster now; the text says why."""


class OverviewRefresher:
    """The newest look, and who waits for the next."""

    def __init__(self, mirror: ClusterMirror, clock: Clock) -> None:
        self._mirror = mirror
        self._clock = clock
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="page")
        self._working = asyncio.Lock()
        self._changes_count = 0
        self._looked_at_change = -1
        self._looked_seconds = -math.inf
        self._rest_seconds = 0.0
        self._next_answer_seconds = 0.0
        self._answers: dict[tuple[str, str], bytes] = {}
        self._questions = 0
        self._scene: IndexedSnapshot | None = None
        self._told = asyncio.Event()
        self.watchers = 0
        self.spent_seconds = 0.0
        """CPU time of looks and answers since the start."""
        self.view: PageView | None = None
        self.trouble = ""
        self.is_over = False
        mirror.on_change(self._note_change)

    async def run(self) -> None:
        """Look while somebody watches, until cancelled."""
        while True:
            await self._clock.sleep(0.5 if self._scene is None else REST_SECONDS_MIN)
            if self.watchers:
                await self.refresh()
            elif self._clock.monotonic_seconds() - self._looked_seconds > FORGET_SECONDS:
                self._scene, self.view, self._answers = None, None, {}

    async def refresh(self) -> None:
        """Look once, unless the last look is as good as new or the worker has to rest. Tells whoever waits."""
        if self._working.locked():
            return
        reason = self._mirror.unready_reason()
        if reason:
            self._tell(reason)
            return
        if not self._is_due():
            return
        try:
            await self._look()
        except Exception:
            log.exception("Failed to look at the cluster")
            self._rest_seconds = QUIET_SECONDS_MAX
            self._tell("the cluster cannot be shown: the log of the controllers says why")
        else:
            self._tell("")

    async def changed(self, seconds: float) -> None:
        """Return when there is something new to tell, or after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._told.wait()
        except TimeoutError:
            return

    async def explanation(self, namespace: str, name: str) -> bytes | None:
        """Return why a pod waits and what would help, as of the last look; None where there is no such pod.

        Raises TooManyQuestions and Unready.
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
        self._told.set()

    def close(self) -> None:
        """Give the thread back."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _is_due(self) -> bool:
        age = self._clock.monotonic_seconds() - self._looked_seconds
        if age < max(REST_SECONDS_MIN, self._rest_seconds):
            return False
        return self._looked_at_change != self._changes_count or age > QUIET_SECONDS_MAX or bool(self.trouble)

    async def _look(self) -> None:
        async with self._working:
            snapshot = snapshot_of(self._mirror, self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"))
            count = self._changes_count
            (scene, view), spent = await self._work(lambda: _overview_of(snapshot))
            self._scene, self.view, self._answers = scene, view, {}
            self._looked_at_change, self._looked_seconds = count, self._clock.monotonic_seconds()
            self._rest_seconds = spent * (LOOK_PARTS - 1)

    async def _answer(self, namespace: str, name: str) -> bytes | None:
        if self._scene is None:
            await self.refresh()
        async with self._working:
            scene = self._scene
            if scene is None:
                raise SnapshotUnavailable(self.trouble or "the cluster was not looked at yet")
            if (namespace, name) in self._answers:
                return self._answers[(namespace, name)]
            pod = scene.snapshot.pod(namespace, name)
            if pod is None:
                return None
            await self._clock.sleep(self._next_answer_seconds - self._clock.monotonic_seconds())
            answer, spent = await self._work(lambda: explanation_of(scene, pod))
            self._next_answer_seconds = self._clock.monotonic_seconds() + spent * (EXPLAIN_PARTS - 1)
            self._answers[(namespace, name)] = answer
            return answer

    async def _work(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run in the one thread; return the result and how many seconds of a core it took."""
        result, spent = await asyncio.get_running_loop().run_in_executor(self._worker, _undisturbed, work)
        self.spent_seconds += spent
        return result, spent

    def _tell(self, trouble: str) -> None:
        self.trouble = trouble
        self._told.set()
        if not self.is_over:
            self._told = asyncio.Event()

    def _note_change(self, _kind: WatchedKind, _change: Change[Any]) -> None:
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
        heartbeats=tuple(mirror.heartbeats.store.values()),
        gangs=tuple(mirror.gangs.store.values()) if mirror.gangs is not None else (),
        topologies=tuple(mirror.topologies.store.values()) if mirror.topologies is not None else (),
    )


def _undisturbed(work: Callable[[], T]) -> tuple[T, float]:
    """A full collection among the objects of a look would hold up the event loop; there are no cycles in them."""
    before = time.thread_time()
    with without_collector():
        result = work()
    return result, time.thread_time() - before


def _overview_of(snapshot: ClusterSnapshot) -> tuple[IndexedSnapshot, PageView]:
    scene = index_snapshot(snapshot)
    return scene, view_of(overview(scene))
