"""The engine runs pipelines: every type of step, cancel, overlap, another leader."""

import asyncio
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.orm import Session

from atoll.jobs.states import ENDED
from jobs.creating import creation_of
from jobs.database import Database, opened
from jobs.queue_store import store_queue_file
from jobs.records import JobRecord
from pipelines.errors import KeyTaken, RunActive, RunNotEnded
from pipelines.records import migrate_pipelines
from pipelines.store import advance, cancel_run, get_run, rerun_run, steps_of
from tests.pipelines.made import JOB, step
from tests.pipelines.test_sequencing import gpu_step, queue_file
from tests.pipelineservice import killed
from tests.pipelineservice.world import WAIT_SECONDS, EngineWorld

SERVE = {"job_type": "service", "container": {"image": "busybox:1"}}
RUNNING_TRAIN = (JobRecord.name.like("nightly-train-%"), JobRecord.state == "running")
ACTIVE_JOB = JobRecord.state.not_in([state.value for state in ENDED])


@pytest.fixture
def small(tmp_path: Path) -> Iterator[EngineWorld]:
    """Yield a world on SQLite."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    database = opened(url)
    migrate_pipelines(url)
    yield EngineWorld(database, url)
    database.close()


def every_type() -> list[dict[str, Any]]:
    """Return the steps of a pipeline with every type but calls to others."""
    return [
        step("prepare", kind="job"),
        step(
            "big",
            "prepare",
            kind="condition",
            config={"expression": "inputs.n > 2", "if_true": "fan", "if_false": "no"},
        ),
        step("no"),
        step("fan", kind="parallel", config={"branches": ["left", "right"]}),
        step("left", config={"function_name": "echo", "parameters": {"job": "${steps.prepare.status}"}}),
        step("right", kind="wait", config={"duration": "1s"}),
        step("each", "fan", kind="loop", config={"items": ["a", "b", "c"], "body_step": "body", "max_parallel": 2}),
        step("body", config={"function_name": "echo", "parameters": {"it": "${item}-${index}"}}),
        step("train", "each", kind="job", config=JOB | {"labels": {"count": "n${steps.each.count}"}}),
        step("until", "train", kind="wait", config={"condition": "jobs.train == 'succeeded'", "poll_interval": "1s"}),
    ]


async def test_every_type_of_step_runs(database: Database, database_url: str) -> None:
    """Outputs reach later steps, the branch that is not chosen is skipped, and each job is recorded once."""
    world = EngineWorld(database, database_url)
    async with world.leading():
        run_id = await world.begin(*every_type(), given={"n": 3}, inputs={"n": 0})
        assert await world.until_ended(run_id) == ("succeeded", "")

    states = await world.states(run_id)
    assert {key for key, state in states.items() if state != "succeeded"} == {"no"}
    assert {f"body[{number}]" for number in range(3)} <= states.keys()
    jobs = await database.read(lambda session: session.scalar(select(func.count()).select_from(JobRecord)))
    assert jobs == 2


async def test_a_failing_job_is_tried_again_as_another_job(small: EngineWorld) -> None:
    """Two jobs, two keys; the run says which job failed, and why."""
    world, database = small, small.database
    world.fails = frozenset({"train"})
    async with world.leading():
        run_id = await world.begin(
            step("train", kind="job", retry={"max_retries": 1, "delay": "1s"}), step("after", "train")
        )
        state, message = await world.until_ended(run_id)

    jobs = await database.read(lambda session: session.scalars(select(JobRecord)).all())
    begun = (
        f"pipeline-{await database.read(lambda session: get_run(session, run_id).pipeline_id)}-step-train-run-{run_id}"
    )
    assert (state, len({one.name for one in jobs})) == ("failed", 2)
    assert len({one.idempotency_key for one in jobs if (one.idempotency_key or "").startswith(begun)}) == 2
    assert message.startswith("step train failed: job nightly-train-")
    assert message.endswith("failed: Error (exit code 1)")
    assert await world.states(run_id) == {"train": "failed", "after": "skipped"}


async def test_cancel_reaches_running_jobs(small: EngineWorld) -> None:
    """The run is cancelled once its job is; a service that an earlier step left running is cancelled as well."""
    world, database = small, small.database
    world.held = frozenset({"train"})
    async with world.leading():
        run_id = await world.begin(
            step("serve", kind="job", config=SERVE), step("train", "serve", kind="job"), step("after", "train")
        )
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(*RUNNING_TRAIN)))
        now = world.clock.now()
        await database.write(lambda session: cancel_run(session, run_id, now=now, actor="ann"))
        state, _ = await world.until_ended(run_id)
        await world.until(lambda session: not session.scalars(select(JobRecord.id).where(ACTIVE_JOB)).all())

    assert state == "cancelled"
    assert await world.states(run_id) == {"serve": "succeeded", "train": "failed", "after": "skipped"}
    states = await database.read(lambda session: session.scalars(select(JobRecord.state)).all())
    assert states == ["cancelled", "cancelled"]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_job_that_moves_on_in_the_same_moment_is_cancelled(database: Database, database_url: str) -> None:
    """The cancel waits for the lock of the job, and then sees what the job has become."""
    world = EngineWorld(database, database_url)
    world.held = frozenset({"train"})
    async with world.leading():
        run_id = await world.begin(step("train", kind="job"))
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(*RUNNING_TRAIN)))
    is_moved, is_asked = threading.Event(), threading.Event()

    def move(session: Session) -> None:
        session.scalars(select(JobRecord).with_for_update()).one().message = "another node"
        session.flush()
        is_moved.set()
        assert is_asked.wait(WAIT_SECONDS)

    def cancel(session: Session) -> None:
        event.listen(session.connection(), "before_cursor_execute", _telling(is_asked))
        cancel_run(session, run_id, now=world.clock.now(), actor="ann")

    moving = asyncio.ensure_future(database.write(move))
    assert await asyncio.to_thread(is_moved.wait, WAIT_SECONDS)
    await database.write(cancel)
    await moving

    assert await database.read(lambda session: session.scalar(select(JobRecord.cancel_requested_by))) == "ann"


def _telling(is_asked: threading.Event) -> Callable[..., None]:
    def tell(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "FOR UPDATE" in statement and "FROM jobs" in statement:
            is_asked.set()

    return tell


@pytest.mark.parametrize("moment", ["before the try", "before its job is recorded"])
async def test_a_cancelled_run_begins_no_job(small: EngineWorld, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor calls anybody: the cancel came while nobody led, or while the job was being prepared."""
    world, calls = small, list[str]()
    world.parts = replace(world.parts, functions={"note": lambda _parameters, key: calls.append(key)})
    run_id = await world.begin(
        step("train", kind="job", config=JOB | {"wait_for_ready": False}),
        *([step("told", config={"function_name": "note"})] if moment == "before the try" else []),
    )

    async def cancel() -> None:
        now = world.clock.now()
        await world.database.write(lambda session: cancel_run(session, run_id, now=now, actor="ann"))

    async def prepared(*arguments: Any) -> Any:
        await cancel()
        return await creation_of(*arguments)

    if moment == "before the try":
        await world.database.write(lambda session: advance(session, run_id, now=world.clock.now()))
        await cancel()
    else:
        monkeypatch.setattr("pipelines.performing.creation_of", prepared)
    async with world.leading():
        assert (await world.until_ended(run_id))[0] == "cancelled"

    assert calls == []
    assert await world.database.read(lambda session: session.scalars(select(JobRecord.id)).all()) == []


