"""Watches steps that wait: whether they must stop, and what their jobs do. One query serves all of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.jobs.states import JobState
from jobs.database import Database
from jobs.records import JobRecord
from pipelines.records import StepRecord
from pipelines.store import Try

log = structlog.get_logger(__name__)

CHUNK: Final = 500


class Sleeper(Protocol):
    """Waits."""

    async def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        ...


@dataclass(frozen=True, slots=True)
class JobSight:
    """A job, as a step sees it."""

    state: JobState
    message: str
    name: str


@dataclass(frozen=True, slots=True)
class StepSight:
    """What a waiting step sees: whether it must stop, and its job."""

    is_stopping: bool
    job: JobSight | None = None


@dataclass(slots=True)
class _Waiting:
    one: Try
    job_id: str | None
    seen: asyncio.Future[StepSight]


class StepWatch:
    """Looks at the records of waiting steps; run `run` as a task."""

    def __init__(self, database: Database, clock: Sleeper, *, poll_seconds: float) -> None:
        self._database = database
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._waiting: list[_Waiting] = []

    async def look(self, one: Try, job_id: str | None = None) -> StepSight:
        """Return what a step sees at the next poll."""
        seen = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(one, job_id, seen))
        found: StepSight = await seen
        return found

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self._clock.sleep(self._poll_seconds)
            if self._waiting:
                await self._poll()

    async def _poll(self) -> None:
        waiting, self._waiting = self._waiting, []
        jobs = [one.job_id for one in waiting if one.job_id is not None]
        try:
            stopping, states = await self._database.read(lambda session: (_stopping(session), _jobs(session, jobs)))
        except SQLAlchemyError as error:
            log.warning("Could not look at waiting steps", err=str(error).partition("\n")[0])
            self._waiting += waiting
            return
        for one in waiting:
            if not one.seen.done():
                is_stopping = (one.one.run_id, one.one.key) in stopping
                one.seen.set_result(StepSight(is_stopping, states.get(one.job_id or "")))


def _stopping(session: Session) -> set[tuple[str, str]]:
    where = (StepRecord.state == "running", StepRecord.is_stopping)
    return {(run_id, key) for run_id, key in session.execute(select(StepRecord.run_id, StepRecord.key).where(*where))}


def _jobs(session: Session, ids: Sequence[str]) -> dict[str, JobSight]:
    columns = select(JobRecord.id, JobRecord.state, JobRecord.message, JobRecord.name)
    found: dict[str, JobSight] = {}
    for begin in range(0, len(ids), CHUNK):
        for job_id, state, message, name in session.execute(
            columns.where(JobRecord.id.in_(ids[begin : begin + CHUNK]))
        ):
            found[job_id] = JobSight(JobState(state), message, name)
    return found
