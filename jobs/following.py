"""Decides when to reconcile a job: after a change in the cluster, a call of the API, a new record, or a resync.

Watches the objects with this service's label. Several jobs are reconciled at a time, each by one worker. Any signal
may be lost: a resync reconciles every active job and checks all objects of this service.
"""

from typing import Any, Final

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from atoll.api import job_names
from atoll.kube.cache import Change
from atoll.kube.client import ApiClient
from atoll.kube.clock import Clock
from atoll.kube.reflector import Reflector
from atoll.kube.workqueue import WorkQueue
from atoll.service.runtime import supervise
from jobs.cluster import path_of
from jobs.database import Database
from jobs.reconciler import JobReconciler
from jobs.store import active_ids, waiting_jobs

log = structlog.get_logger(__name__)

WATCHED: Final = ("Job", "Deployment", "Pod")
RESYNC_RETRY_SECONDS: Final = 5.0
RECORDS_SECONDS: Final = 2.0


class _Metadata(msgspec.Struct, rename="camel", frozen=True):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}


class _Labelled(msgspec.Struct, frozen=True):
    metadata: _Metadata


class JobFollower:
    """Watches one cluster and reconciles its jobs; `run` as one task, while this process leads."""

    def __init__(
        self,
        client: ApiClient,
        database: Database,
        reconciler: JobReconciler,
        clock: Clock,
        *,
        cluster: str,
        service_id: str,
        workers: int,
        resync_seconds: float,
    ) -> None:
        self._database = database
        self._reconciler = reconciler
        self._clock = clock
        self._cluster = cluster
        self._workers = workers
        self._resync_seconds = resync_seconds
        self.queue: WorkQueue[str] = WorkQueue(clock)
        self._resynced_seconds = clock.monotonic_seconds()
        self.last_resync_error = "the first resync has not finished yet"
        decode = msgspec.json.Decoder(_Labelled).decode
        self.reflectors: dict[str, Reflector[Any]] = {
            kind: Reflector(
                client,
                path_of(kind, ""),
                decode,
                on_event=self._observe,
                label_selector=f"{job_names.SERVICE_ID}={service_id}",
                clock=clock,
            )
            for kind in WATCHED
        }

    async def run(self) -> None:
        """Reconcile jobs until cancelled."""
        await supervise(
            **{f"watch-{kind}": reflector.run() for kind, reflector in self.reflectors.items()},
            **{f"worker-{number}": self.queue.work(self._reconciler.reconcile) for number in range(self._workers)},
            resync=self._resync(),
            records=self._follow_records(),
        )

    async def _resync(self) -> None:
        while True:
            try:
                await self.look_at_all()
                self.last_resync_error = ""
                self._resynced_seconds = self._clock.monotonic_seconds()
            except Exception as error:  # noqa: BLE001 - cluster or database may be down; the next resync tries again
                self.last_resync_error = f"{type(error).__name__}: {error}".partition("\n")[0]
                log.warning("Resync failed", err=self.last_resync_error)
            seconds = RESYNC_RETRY_SECONDS if self.last_resync_error else self._resync_seconds
            await self._clock.sleep(seconds)

    def resync_age_seconds(self) -> float:
        """Return the time since all active jobs were looked at, or since the start before the first time."""
        return self._clock.monotonic_seconds() - self._resynced_seconds

    async def _follow_records(self) -> None:
        """Reconcile jobs that another replica's API created or cancelled."""
        seen: dict[str, int] = {}
        while True:
            try:
                found = dict(await self._database.read(lambda session: waiting_jobs(session, self._cluster)))
            except SQLAlchemyError as error:
                log.warning("Could not read new jobs", err=str(error).partition("\n")[0])
            else:
                for job_id in found.keys() - seen.keys() | {one for one in seen if found.get(one, 0) > seen[one]}:
                    self.queue.add(job_id)
                seen = found
            await self._clock.sleep(RECORDS_SECONDS)

    async def look_at_all(self) -> None:
        """Reconcile every active job, and every job that has objects in the cluster. Raises KubeError and SQLAlchemy's
        errors."""
        for job_id in await self._database.read(lambda session: active_ids(session, self._cluster)):
            self.queue.add(job_id)
        for job_id in await self._reconciler.sweep():
            self.queue.add(job_id)

    def _observe(self, change: Change[_Labelled]) -> None:
        job_id = change.object.metadata.labels.get(job_names.JOB_ID)
        if job_id is not None:
            self.queue.add(job_id)
