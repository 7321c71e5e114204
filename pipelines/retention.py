"""Removes runs that ended long ago, and what DBOS keeps of their tries, while this process leads."""

from datetime import datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from jobs.database import Database
from pipelines.durable import forget_tries
from pipelines.performing import StepClock
from pipelines.records import DeploymentRecord, RunRecord

log = structlog.get_logger(__name__)

PAUSE_SECONDS: Final = 600.0
BUSY_SECONDS: Final = 1.0
"""Pause while there is more to remove, or after a fault: each transaction is short, so that nobody waits for it."""
RUNS_TOGETHER_MAX: Final = 100
TRIES_TOGETHER_MAX: Final = 200


class RunRetention:
    """Removes what is older than some days; `run` in DBOS's loop. `days`: 0 keeps everything."""

    def __init__(self, database: Database, clock: StepClock, days: int) -> None:
        self._database = database
        self._clock = clock
        self._days = days

    async def run(self) -> None:
        """Remove until cancelled."""
        while True:
            try:
                has_more = bool(self._days) and await self._remove(self._clock.now() - timedelta(days=self._days))
            except SQLAlchemyError as error:
                log.warning("Could not remove old runs", err=str(error).partition("\n")[0])
                has_more = True
            await self._clock.sleep(BUSY_SECONDS if has_more else PAUSE_SECONDS)

    async def _remove(self, before: datetime) -> bool:
        """Remove some; return whether there may be more."""
        runs = await self._database.write(lambda session: remove_runs(session, before))
        tries = await forget_tries(before, TRIES_TOGETHER_MAX)
        if runs or tries:
            log.info("Removed old runs", runs=runs, tries=tries)
        return runs == RUNS_TOGETHER_MAX or tries == TRIES_TOGETHER_MAX


def remove_runs(session: Session, before: datetime) -> int:
    """Remove runs that ended before a time, oldest first, a bounded number; return how many. Those of deployed use
    cases stay."""
    where = (RunRecord.ended_at < before, RunRecord.id.not_in(select(DeploymentRecord.run_id)))
    oldest = select(RunRecord.id).where(*where).order_by(RunRecord.ended_at)
    ids = session.scalars(oldest.limit(RUNS_TOGETHER_MAX)).all()
    if ids:
        session.execute(delete(RunRecord).where(RunRecord.id.in_(ids)))
    return len(ids)