async def test_a_failed_branch_stops_the_others_if_it_shall(small: EngineWorld) -> None:
    """A job is cancelled; a wait of a day ends, and so does the pause before a retry. The run tells what failed."""
    world = small
    world.held, world.fails = frozenset({"train"}), frozenset({"again", "broken"})
    branches = ["train", "pause", "again", "broken"]
    async with world.leading():
        run_id = await world.begin(
            step("fan", kind="parallel", config={"branches": branches, "fail_fast": True}),
            step("train", kind="job"),
            step("pause", kind="wait", config={"duration": "1d"}),
            step("again", kind="job", retry={"max_retries": 1, "delay": "1h"}),
            step("first", kind="wait", config={"duration": "1s"}),
            step("broken", "first", kind="job"),
        )
        _, message = await world.until_ended(run_id)

    assert message.startswith("step fan failed: branch broken: job nightly-broken-")
    errors = {one.key: one.error for one in await world.database.read(lambda session: steps_of(session, run_id))}
    assert {errors[name] for name in branches[:3]} == {"stopped: another step failed"}
    states = await world.database.read(lambda session: session.scalars(select(JobRecord.state)).all())
    assert sorted(states) == ["cancelled", "failed", "failed"]


async def test_a_step_waits_for_a_service_to_run_and_for_no_job_if_told_so(small: EngineWorld) -> None:
    """A service that fails before it runs fails its step."""
    world = small
    world.held, world.fails = frozenset({"later"}), frozenset({"broken"})
    async with world.leading():
        run_id = await world.begin(
            step("serve", kind="job", config=SERVE),
            step("later", kind="job", config=JOB | {"wait_for_ready": False}),
            step("broken", kind="job", config=SERVE),
        )
        _, message = await world.until_ended(run_id)

    assert message.startswith("step broken failed: job nightly-broken-")
    outputs = {one.key: one.output for one in await world.database.read(lambda session: steps_of(session, run_id))}
    assert [outputs[key].get("status") for key in ("serve", "later", "broken")] == ["running", "pending", None]


