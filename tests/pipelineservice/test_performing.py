"""Steps that cannot do their work say why; none keeps a secret, and none holds up another."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from jobs.database import Database, opened
from jobs.records import JobRecord, RecordBase
from pipelines.outgoing import OutgoingClient
from pipelines.performing import OUTPUT_BYTES_MAX
from pipelines.records import PipelineBase, migrate_pipelines
from pipelines.store import get_run, steps_of
from tests.pipelines.made import JOB, step
from tests.pipelineservice.test_outgoing import SECRET, served
from tests.pipelineservice.world import TENANT, EngineWorld

DEEP: Any = 1
for _ in range(40):
    DEEP = [DEEP]
RETURNED = {"set": {1}, "nan": float("nan"), "deep": DEEP, "long": "x" * OUTPUT_BYTES_MAX}
BLOCKING_COUNT = 40
"""More than the threads that an event loop has by itself on two cores."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Yield a database with tables."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    found = opened(url)
    migrate_pipelines(url)
    yield found
    found.close()


def note(parameters: Mapping[str, Any], _key: str) -> Any:
    """Return what is named, fail, or take longer than any step may."""
    if parameters["do"] == "fail":
        raise LookupError("no such row")
    return asyncio.Event().wait() if parameters["do"] == "wait" else RETURNED[parameters["do"]]


def does(what: str, **fields: Any) -> dict[str, Any]:
    """Return a step whose function does something."""
    return step(what, config={"function_name": "note", "parameters": {"do": what}}, **fields)


def fetch(name: str, url: str, **config: Any) -> dict[str, Any]:
    """Return a step that calls a URL."""
    return step(name, kind="api_call", config={"method": "GET", "url": url, **config})


def steps_that_fail(port: int) -> list[tuple[dict[str, Any], str]]:
    """Return steps, and what each says."""
    pause = {"condition": "inputs.n > 5", "timeout": "1s", "poll_interval": "1s"}
    image = {"image": "busybox:1", "command": ["${inputs.rows[inputs.n]}"]}
    return [
        (does("set"), "the output is not of JSON's types"),
        (does("nan"), "the output is not of JSON's types"),
        (does("deep"), "the output is too deep"),
        (does("long"), "and 65536 are allowed: store it and return its place"),
        (does("fail"), "note: LookupError: no such row"),
        (does("wait", timeout="1s"), "timed out after 1 s"),
        (step("gone"), "there is no function echo"),
        (fetch("away", f"http://127.0.0.1:{port}/gone"), "GET answered with status 410"),
        (fetch("metadata", "http://169.254.169.254/latest"), "169.254.169.254 is not a public address"),
        (fetch("built", "http://${inputs.host}/"), "10.0.0.1 is not a public address"),
        (step("late", kind="wait", config=pause), "the condition did not hold in 1 s"),
        (step("short", kind="job", config=JOB | {"container": image}), "index"),
        (step("refused", kind="job", config=JOB | {"labels": {"owner": "${inputs.word}"}}), "the job is refused: "),
    ]


async def test_a_step_that_cannot_do_its_work_says_why(database: Database, database_url: str) -> None:
    """The run fails, and nothing that was refused has left or begun."""
    async with served() as port:
        world = EngineWorld(database, database_url, {"note": note})
        world.parts = replace(world.parts, functions={"note": note})
        wanted = steps_that_fail(port)
        async with world.leading():
            inputs = {"n": 3, "rows": [1], "host": "10.0.0.1", "word": "one"}
            given = {"word": "two words!"}
            run_id = await world.begin(*(one for one, _ in wanted), inputs=inputs, given=given)
            assert (await world.until_ended(run_id))[0] == "failed"

    errors = {one.key: one.error for one in await database.read(lambda session: steps_of(session, run_id))}
    assert {one["name"]: errors[one["name"]] for one, told in wanted if told not in errors[one["name"]]} == {}
    assert await database.read(lambda session: session.scalars(select(JobRecord.id)).all()) == []


async def test_a_secret_is_in_no_record_and_no_log(
    database: Database, database_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The called service sends it back, one answers with an error, one is not there; a later step uses the output."""
    (tmp_path / TENANT).mkdir()
    (tmp_path / TENANT / "token").write_text(SECRET)
    secret = {"secret_headers": {"Authorization": "token"}}
    async with served() as port:
        world = EngineWorld(database, database_url)
        world.parts = replace(world.parts, outgoing=OutgoingClient(allowed=("127.0.0.1",), secrets=tmp_path))
        later = {"function_name": "echo", "parameters": {"seen": "${steps.back.body}"}}
        async with world.leading():
            run_id = await world.begin(
                fetch("back", f"http://127.0.0.1:{port}/", **secret),
                fetch("away", f"http://127.0.0.1:{port}/gone", **secret),
                fetch("nobody", "http://127.0.0.1:1/", **secret),
                step("later", "back", config=later),
            )
            assert (await world.until_ended(run_id))[0] == "failed"

    assert await world.states(run_id) == {
        "back": "succeeded",
        "away": "failed",
        "nobody": "failed",
        "later": "succeeded",
    }
    kept = await database.read(_everything)
    assert "***" in kept
    assert SECRET not in kept
    assert SECRET not in "".join(capfd.readouterr())


def _everything(session: Session) -> str:
    tables = [table for base in (RecordBase, PipelineBase) for table in base.metadata.sorted_tables]
    return repr([tuple(row) for table in tables for row in session.execute(select(table))])


async def test_functions_that_block_hold_up_no_other_step(database: Database, database_url: str) -> None:
    """Another run goes on while they wait."""
    go_on = threading.Event()
    world = EngineWorld(database, database_url, {"note": lambda _parameters, _key: go_on.wait()})
    names = [f"s{number}" for number in range(BLOCKING_COUNT)]
    async with world.leading():
        try:
            blocked = await world.begin(*(step(name, config={"function_name": "note"}) for name in names))
            await world.until(lambda session: get_run(session, blocked).state == "running")
            other = await world.begin(step("train", kind="job"), name="other")
            assert await world.until_ended(other) == ("succeeded", "")
            assert set((await world.states(blocked)).values()) == {"running"}
        finally:
            go_on.set()
        assert await world.until_ended(blocked) == ("succeeded", "")
