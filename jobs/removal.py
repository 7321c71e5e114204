"""Removes what a job has in the cluster, once its logs are in the archive.

Separate from the reconciler, which decides when.
"""

from collections.abc import Sequence

import structlog

from atoll.kube.clock import Clock
from jobs.cluster import FoundObject, JobCluster
from jobs.database import Database
from jobs.errors import RecordChanged
from jobs.log_keeping import LogKeeper
from jobs.objects import WORKLOADS
from jobs.records import JobRecord
from jobs.store import change_job

log = structlog.get_logger(__name__)

SOON_SECONDS = 1.0
"""Seconds until a pending deletion is checked again, in addition to watches."""


class JobRemoval:
    """Removes objects and pods of the jobs of one cluster."""

    def __init__(self, cluster: JobCluster, database: Database, logs: LogKeeper, clock: Clock) -> None:
        self._cluster = cluster
        self._database = database
        self._logs = logs
        self._clock = clock

    async def remove(self, record: JobRecord, found: Sequence[FoundObject]) -> float:
        """Remove objects; return when to look again. Raises RecordChanged after it recorded that logs were archived."""
        attempts = {one.attempt for one in found if one.kind in WORKLOADS and not one.is_leaving}
        if attempts and self._logs.is_on:
            await self._keep(record, [pod for pod in await self._cluster.pods(record) if pod.attempt in attempts])
        await self._cluster.remove(found)
        log.info("Removing objects", job=record.id, objects=[str(one) for one in found])
        return SOON_SECONDS

    async def remove_stray_pods(self, record: JobRecord, *, but: str = "") -> bool:
        """Remove pods without an owner, except those of attempt `but`; return whether any is left."""
        pods = [pod for pod in await self._cluster.pods(record) if pod.attempt != but]
        await self._cluster.remove_pods(pods)
        return bool(pods)

    async def keep_logs(self, record: JobRecord, *, leaving: bool = False) -> None:
        """Archive the logs of a job's pods, or only of those that are being deleted. Raises RecordChanged after it
        recorded something."""
        if self._logs.is_on:
            await self._keep(record, [pod for pod in await self._cluster.pods(record) if pod.is_leaving or not leaving])

    async def _keep(self, record: JobRecord, pods: Sequence[FoundObject]) -> None:
        now = self._clock.now()
        kept = await self._logs.keep(record, pods, now)
        if kept is None:
            return
        changes = {"log_archive": [one.model_dump(mode="json") for one in kept]}
        await self._database.write(
            lambda session: change_job(session, record.id, version=record.version, now=now, changes=changes)
        )
        raise RecordChanged(record.id)