async def test_a_job_that_runs_too_long_is_cancelled(small: EngineWorld) -> None:
    """The step fails with the limit."""
    world = small
    world.held = frozenset({"train"})
    async with world.leading():
        run_id = await world.begin(step("train", kind="job", timeout="1s"))
        _, message = await world.until_ended(run_id)

    assert message.endswith("timed out after 1 s and was cancelled")


async def test_a_run_that_can_no_longer_be_read_fails_alone(small: EngineWorld) -> None:
    """An upgrade made its pipeline invalid before it began: it says so, and the next run begins and ends."""
    world = small
    bad = await world.begin(step("a"), name="bad")

    def spoil(session: Session) -> None:
        record = get_run(session, bad)
        record.document = record.document | {"steps": []}

    await world.database.write(spoil)
    good = await world.begin(step("a"))
    async with world.leading():
        assert await world.until_ended(good) == ("succeeded", "")
        state, message = await world.until_ended(bad)

    assert state == "failed"
    assert message.startswith("the pipeline of run 1 can no longer be read: steps")


@pytest.mark.parametrize("by", ["the end of a try", "the next leader", "a cancel"])
async def test_a_run_that_can_be_read_no_more_ends(small: EngineWorld, by: str) -> None:
    """An upgrade made its pipeline invalid while it ran: it fails and says why, and its job is cancelled."""
    world = small
    world.held = frozenset({"train", "other"})
    async with world.leading():
        run_id = await world.begin(step("train", kind="job"), step("other", kind="job"))
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(*RUNNING_TRAIN)))

        def spoil(session: Session) -> None:
            record = get_run(session, run_id)
            record.document = record.document | {"steps": []}

        if by == "the end of a try":
            await world.database.write(spoil)
            world.held = frozenset({"train"})
            state, message = await world.until_ended(run_id)
    if by != "the end of a try":
        await world.database.write(spoil)
        now = world.clock.now()
        if by == "a cancel":
            await world.database.write(lambda session: cancel_run(session, run_id, now=now, actor="ann"))
        async with world.leading():
            state, message = await world.until_ended(run_id)

    assert state == "failed"
    assert message.startswith("the pipeline of run 1 can no longer be read: steps")
    job = await world.database.read(
        lambda session: session.scalars(select(JobRecord).where(JobRecord.name.like("nightly-train-%"))).one()
    )
    assert job.cancel_requested_at is not None
    assert "running" not in (await world.states(run_id)).values()


async def test_the_next_leader_continues_in_the_same_process(database: Database, database_url: str) -> None:
    """Steps wait across the change, and no finished step runs again."""
    calls: list[str] = []
    world = EngineWorld(database, database_url, {"note": lambda _parameters, key: calls.append(key)})
    world.held = frozenset({"train"})
    async with world.leading():
        run_id = await world.begin(
            step("first", config={"function_name": "note"}), step("train", "first", kind="job"), step("last", "train")
        )
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(*RUNNING_TRAIN)))
    world.held = frozenset()
    async with world.leading():
        assert await world.until_ended(run_id) == ("succeeded", "")

    assert len(calls) == 1
    assert await database.read(lambda session: session.scalar(select(func.count()).select_from(JobRecord))) == 1


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_leader_that_stands_still_holds_up_nobody(database: Database, database_url: str) -> None:
    """It stopped within a transaction that had locked the run; the next leader ends the run all the same."""
    world = EngineWorld(database, database_url)
    run_id = await world.begin(step("a"))
    context = multiprocessing.get_context("spawn")
    frozen = context.Process(target=killed.stand_still, args=(database_url, run_id, 1))
    frozen.start()
    assert frozen.pid is not None
    _, status = await asyncio.to_thread(os.waitpid, frozen.pid, os.WUNTRACED)
    async with world.leading():
        try:
            assert os.WIFSTOPPED(status)
            assert await world.until_ended(run_id) == ("succeeded", "")
        finally:
            frozen.kill()
            frozen.join()


async def test_forbid_refuses_a_second_run_and_replace_cancels_the_first(small: EngineWorld) -> None:
    """With replace, the new run begins once the old one has ended."""
    world = small
    world.held = frozenset({"train"})
    async with world.leading():
        await world.begin(step("train", kind="job"), overlap="forbid")
        with pytest.raises(RunActive, match="run 1 of pipeline nightly is active"):
            await world.begin(step("train", kind="job"), overlap="forbid")
        first = await world.begin(step("train", kind="job"), name="other", overlap="replace")
        second = await world.begin(step("train", kind="job"), name="other", overlap="replace")
        assert await world.run_state(second) == ("pending", "")
        assert (await world.until_ended(first))[0] == "cancelled"
        world.held = frozenset()
        assert (await world.until_ended(second))[0] == "succeeded"


