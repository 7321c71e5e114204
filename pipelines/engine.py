"""Runs pipelines while this process leads: starts the tries that must be running, and moves runs on.

Level-triggered: any signal may be lost, because a look at all active runs finds every try that must be running.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.pipelines.words import RunState
from atoll.service.runtime import supervise
from jobs.errors import RecordUnreadable
from pipelines.durable import in_own_loop, start_try
from pipelines.errors import RunUnknown
from pipelines.performing import StepClock, StepParts, StepPerformer
from pipelines.retention import RunRetention
from pipelines.store import Try, active_run_ids, advance, fail_run, running_tries
from pipelines.watching import StepWatch

log = structlog.get_logger(__name__)

POLL_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 2.0


class PipelineEngine:
    """Runs pipelines; `run` as one task, while this process leads."""

    def __init__(
        self,
        parts: StepParts,
        clock: StepClock,
        url: str,
        *,
        poll_seconds: float = POLL_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._parts = parts
        self._clock = clock
        self._url = url
        self._poll_seconds = poll_seconds
        self._look_seconds = look_seconds
        self._started: set[Try] = set()
        self._moved: asyncio.Queue[str] = asyncio.Queue()
        self._watch = StepWatch(parts.database, clock, poll_seconds=poll_seconds)
        self._performer = StepPerformer(parts, self._watch)
        self._retention = RunRetention(parts.database, clock, parts.api.settings.keep_runs_days)

    async def run(self) -> None:
        """Run pipelines until cancelled."""
        self._started.clear()
        await in_own_loop(self._url, self._serve, self._performer.perform, self._has_ended)

    async def _serve(self) -> None:
        self._moved = asyncio.Queue()
        await supervise(
            watch=self._watch.run(),
            look=self._look_at_all(),
            moved=self._follow_ends(),
            retention=self._retention.run(),
        )

    def _has_ended(self, one: Try) -> None:
        self._started.discard(one)
        self._moved.put_nowait(one.run_id)

    async def _follow_ends(self) -> None:
        """Start what follows the end of a try."""
        while True:
            run_id = await self._moved.get()
            try:
                await self._start(await self._parts.database.read(lambda session: running_tries(session, run_id)))  # noqa: B023
            except SQLAlchemyError as error:
                log.warning("Could not look at a run", run=run_id, err=str(error).partition("\n")[0])

    async def _look_at_all(self) -> None:
        """Begin new runs, and start whatever must be running."""
        while True:
            try:
                for run_id in await self._parts.database.read(_pending):
                    await self._begin(run_id)
                await self._start(await self._parts.database.read(running_tries))
            except SQLAlchemyError as error:
                log.warning("Could not look at runs", err=str(error).partition("\n")[0])
            await self._clock.sleep(self._look_seconds)

    async def _begin(self, run_id: str) -> None:
        now, cluster = self._clock.now(), self._parts.api.settings.cluster
        try:
            await self._parts.database.write(lambda session: advance(session, run_id, now=now, cluster=cluster))
        except RunUnknown:
            log.info("A run was removed before it began", run=run_id)
        except RecordUnreadable as error:
            why = str(error)
            await self._parts.database.write(lambda session: fail_run(session, run_id, why, now=now))

    async def _start(self, tries: Sequence[Try]) -> None:
        for one in tries:
            if one not in self._started:
                self._started.add(one)
                try:
                    await start_try(one)
                except BaseException:
                    self._started.discard(one)
                    raise


def _pending(session: Session) -> Sequence[str]:
    return active_run_ids(session, state=RunState.PENDING)
