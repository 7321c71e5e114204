"""The leader's work in every registered cluster: follow jobs, keep queues, look after health.

Each cluster has tasks of its own: one that fails is started again later and never stops the others. Clusters that are
registered, changed or removed while this process leads are noticed within seconds.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from atoll.jobs.choosing import ScoreSheet
from atoll.jobs.fitting import capacity_of
from atoll.jobs.model import Job
from atoll.jobs.rendering import render
from atoll.jobs.settings import RenderSettings
from atoll.kube.clock import Clock
from atoll.kube.mirror import ClusterMirror
from atoll.kube.reflector import Reflector
from atoll.service.runtime import supervise
from jobs.accounting import GpuAccounting
from jobs.chooser import ClusterChooser, SnapshotSource, looked_at
from jobs.cluster import JobCluster
from jobs.cluster_store import ClusterState, list_clusters, note_health
from jobs.database import Database
from jobs.following import WATCHED, JobFollower
from jobs.links import ClusterLinks, told
from jobs.log_archive import LogArchive
from jobs.queue_cluster import QueueCluster
from jobs.queue_keeper import QueueKeeper
from jobs.reconciler import JobReconciler
from jobs.records import JobRecord, RegisteredCluster
from jobs.settings import JobServiceSettings

log = structlog.get_logger(__name__)

CLUSTERS_SECONDS: Final = 2.0
"""How often registrations are looked for."""
HEALTH_SECONDS: Final = 15.0
AGAIN_SECONDS: Final = 10.0
"""Pause after the work in a cluster failed."""


class ClusterWork:
    """The work in one cluster."""

    def __init__(self, fleet: "ClusterFleet", cluster: RegisteredCluster) -> None:
        self._fleet = fleet
        self.cluster = cluster
        self.follower: JobFollower | None = None
        self.is_unreachable = False
        """At the last look after its health."""

    # What the reconciler asks for while the cluster is drained

    def is_draining(self) -> bool:
        """Return whether the cluster is drained."""
        return self.cluster.state == ClusterState.DRAINING

    async def choose(self, record: JobRecord, job: Job) -> ScoreSheet:
        """Return the score sheet of a job over all clusters."""
        rendered = render(job, self._fleet.rendering, now_seconds=self._fleet.clock.now().timestamp())
        return await self._fleet.chooser.choose(job, rendered, tenant=record.tenant_id, namespace=record.namespace)

    def moved(self, job_id: str) -> None:
        """Let the new cluster of a job look at it."""
        self._fleet.wake(job_id)

    async def run(self) -> None:
        """Work until cancelled; start again after a failure. The look after health goes on meanwhile, and tells it."""
        await supervise(work=self._again(self._work), health=self._again(self._watch_health))

    async def _again(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the other clusters go on
                log.warning("Work in a cluster failed", cluster=self.cluster.id, err=told(error))
            await self._fleet.clock.sleep(AGAIN_SECONDS)

    async def _work(self) -> None:
        try:
            await supervise(jobs=self._follow(), accounting=self._account())
        finally:
            self.follower = None

    async def _follow(self) -> None:
        fleet, name = self._fleet, self.cluster.id
        client = await fleet.links.client(self.cluster)
        jobs = JobCluster(client, name=name, service_id=fleet.service_id, may_write=fleet.may_write)
        reconciler = JobReconciler(
            fleet.database, jobs, fleet.rendering, fleet.clock, mover=self, archive=fleet.archive
        )
        self.follower = JobFollower(
            client,
            fleet.database,
            reconciler,
            fleet.clock,
            cluster=name,
            service_id=fleet.service_id,
            workers=fleet.settings.workers,
            resync_seconds=fleet.settings.resync_seconds,
        )
        queues = QueueCluster(client, may_write=fleet.may_write)
        keeper = QueueKeeper(
            fleet.database,
            queues,
            fleet.rendering,
            fleet.clock,
            cluster=name,
            service_id=fleet.service_id,
            is_draining=self.is_draining,
        )
        await supervise(jobs=self.follower.run(), queues=keeper.run())

    async def _account(self) -> None:
        """Record the GPU time. That of the service's own cluster is recorded from the mirror of every replica."""
        if self.cluster.id == self._fleet.settings.cluster:
            await asyncio.Event().wait()
        mirror = ClusterMirror(await self._fleet.links.client(self.cluster), self._fleet.clock)
        accounting = self._fleet.accounts(mirror, self.cluster.id)
        await supervise(mirror=mirror.run(), accounting=accounting.run())

    async def _watch_health(self) -> None:
        while True:
            with suppress(SQLAlchemyError):  # the next look writes it
                await self._note_health()
            await self._fleet.clock.sleep(HEALTH_SECONDS)

    async def _note_health(self) -> None:
        found, trouble = await looked_at(self.cluster, self._fleet.source)
        self.is_unreachable = found is None
        loop, thread = asyncio.get_running_loop(), self._fleet.capacity_thread
        capacity = await loop.run_in_executor(thread, capacity_of, found) if found is not None else None
        now, name = self._fleet.clock.now(), self.cluster.id
        await self._fleet.database.write(
            lambda session: note_health(session, name, now=now, trouble=trouble, capacity=capacity)
        )


