"""Runs that ended long ago go away with everything that was kept of them; the others stay."""

from datetime import datetime, timedelta

import pytest
from sqlalchemy import create_engine, func, inspect, select, text

from atoll.service.clock import SystemClock
from jobs.database import Database
from jobs.records import JobRecord
from pipelines import retention
from pipelines.durable import steps_url
from pipelines.engine import PipelineEngine
from pipelines.records import RunRecord, StepRecord
from pipelines.store import get_run
from tests.pipelines.made import step
from tests.pipelineservice.world import EngineWorld


class LaterClock(SystemClock):
    """Shows a time after the retention of 90 days."""

    def now(self) -> datetime:
        """Return the time."""
        return super().now() + timedelta(days=91)


class LateWorld(EngineWorld):
    """Its engine removes runs by the later clock."""

    def engine(self) -> PipelineEngine:
        """Return an engine."""
        return PipelineEngine(self.parts, LaterClock(), self.url, poll_seconds=0.02, look_seconds=0.1)


def workflows(url: str) -> int:
    """Return how many workflows DBOS has."""
    engine = create_engine(steps_url(url).replace("postgresql://", "postgresql+psycopg://"))
    schema = None if engine.dialect.name == "sqlite" else "dbos"
    assert "workflow_status" in inspect(engine).get_table_names(schema=schema)
    table = "workflow_status" if schema is None else f"{schema}.workflow_status"
    with engine.connect() as connection:
        count = connection.execute(text(f"SELECT count(*) FROM {table}")).scalar()
    engine.dispose()
    return int(count or 0)


async def test_old_runs_are_removed_a_few_at_a_time(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps and the rows of DBOS, also those of pipelines that were deleted; active runs and jobs stay."""
    monkeypatch.setattr(retention, "RUNS_TOGETHER_MAX", 2)
    monkeypatch.setattr(retention, "TRIES_TOGETHER_MAX", 2)
    monkeypatch.setattr(retention, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(retention, "PAUSE_SECONDS", 0.1)
    world = EngineWorld(database, database_url)
    async with world.leading():
        old = [await world.begin(step("a"), step("train", "a", kind="job"), name=f"p{number}") for number in range(5)]
        for run in old:
            await world.until_ended(run)
    assert workflows(database_url) == 10
    active = await world.begin(step("b", kind="wait", config={"duration": "1d"}))

    late = LateWorld(database, database_url)
    async with late.leading():
        await world.until(lambda session: session.scalar(select(func.count()).select_from(RunRecord)) == 1)
        await world.until(lambda session: get_run(session, active).state == "running")
        await world.until(lambda _session: workflows(database_url) == 1)

    assert await database.read(lambda session: session.scalar(select(func.count()).select_from(StepRecord))) == 1
    assert await database.read(lambda session: session.scalar(select(func.count()).select_from(JobRecord))) == 5
