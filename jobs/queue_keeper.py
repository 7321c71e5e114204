"""Keeps the objects of a cluster's queues as its file says: after a new file, and again and again against drift.

Level-triggered: each look compares all objects with the file and writes the differences. One refused write does not
stop the others; what could not be done is recorded beside the file.
"""

from collections.abc import Callable
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from atoll.jobs.queue_changes import QueuePlan, plan_queues
from atoll.jobs.queue_file import QueueFile, held
from atoll.jobs.queue_objects import KUEUE_API, objects_of_queues
from atoll.jobs.settings import RenderSettings
from atoll.kube.clock import Clock
from atoll.kube.errors import ApiError, KubeError
from jobs.database import Database
from jobs.errors import RecordUnreadable
from jobs.queue_cluster import QueueCluster
from jobs.queue_store import note_check, queue_file_of, queues_in
from jobs.records import QueueFileRecord

log = structlog.get_logger(__name__)

NEW_FILE_SECONDS: Final = 2.0
"""How often a new file is looked for."""
DRIFT_SECONDS: Final = 10.0
"""How often the cluster is compared with the file, seconds."""
PROBLEMS_MAX: Final = 50


class QueueKeeper:
    """Keeps the queues of one cluster; `run` as one task, while this process leads. While the cluster is drained, its
    queues admit nothing new."""

    def __init__(
        self,
        database: Database,
        queues: QueueCluster,
        rendering: RenderSettings,
        clock: Clock,
        *,
        cluster: str,
        service_id: str,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._queues = queues
        self._rendering = rendering
        self._clock = clock
        self._cluster = cluster
        self._service_id = service_id
        self._is_draining = is_draining

    async def run(self) -> None:
        """Keep the queues until cancelled."""
        kept, due = 0, self._clock.monotonic_seconds()
        while True:
            try:
                record = await self._database.read(lambda session: queue_file_of(session, self._cluster))
                is_new = record is not None and record.generation != kept
                if record is not None and (is_new or self._clock.monotonic_seconds() >= due):
                    await self.look(record)
                    kept, due = record.generation, self._clock.monotonic_seconds() + DRIFT_SECONDS
            except (KubeError, SQLAlchemyError) as error:
                log.warning("Could not keep the queues", cluster=self._cluster, err=str(error).partition("\n")[0])
            await self._clock.sleep(NEW_FILE_SECONDS)

    async def look(self, record: QueueFileRecord) -> None:
        """Compare the cluster with its file and write the differences; of a file that can no longer be read nothing is
        written. Raises KubeError and SQLAlchemy's errors."""
        try:
            file = queues_in(record)
        except RecordUnreadable as error:
            await self._note(record, [f"{error}: apply it again"], has_kueue=record.has_kueue is not False)
            return
        assert file is not None
        if self._is_draining():
            file = held(file)
        plan, has_kueue = await planned(file, self._queues, self._rendering, service_id=self._service_id)
        problems = list(plan.obstacles)
        for write in plan.writes:
            try:
                await self._queues.write(write)
                log.info("Wrote a queue's object", cluster=self._cluster, verb=write.verb.value, object=str(write.key))
            except ApiError as error:
                problems.append(f"cannot {write}: {error.message}")
        await self._note(record, problems[:PROBLEMS_MAX], has_kueue=has_kueue)

    async def _note(self, record: QueueFileRecord, told: list[str], *, has_kueue: bool) -> None:
        if (record.checked_generation, record.has_kueue, record.problems) != (record.generation, has_kueue, told):
            await self._database.write(
                lambda session: note_check(
                    session, self._cluster, generation=record.generation, has_kueue=has_kueue, problems=told
                )
            )


async def planned(
    file: QueueFile, queues: QueueCluster, rendering: RenderSettings, *, service_id: str
) -> tuple[QueuePlan, bool]:
    """Return the writes that a file needs now, and whether the cluster has Kueue. Raises KubeError."""
    there, has_kueue = await queues.objects()
    wanted = objects_of_queues(file, rendering, service_id=service_id)
    possible = [one for one in wanted if has_kueue or one["apiVersion"] != KUEUE_API]
    return plan_queues(possible, there, service_id=service_id), has_kueue
