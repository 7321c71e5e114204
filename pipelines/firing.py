"""Fires triggers that wait for a time, the end of a run, a job or a number of the service, while this process leads."""

from collections.abc import Callable
from datetime import datetime
from typing import Final, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from jobs.database import Database
from pipelines.performing import StepClock
from pipelines.triggers import FIRED_TOGETHER_MAX, fire_due, fire_ends, fire_jobs, fire_metrics

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0

T = TypeVar("T")


class TriggerKeeper:
    """Looks for triggers that are due; `run` as one task."""

    def __init__(self, database: Database, clock: StepClock) -> None:
        self._database = database
        self._clock = clock

    async def run(self) -> None:
        """Fire until cancelled."""
        while True:
            try:
                await self.look()
            except SQLAlchemyError as error:
                log.warning("Could not look at triggers", err=str(error).partition("\n")[0])
            await self._clock.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Fire what is due now. Raises SQLAlchemy's errors."""
        while await self._fire(fire_due) == FIRED_TOGETHER_MAX:
            pass
        await self._fire(fire_ends)
        await self._fire(fire_metrics)
        after: int | None = 0
        while after is not None:
            reached = after
            after = await self._fire(lambda session, now: fire_jobs(session, reached, now))  # noqa: B023

    async def _fire(self, fire: Callable[[Session, datetime], T]) -> T:
        now = self._clock.now()
        return await self._database.write(lambda session: fire(session, now))