class HomeWatch:
    """A watch of the service's own cluster, for metrics; its reflector changes with each term of leadership."""

    def __init__(self, fleet: "ClusterFleet", kind: str) -> None:
        self._fleet = fleet
        self._kind = kind

    def _reflector(self) -> Reflector[Any] | None:
        work = self._fleet.works.get(self._fleet.settings.cluster)
        follower = work.follower if work is not None else None
        return follower.reflectors[self._kind] if follower is not None else None

    def seconds_since_heard(self) -> float:
        """Return the age of the copy, seconds; infinity without one."""
        reflector = self._reflector()
        return reflector.seconds_since_heard() if reflector is not None else math.inf

    @property
    def listings_count(self) -> int:
        """Return how often the collection was listed."""
        reflector = self._reflector()
        return reflector.listings_count if reflector is not None else 0

    @property
    def undecodable_count(self) -> int:
        """Return how many objects could not be read."""
        reflector = self._reflector()
        return reflector.undecodable_count if reflector is not None else 0


class ClusterFleet:
    """The work in all clusters; `run` as one task, while this process leads."""

    def __init__(
        self,
        database: Database,
        links: ClusterLinks,
        source: SnapshotSource,
        rendering: RenderSettings,
        clock: Clock,
        settings: JobServiceSettings,
        *,
        service_id: str,
        may_write: Callable[[], bool],
        accounts: Callable[[ClusterMirror, str], GpuAccounting],
        archive: LogArchive | None,
    ) -> None:
        self.database = database
        self.links = links
        self.source = source
        self.chooser = ClusterChooser(database, source, rendering, clock.now)
        self.rendering = rendering
        self.clock = clock
        self.settings = settings
        self.service_id = service_id
        self.may_write = may_write
        self.accounts = accounts
        """Makes what records the GPU time of another cluster than the service's own."""
        self.archive = archive
        self.capacity_thread = ThreadPoolExecutor(1, thread_name_prefix="capacity")
        """Counts the GPUs of each cluster in turn, which takes seconds in a large one."""
        self.works: dict[str, ClusterWork] = {}
        self.watches = {kind: HomeWatch(self, kind) for kind in WATCHED}

    def wake(self, job_id: str) -> None:
        """Let the job's cluster look at it; the others ignore it."""
        for work in self.works.values():
            if work.follower is not None:
                work.follower.queue.add(job_id)

    @property
    def queue_length(self) -> int:
        """Return how many jobs wait to be reconciled."""
        return sum(len(work.follower.queue) for work in self.works.values() if work.follower is not None)

    @property
    def unreachable_count(self) -> int:
        """Return how many clusters could not be read at the last look."""
        return sum(work.is_unreachable for work in self.works.values())

    def resync_age_seconds(self) -> float:
        """Return the longest time since all jobs of a cluster were looked at; NaN for a process that does not lead."""
        ages = [work.follower.resync_age_seconds() for work in self.works.values() if work.follower is not None]
        return max(ages, default=math.nan)

    def home_trouble(self) -> str | None:
        """Return why the service's own cluster was not resynced; None if it was."""
        work = self.works.get(self.settings.cluster)
        if work is None or work.follower is None:
            return "the work in the service's own cluster has not started yet"
        return work.follower.last_resync_error or None

    async def run(self) -> None:
        """Work in every registered cluster until cancelled."""
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await self._look(tasks)
                await self.clock.sleep(CLUSTERS_SECONDS)
        finally:
            self.works.clear()
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _look(self, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Start and stop work as the table of clusters says."""
        try:
            known = {one.id: one for one in await self.database.read(list_clusters)}
        except SQLAlchemyError as error:
            log.warning("Could not read the clusters", err=str(error).partition("\n")[0])
            return
        for name in list(tasks):
            before, now = self.works[name].cluster, known.get(name)
            if now is None or (now.kubeconfig, now.state) != (before.kubeconfig, before.state):
                tasks[name].cancel()
                await asyncio.gather(tasks.pop(name), return_exceptions=True)
                del self.works[name]
            if now is None:
                await self.links.forget(name)
                log.info("Stopped the work in a cluster", cluster=name)
        for name in sorted(known.keys() - tasks.keys()):
            self.works[name] = ClusterWork(self, known[name])
            tasks[name] = asyncio.create_task(self.works[name].run(), name=f"cluster-{name}")
            log.info("Started the work in a cluster", cluster=name, state=known[name].state)
