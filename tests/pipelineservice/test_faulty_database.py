"""The database fails now and then while runs go on: no try is lost, and nothing happens twice."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from jobs.database import Database, engine_of
from jobs.records import JobRecord
from tests.pipelines.made import step
from tests.pipelineservice.world import EngineWorld

T = TypeVar("T")
SHARE = 0.3


class RefusingDatabase(Database):
    """Refuses some transactions, and loses the answer of others."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(engine_of(url))
        self._random = random.Random(seed)

    def _run(self, work: Callable[[Session], T], *, writes: bool) -> T:
        when = self._random.random()
        if when < SHARE / 2:
            raise OperationalError("no server", None, Exception("the connection was refused"))
        found = super()._run(work, writes=writes)
        if when < SHARE:
            raise OperationalError("no answer", None, Exception("the connection was closed"))
        return found


async def test_a_failing_database_delays_runs(database: Database, database_url: str) -> None:
    """Runs with jobs, functions, waits, retries and a cancelled job end as ever; each job exists once."""
    calls: list[str] = []
    world = EngineWorld(database, database_url, {"note": lambda _parameters, key: calls.append(key)})
    world.parts = replace(world.parts, api=replace(world.parts.api, database=RefusingDatabase(database_url, 1)))
    world.held = frozenset({"late"})
    steps: list[Any] = [
        step("first", config={"function_name": "note"}),
        step("train", "first", kind="job"),
        step("late", "first", kind="job", timeout="1s", on_failure="continue"),
        step("rest", "train", kind="wait", config={"duration": "1s"}),
        step(
            "tell", "rest", kind="notification", config={"channel": "email", "template": "x", "recipients": ["a@b.c"]}
        ),
    ]
    async with world.leading():
        runs = [await world.begin(*steps, name=f"p{number}") for number in range(5)]
        ends = [await world.until_ended(run) for run in runs]

    assert {state for state, _ in ends} == {"failed"}
    assert {message.partition(":")[0] for _, message in ends} == {"step tell failed"}
    assert set(Counter(calls).values()) == {1}
    names = await database.read(lambda session: session.scalars(select(JobRecord.idempotency_key)).all())
    assert len(names) == len(set(names)) == 10
