"""A pipeline engine with jobs that a test plays, instead of a cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from atoll.jobs.states import ENDED, JobState, JobStep
from atoll.pipelines.words import RunState
from atoll.service.clock import SystemClock
from jobs.database import Database
from jobs.records import JobRecord
from jobs.settings import JobServiceSettings
from jobs.store import take_step
from pipelines.engine import PipelineEngine
from pipelines.outgoing import OutgoingClient
from pipelines.performing import Function, StepParts
from pipelines.store import RunRequest, apply_pipeline, create_run, get_run, steps_of
from tests.jobservice.service import SETTINGS, JobService
from tests.pipelines.made import pipeline

TENANT = "acme"
NEXT = {
    JobState.PENDING: JobStep.SUBMIT,
    JobState.QUEUED: JobStep.ADMIT,
    JobState.ADMITTED: JobStep.RUN,
    JobState.RUNNING: JobStep.SUCCEED,
}
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.1
WAIT_SECONDS = 100.0


def play_jobs(session: Session, held: frozenset[str] = frozenset(), fails: frozenset[str] = frozenset()) -> None:
    """Move each job on by one step. held: names of steps whose jobs stay running; fails: those whose jobs fail, if they
    are services before they run."""
    now = SystemClock().now()
    active = select(JobRecord).where(JobRecord.state.not_in([state.value for state in ENDED]))
    for job in session.scalars(active).all():
        state, step = JobState(job.state), job.document.get("step_id")
        if job.cancel_requested_at is not None:
            take_step(session, job.id, JobStep.CANCEL, now=now)
        elif state is JobState.RUNNING and (step in held or job.job_type == "service"):
            continue
        elif step in fails and state is (JobState.ADMITTED if job.job_type == "service" else JobState.RUNNING):
            take_step(session, job.id, JobStep.FAIL, now=now, message="Error (exit code 1)")
        elif state in NEXT:
            take_step(session, job.id, NEXT[state], now=now)


class EngineWorld:
    """A database, an engine over it, and played jobs."""

    def __init__(
        self,
        database: Database,
        url: str,
        functions: Mapping[str, Function] | None = None,
        *,
        settings: JobServiceSettings = SETTINGS,
    ) -> None:
        self.database = database
        self.url = url
        self.clock = SystemClock()
        self.held: frozenset[str] = frozenset()
        self.fails: frozenset[str] = frozenset()
        self.parts = StepParts(
            api=JobService(database, settings=settings).app.state.parts,
            outgoing=OutgoingClient(allowed=("127.0.0.1",)),
            functions={"echo": lambda parameters, _key: dict(parameters)} | dict(functions or {}),
            clock=self.clock,
        )

    def engine(self) -> PipelineEngine:
        """Return an engine."""
        return PipelineEngine(self.parts, self.clock, self.url, poll_seconds=POLL_SECONDS, look_seconds=LOOK_SECONDS)

    async def _play(self) -> None:
        while True:
            await self.database.write(lambda session: play_jobs(session, self.held, self.fails))
            await self.clock.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Run an engine, and jobs, until the block ends."""
        tasks = [asyncio.ensure_future(self.engine().run()), asyncio.ensure_future(self._play())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError

    async def begin(
        self, *steps: Any, given: Mapping[str, Any] | None = None, key: str | None = None, **fields: Any
    ) -> str:
        """Apply a pipeline of steps and begin a run; return its id."""
        made, now = pipeline(*steps, **fields), self.clock.now()

        def write(session: Session) -> str:
            record, _ = apply_pipeline(session, made, tenant=TENANT, created_by="ann", now=now)
            return create_run(session, record.id, RunRequest(given or {}, "ann", key=key), now)[0].id

        return await self.database.write(write)

    async def states(self, run_id: str) -> dict[str, str]:
        """Return the state of each step of a run."""
        return {one.key: one.state for one in await self.database.read(lambda session: steps_of(session, run_id))}

    async def run_state(self, run_id: str) -> tuple[str, str]:
        """Return the state of a run and its message."""
        found = await self.database.read(lambda session: get_run(session, run_id))
        return found.state, found.message

    async def until(self, holds: Callable[[Session], Any], *, seconds: float = WAIT_SECONDS) -> None:
        """Wait until something holds in the database."""
        async with asyncio.timeout(seconds):
            while not await self.database.read(holds):
                await self.clock.sleep(POLL_SECONDS)

    async def until_ended(self, run_id: str) -> tuple[str, str]:
        """Wait for the end of a run; return its state and message."""
        active = (RunState.PENDING, RunState.RUNNING)
        await self.until(lambda session: get_run(session, run_id).state not in active)
        return await self.run_state(run_id)
