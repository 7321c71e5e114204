"""The leader is killed in the second in which many triggers are due, and two replicas look afterwards."""

import multiprocessing
from collections import Counter
from datetime import timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from atoll.pipelines.triggers import PipelineTrigger
from jobs.database import Database
from pipelines.records import RunRecord
from pipelines.store import apply_pipeline
from pipelines.triggers import FIRED_TOGETHER_MAX, create_trigger
from tests.fakes.clock import ManualClock
from tests.pipelines.made import pipeline, step
from tests.pipelineservice import killed
from tests.pipelineservice.world import TENANT

COUNT = FIRED_TOGETHER_MAX + 10
CRON = {"trigger_type": "cron", "cron_expression": "30 12 * * *"}


@pytest.mark.parametrize("kill_at", [1, 2], ids=["before the first runs are kept", "between two batches"])
async def test_each_trigger_fires_once_for_the_instant(database: Database, database_url: str, kill_at: int) -> None:
    """A trigger is marked in the transaction that begins its run, so that both happened or neither."""
    now = ManualClock().now()

    def write(session: Session) -> None:
        owner, _ = apply_pipeline(session, pipeline(step("a")), tenant=TENANT, created_by="ann", now=now)
        for _ in range(COUNT):
            create_trigger(session, owner.id, PipelineTrigger.model_validate(CRON), secret=None, actor="ann", now=now)

    await database.write(write)
    context, due = multiprocessing.get_context("forkserver"), now + timedelta(minutes=30)
    context.set_forkserver_preload(["tests.pipelineservice.killed"])
    leader, *others = (context.Process(target=killed.fire, args=(database_url, due, at)) for at in (kill_at, 0, 0))
    leader.start()
    leader.join()
    for one in others:
        one.start()
    for one in others:
        one.join()

    assert [leader.exitcode, *(one.exitcode for one in others)] == [killed.KILLED, 0, 0]
    keys = Counter(await database.read(lambda session: session.scalars(select(RunRecord.idempotency_key)).all()))
    assert (len(keys), {*keys.values()}) == (COUNT, {1})
