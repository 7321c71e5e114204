"""Replicas and a leader that is killed: no trigger begins a run twice."""

import asyncio
import multiprocessing
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from atoll.pipelines.triggers import PipelineTrigger
from jobs.database import Database
from pipelines.records import RunRecord
from pipelines.signing import new_secret
from pipelines.store import apply_pipeline
from pipelines.triggers import FIRED_TOGETHER_MAX, create_trigger, fire_webhook
from tests.fakes.clock import ManualClock
from tests.pipelines.made import pipeline, step
from tests.pipelineservice import killed
from tests.pipelineservice.world import TENANT

COUNT = FIRED_TOGETHER_MAX + 10
REPLICAS = 4
CRON = {"trigger_type": "cron", "cron_expression": "30 12 * * *"}


@pytest.mark.parametrize("kill_at", [1, 2], ids=["before the first runs are kept", "between two batches"])
async def test_each_trigger_fires_once_for_the_instant(database: Database, database_url: str, kill_at: int) -> None:
    """The leader is killed in the second in which many are due, and two replicas look afterwards. A trigger is marked
    in the transaction that begins its run, so that both happened or neither."""
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


async def test_a_delivery_that_arrives_at_several_replicas_begins_one_run(database: Database) -> None:
    """At once; another delivery begins another run."""
    now = ManualClock().now()
    trigger = PipelineTrigger.model_validate({"trigger_type": "webhook"})

    def write(session: Session) -> str:
        owner, _ = apply_pipeline(session, pipeline(step("a")), tenant=TENANT, created_by="ann", now=now)
        return create_trigger(session, owner.id, trigger, secret=new_secret(), actor="ann", now=now).id

    trigger_id = await database.write(write)
    deliveries = ["d1", "d2"] * REPLICAS
    begun = await asyncio.gather(
        *(database.write(partial(fire_webhook, trigger_id=trigger_id, delivery=one, now=now)) for one in deliveries)
    )

    assert Counter(map(len, begun)) == {1: 2, 0: 2 * REPLICAS - 2}