async def test_a_rerun_keeps_what_succeeded(small: EngineWorld) -> None:
    """The failed step and what follows run; the first step does not."""
    world, database = small, small.database
    world.fails = frozenset({"train"})
    async with world.leading():
        first = await world.begin(
            step("prepare", kind="job"), step("train", "prepare", kind="job"), step("last", "train")
        )
        await world.until_ended(first)
        world.fails = frozenset()
        now = world.clock.now()
        again, _ = await database.write(lambda session: rerun_run(session, first, now=now, actor="ann", key="k1"))
        assert (await world.until_ended(again.id))[0] == "succeeded"
        same, is_new = await database.write(lambda session: rerun_run(session, first, now=now, actor="ann", key="k1"))
        assert (same.id, is_new) == (again.id, False)
        with pytest.raises(KeyTaken):
            await database.write(lambda session: rerun_run(session, again.id, now=now, actor="ann", key="k1"))
        with pytest.raises(RunNotEnded, match="run 2 of pipeline nightly is succeeded"):
            await database.write(lambda session: rerun_run(session, again.id, now=now, actor="ann"))

    steps = await database.read(lambda session: session.scalars(select(JobRecord.document)).all())
    assert sorted(one["step_id"] for one in steps) == ["prepare", "train", "train"]


async def test_a_rerun_begins_a_service_again_that_was_cancelled(small: EngineWorld) -> None:
    """A service that still runs is kept, and a cancel of the second run reaches it."""
    world, database = small, small.database
    world.held = frozenset({"train"})

    async def cancel(run_id: str) -> None:
        now = world.clock.now()
        await database.write(lambda session: cancel_run(session, run_id, now=now, actor="ann"))
        assert (await world.until_ended(run_id))[0] == "cancelled"
        await world.until(lambda session: not session.scalars(select(JobRecord.id).where(ACTIVE_JOB)).all())

    async def again(run_id: str) -> str:
        now = world.clock.now()
        return (await database.write(lambda session: rerun_run(session, run_id, now=now, actor="ann")))[0].id

    async with world.leading():
        first = await world.begin(step("serve", kind="job", config=SERVE), step("train", "serve", kind="job"))
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(*RUNNING_TRAIN)))
        await cancel(first)
        world.held, world.fails = frozenset(), frozenset({"train"})
        second = await again(first)
        assert (await world.until_ended(second))[0] == "failed"
        world.held, world.fails = frozenset({"train"}), frozenset()
        third = await again(second)
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(*RUNNING_TRAIN)))
        await cancel(third)

    steps = await database.read(lambda session: session.scalars(select(JobRecord.document)).all())
    assert Counter(one["step_id"] for one in steps) == {"serve": 2, "train": 3}


async def test_branches_beyond_the_free_quota_run_one_after_the_other(small: EngineWorld) -> None:
    """EDGE-3: by the file of queues and the jobs that the queue has; the step says so."""
    world, database = small, small.database
    document, now = queue_file().model_dump(mode="json"), world.clock.now()
    await database.write(lambda session: store_queue_file(session, "local", document, now=now, actor="ops"))
    world.held = frozenset({"low", "high"})
    async with world.leading():
        run_id = await world.begin(
            step("fan", kind="parallel", config={"branches": ["low", "high"]}),
            gpu_step("low", 4, "low"),
            gpu_step("high", 4, "high"),
        )
        await world.until(lambda session: session.scalar(select(JobRecord.id).where(JobRecord.state == "running")))
        assert await world.states(run_id) == {"fan": "running", "low": "pending", "high": "running"}
        world.held = frozenset()
        assert (await world.until_ended(run_id))[0] == "succeeded"

    told = {one.key: one.output for one in await database.read(lambda session: steps_of(session, run_id))}["fan"]
    assert told["message"].startswith("high, low run one after the other, by priority: they need 8 GPUs together")
    assert told["message"].endswith("queue tenant-acme-queue has 7 free")


async def test_a_repeated_key_creates_one_run(small: EngineWorld) -> None:
    """Such as the instant of a trigger; other inputs under the same key are refused."""
    world = small
    first = await world.begin(step("a"), key="k1")
    again = await world.begin(step("a"), key="k1")

    assert again == first
    with pytest.raises(KeyTaken):
        await world.begin(step("a"), key="k1", given={"n": 3})
