"""Lives of an engine that is killed with SIGKILL before one of its database writes; each is a process of its own."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, Engine, event, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from jobs.database import Database, engine_of
from pipelines.firing import TriggerKeeper
from pipelines.records import RunRecord
from pipelines.store import active_run_ids
from tests.fakes.clock import ManualClock
from tests.pipelines.made import step
from tests.pipelineservice.world import EngineWorld

WRITES = ("INSERT", "UPDATE", "DELETE")
WROTE = "wrote"
KILLED = -signal.SIGKILL
LOOKS = 3
LIFE_SECONDS = 600.0
"""Much more than a life takes, also on cores that do ten things at a time."""


def every_type(server: str) -> list[dict[str, Any]]:
    """Return a pipeline with every type of step. server: URL that calls and notifications go to."""
    return [
        step("prepare", kind="job"),
        step("call", "prepare", kind="api_call", config={"method": "POST", "url": server, "body": {"a": 1}}),
        step(
            "big",
            "prepare",
            kind="condition",
            config={"expression": "inputs.n > 2", "if_true": "fan", "if_false": "no"},
        ),
        step("no"),
        step("fan", kind="parallel", config={"branches": ["left", "right"]}),
        step("left", config={"function_name": "note"}),
        step("right", kind="wait", config={"duration": "1s"}),
        step("each", "fan", kind="loop", config={"items": ["a", "b", "c"], "body_step": "body", "max_parallel": 2}),
        step("body", config={"function_name": "note", "parameters": {"it": "${item}"}}),
        step("train", "each", "call", kind="job", retry={"max_retries": 1, "delay": "1s"}),
        step(
            "tell",
            "train",
            kind="notification",
            config={"channel": "webhook", "template": "${steps.train.status}", "recipients": [server]},
        ),
    ]


def kill_before(number: int) -> None:
    """Count the transactions that write, of every database of this process, and kill it before one of them."""
    count = itertools.count(1)

    def mark(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if statement.lstrip().upper().startswith(WRITES):
            connection.info[WROTE] = True

    def on_commit(connection: Connection) -> None:
        if connection.info.pop(WROTE, False) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", mark)
    event.listen(Engine, "commit", on_commit)


def live(url: str, effects: Path, kill_at: int) -> None:
    """Wait until no other replica leads, then run the engine until every run has ended, or until it is killed.

    A lock on a file stands for the Lease: it is free once its holder is dead.
    """
    leading = effects.with_suffix(".leader").open("w")
    fcntl.flock(leading, fcntl.LOCK_EX)
    kill_before(kill_at)

    def note(_parameters: Any, key: str) -> None:
        with effects.open("a") as stream:
            stream.write(f"{key}\n")

    async def work() -> None:
        world = EngineWorld(Database(engine_of(url)), url, {"note": note})
        async with world.leading():
            await world.until(_is_over, seconds=LIFE_SECONDS)
            os._exit(0)

    asyncio.run(work())


def fire(url: str, moment: datetime, kill_at: int) -> None:
    """Look at the triggers at a moment, a few times, as a leader does; or be killed meanwhile."""
    kill_before(kill_at)

    async def work() -> None:
        keeper = TriggerKeeper(Database(engine_of(url)), ManualClock(moment))
        for _ in range(LOOKS):
            with contextlib.suppress(SQLAlchemyError):  # it lost to the other, and looks again in its next second
                await keeper.look()

    asyncio.run(work())


def stand_still(url: str, run_id: str, idle_seconds: int) -> None:
    """Stop within a transaction that changes a run, as a process without CPU does, or a machine without power."""
    with patch("jobs.database.IDLE_SECONDS", idle_seconds):
        engine = engine_of(url)
        with Session(engine) as session:
            session.scalars(select(RunRecord).where(RunRecord.id == run_id).with_for_update()).one()
            os.kill(os.getpid(), signal.SIGSTOP)


def _is_over(session: Session) -> bool:
    return not active_run_ids(session)
