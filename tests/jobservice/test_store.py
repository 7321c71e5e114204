"""The records on SQLite and on a real PostgreSQL: no duplicates, no losses, no partial writes."""

import asyncio
from dataclasses import replace
from datetime import timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest

from atoll.jobs.container import JobContainer
from atoll.jobs.costs.estimates import CostEstimate, JobKind
from atoll.jobs.model import Job, JobResources
from atoll.jobs.policy import JobIntent, JobPolicy
from atoll.jobs.states import IllegalStep, JobState, JobStep
from atoll.ml.queue_rules import QueueUsage
from jobs.database import Database
from jobs.errors import JobUnknown, KeyReused, NameTaken, RecordChanged
from jobs.records import JobRecord
from jobs.store import (
    JobFilter,
    active_ids,
    ask_to_cancel,
    change_job,
    create_job,
    digest_of,
    get_job,
    list_events,
    list_jobs,
    queue_usage,
    retry_job,
    service_id,
    take_step,
)
from tests.jobservice.made import NOW, after, job_of, new_job

EVERYTHING = JobFilter("local", None)
RUNS = (JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN)


async def made(database: Database, name: str = "tune", *steps: JobStep, **fields: object) -> JobRecord:
    """Record a job and take it through steps."""
    new = new_job(name, **fields)  # type: ignore[arg-type]
    record, _ = await database.write(lambda session: create_job(session, new, NOW, job_id=str(uuid4())))
    job_id = record.id
    for number, asked in enumerate(steps, 1):
        moment = after(number)
        record = await database.write(
            lambda session, asked=asked, moment=moment: take_step(session, job_id, asked, now=moment)
        )
    return record


async def test_a_job_comes_back_as_it_was_given(database: Database) -> None:
    """What is recorded is read back word for word, and its beginning is in its history."""
    given_job = job_of(
        ext_ml_gpu_count=2,
        policy={"deadline": "2030-01-31T22:00:00+02:00", "max_retries": 1},
        labels={"team": "vision"},
    )
    new = replace(new_job(), job=given_job)
    record, is_new = await database.write(lambda session: create_job(session, new, NOW, job_id=str(uuid4())))

    found = await database.read(lambda session: get_job(session, record.id))
    events, total = await database.read(lambda session: list_events(session, record.id, page=1, page_size=10))

    assert is_new
    assert Job.model_validate(found.document) == given_job
    assert (found.state, found.created_at, found.namespace, found.attempt) == ("pending", NOW, "tenant-acme", 1)
    assert [(one.what, one.state, one.actor, one.at) for one in events] == [("create", "pending", "ann", NOW)]
    assert total == 1


async def test_the_usage_of_a_queue_counts_jobs_with_gpus_in_the_cluster(database: Database) -> None:
    """Whether the job names the queue or the service chose it; none that waits, has ended, or is in another queue."""
    rows = [
        ("named", 2, "q", None, JobStep.SUBMIT),
        ("chosen", 4, None, "q", JobStep.SUBMIT),
        ("without", 0, None, "q", JobStep.SUBMIT),
        ("waiting", 8, None, "q", None),
        ("ended", 8, None, "q", JobStep.FAIL),
        ("other", 8, "r", None, JobStep.SUBMIT),
        ("nowhere", 8, None, None, JobStep.SUBMIT),
    ]
    for name, gpus, named, chosen, asked in rows:
        priced = CostEstimate(JobKind("batch", "", gpus), None, None, ())
        policy = {"queue_name": named} if named is not None else {}
        new = replace(new_job(name, policy=policy), queue_name=chosen, estimate=priced)
        record, _ = await database.write(lambda session, new=new: create_job(session, new, NOW, job_id=str(uuid4())))
        if asked is not None:
            await database.write(
                lambda session, record=record, asked=asked: take_step(session, record.id, asked, now=NOW)
            )

    assert await database.read(lambda session: queue_usage(session, "local", "q")) == QueueUsage(2, 6)
    assert await database.read(lambda session: queue_usage(session, "other", "q")) == QueueUsage(0, 0)


async def test_moments_of_any_zone_are_the_same_moments(database: Database) -> None:
    """A time that is given in another zone is kept as that moment."""
    zone = timezone(timedelta(hours=5, minutes=30))
    record = await made(database)
    await database.write(
        lambda session: change_job(
            session,
            record.id,
            version=record.version,
            now=NOW.astimezone(zone),
            changes={"not_before": NOW.astimezone(zone)},
        )
    )

    found = await database.read(lambda session: get_job(session, record.id))

    assert found.not_before == NOW
    assert found.not_before.tzinfo is not None


async def test_the_same_key_makes_one_job_however_many_ask_at_once(database: Database) -> None:
    """EDGE-9, IDM-1: sixteen requests with one key at a time: one job, and all are told of it."""
    new = new_job(key="pipeline-7-step-2-run-1")
    found = await asyncio.gather(
        *(database.write(lambda session: create_job(session, new, NOW, job_id=str(uuid4()))) for _ in range(16))
    )

    assert len({record.id for record, _ in found}) == 1
    assert sum(is_new for _, is_new in found) == 1
    assert (await database.read(lambda session: list_jobs(session, EVERYTHING, page=1, page_size=10))).total == 1


def test_a_field_that_a_later_version_adds_leaves_recorded_requests_what_they_were() -> None:
    """The digest of a request tells only what differs from defaults, in every part of a job."""

    class LaterPolicy(JobPolicy):
        added: int = 3

    class LaterIntent(JobIntent):
        added: tuple[str, ...] = ()

    class LaterContainer(JobContainer):
        added: bool = False

    class LaterResources(JobResources):
        added: str = "some"

    class LaterJob(Job):
        policy: LaterPolicy = LaterPolicy()
        intent: LaterIntent = LaterIntent()
        container: LaterContainer | None = None
        resources: LaterResources = LaterResources()
        added: float = 1.5

    fields: dict[str, Any] = {"policy": {"max_retries": 1}, "intent": {"cost_center": "a"}}
    for given in ({}, fields | {"resources": {"cpu_request": "1"}}):
        new = new_job(**given)
        later = LaterJob.model_validate(new.job.model_dump(mode="json", exclude_unset=True))
        assert digest_of(replace(new, job=later)) == digest_of(new)
    other = LaterJob.model_validate(new.job.model_dump(mode="json", exclude_unset=True) | {"added": 2})
    assert digest_of(replace(new, job=other)) != digest_of(new)


def test_the_digest_of_a_request_stays_what_it_was_recorded_as() -> None:
    """A change of it would let recorded idempotency keys belong to other requests."""
    new = new_job(key="k", policy={"max_retries": 3, "retry_delay_seconds": 5}, ext_ml_gpu_count=2, labels={"a": "b"})

    assert digest_of(new) == "977fd9e3f7e7a447d15633062c55f5e98384cdba5a351344f8ece9b66ca1b3f0"


async def test_a_key_that_comes_with_another_job_is_refused(database: Database) -> None:
    """A key stands for one request of one tenant; the order of fields makes no other request."""
    first = await made(database, key="k-1", policy={"max_retries": 1, "retry_delay_seconds": 5})

    same = await made(database, key="k-1", policy={"retry_delay_seconds": 5, "max_retries": 1})
    other_tenant = await made(database, key="k-1", tenant="other")
    with pytest.raises(KeyReused, match=f"the idempotency key k-1 belongs to job {first.id}"):
        await made(database, "other", key="k-1")

    assert same.id == first.id
    assert other_tenant.id != first.id


WITHIN = {"policy": {"unique_seconds": 60}}
TO_SUCCEEDED = (JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN, JobStep.SUCCEED)


@pytest.mark.parametrize("steps", [(), TO_SUCCEEDED], ids=["while it waits", "with its result"])
async def test_an_identical_request_within_its_window_is_the_first_job(
    database: Database, steps: tuple[JobStep, ...]
) -> None:
    """EDGE-14: sixteen at once, and one later: each gets the first one, whatever its result will be. What differs,
    comes from another tenant, or after the window is another job."""

    async def submit(second: float, **fields: Any) -> tuple[JobRecord, bool]:
        new = new_job(**{"ext_ml_model_id": "llama", **WITHIN, **fields})
        return await database.write(lambda session: create_job(session, new, after(second), job_id=str(uuid4())))

    found = await asyncio.gather(*(submit(0) for _ in range(16)))
    first = found[0][0]
    for one in steps:
        await database.write(lambda session, one=one: take_step(session, first.id, one, now=NOW))
    again, is_new = await submit(59, policy={"unique_seconds": 600})
    other_tenant, _ = await submit(59, tenant="other")
    if steps:
        different, _ = await submit(59, ext_ml_model_id="mistral")
        assert different.id != first.id
    else:
        with pytest.raises(NameTaken):
            await submit(59, ext_ml_model_id="mistral")

    assert {record.id for record, _ in found} == {again.id} == {first.id}
    assert [sum(new for _, new in found), is_new] == [1, False]
    assert again.state == ("succeeded" if steps else "pending")
    assert other_tenant.id != first.id


@pytest.mark.parametrize(
    ("steps", "second"),
    [(TO_SUCCEEDED, 60), ((JobStep.FAIL,), 1), ((JobStep.CANCEL,), 1)],
    ids=["after the window", "the first one failed", "the first one was cancelled"],
)
async def test_an_identical_request_is_a_new_job(database: Database, steps: tuple[JobStep, ...], second: float) -> None:
    """There is no result to give, or it is too old."""
    new = new_job(**WITHIN)
    first, _ = await database.write(lambda session: create_job(session, new, NOW, job_id=str(uuid4())))
    for one in steps:
        await database.write(lambda session, one=one: take_step(session, first.id, one, now=NOW))
    later, is_new = await database.write(lambda session: create_job(session, new, after(second), job_id=str(uuid4())))

    assert is_new
    assert later.id != first.id


async def test_a_name_is_free_again_when_its_job_has_ended(database: Database) -> None:
    """Two active jobs of one name in one namespace would be one object in the cluster; elsewhere or later they may."""
    first = await made(database)
    with pytest.raises(NameTaken, match="namespace tenant-acme has an active job tune: wait for its end"):
        await made(database)
    await made(database, tenant="other")
    await database.write(lambda session: take_step(session, first.id, JobStep.CANCEL, now=NOW))

    second = await made(database, "tune", JobStep.SUBMIT, JobStep.ADMIT, JobStep.FAIL)
    third = await made(database)
    with pytest.raises(NameTaken):
        await database.write(lambda session: retry_job(session, second.id, now=NOW, actor="ann"))

    assert third.state == "pending"
    assert (await database.read(lambda session: get_job(session, second.id))).state == "failed"


async def test_steps_leave_their_times_and_their_history(database: Database) -> None:
    """A job that runs and succeeds has its start, its end, and one event for each step."""
    record = await made(database, "tune", JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN, JobStep.SUCCEED)

    events, _ = await database.read(lambda session: list_events(session, record.id, page=1, page_size=10))
    assert (record.state, record.started_at, record.ended_at) == ("succeeded", after(3), after(4))
    assert [one.what for one in events] == ["create", "submit", "admit", "run", "succeed"]
    assert [one.state for one in events] == ["pending", "queued", "admitted", "running", "succeeded"]


async def test_an_illegal_step_changes_nothing(database: Database) -> None:
    """A step that the table does not have is refused with the job's history, and no row is touched."""
    record = await made(database, "tune", JobStep.SUBMIT)

    with pytest.raises(IllegalStep, match=r"job tune is queued, cannot succeed: .*its history: create, submit"):
        await database.write(lambda session: take_step(session, record.id, JobStep.SUCCEED, now=after(9)))

    found = await database.read(lambda session: get_job(session, record.id))
    assert (found.state, found.updated_at, found.version) == ("queued", after(1), record.version)


async def test_a_decision_about_an_older_record_is_refused(database: Database) -> None:
    """Whoever decided by what has changed meanwhile must look again."""
    record = await made(database)
    version = record.version
    await database.write(lambda session: ask_to_cancel(session, record.id, now=after(1), actor="ann"))

    with pytest.raises(RecordChanged):
        await database.write(lambda session: take_step(session, record.id, JobStep.SUBMIT, now=NOW, version=version))
    with pytest.raises(RecordChanged):
        await database.write(lambda session: change_job(session, record.id, version=version, now=NOW, changes={}))


async def test_to_cancel_twice_is_to_cancel_once(database: Database) -> None:
    """The wish is noted once with who had it; a job that has ended has nothing left to cancel."""
    record = await made(database)
    for actor in ("ann", "bob"):
        await database.write(lambda session, actor=actor: ask_to_cancel(session, record.id, now=NOW, actor=actor))
    found = await database.read(lambda session: get_job(session, record.id))
    events, total = await database.read(lambda session: list_events(session, record.id, page=1, page_size=10))
    ended = await made(database, "other", JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN, JobStep.SUCCEED)

    assert (found.state, found.cancel_requested_by) == ("pending", "ann")
    assert total == 2
    assert events[1].what == "ask to cancel"
    with pytest.raises(IllegalStep, match="job other is succeeded, cannot cancel: there is nothing left to cancel"):
        await database.write(lambda session: ask_to_cancel(session, ended.id, now=NOW, actor="ann"))


async def test_a_retry_by_hand_begins_anew(database: Database) -> None:
    """A failed job that somebody tries again is pending, in its next attempt, with all of its retries."""
    failed = await made(database, "tune", JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN, JobStep.FAIL)
    record = await database.write(lambda session: retry_job(session, failed.id, now=after(9), actor="ann"))

    assert (record.state, record.attempt, record.retry_count) == ("pending", 2, 0)
    assert (record.started_at, record.ended_at, record.message) == (None, None, "tried again by ann")
    with pytest.raises(IllegalStep, match="only a failed job can be retried"):
        await database.write(lambda session: retry_job(session, failed.id, now=after(9), actor="ann"))


@pytest.mark.parametrize("steps", [(), RUNS[:1], RUNS[:2], RUNS, (*RUNS, JobStep.SUCCEED), (JobStep.CANCEL,)])
async def test_only_a_failed_job_is_retried_by_hand(database: Database, steps: tuple[JobStep, ...]) -> None:
    """In any other state the request is refused: it would restart what runs, and forget that it is to be cancelled."""
    record = await made(database, "tune", *steps)
    with pytest.raises(IllegalStep, match="only a failed job can be retried"):
        await database.write(lambda session: retry_job(session, record.id, now=after(9), actor="ann"))

    same = await database.read(lambda session: get_job(session, record.id))
    assert (same.state, same.version) == (record.state, record.version)


async def test_pages_have_true_totals_and_lose_nobody(database: Database) -> None:
    """Pages are disjoint, newest first, and together everything; the total counts all of them."""
    for number in range(7):
        await made(database, f"job-{number}", tenant="acme" if number % 2 else "other")

    pages = [
        await database.read(lambda session, page=page: list_jobs(session, EVERYTHING, page=page, page_size=3))
        for page in (1, 2, 3, 4)
    ]

    assert [len(page.records) for page in pages] == [3, 3, 1, 0]
    assert [page.total for page in pages] == [7, 7, 7, 7]
    ids = [record.id for page in pages for record in page.records]
    assert len(set(ids)) == 7
    assert ids == sorted(ids, reverse=True)  # all were created in one moment


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        pytest.param(JobFilter("local", None), {"a", "b", "c"}, id="everything"),
        pytest.param(JobFilter("elsewhere", None), set(), id="another cluster"),
        pytest.param(JobFilter("local", ()), set(), id="a caller who may see nothing"),
        pytest.param(JobFilter("local", (("acme", None),)), {"a", "b"}, id="a tenant"),
        pytest.param(JobFilter("local", (("acme", "vision"),)), {"b"}, id="a project of a tenant"),
        pytest.param(JobFilter("local", (("acme", "vision"), ("other", None))), {"b", "c"}, id="both"),
        pytest.param(JobFilter("local", None, states=(JobState.QUEUED,)), {"c"}, id="a state"),
        pytest.param(JobFilter("local", None, project_id="vision"), {"b"}, id="a project"),
        pytest.param(JobFilter("local", None, name="b"), {"b"}, id="a name"),
        pytest.param(JobFilter("local", None, job_type="service"), set(), id="a type"),
        pytest.param(JobFilter("local", None, source_type="direct"), {"a", "b", "c"}, id="a source"),
    ],
)
async def test_lists_show_what_is_asked_for_and_may_be_seen(
    database: Database, wanted: JobFilter, names: set[str]
) -> None:
    """Filters narrow, and the scopes of the caller bound everything."""
    await made(database, "a")
    await made(database, "b", project_id="vision")
    await made(database, "c", JobStep.SUBMIT, tenant="other", project_id="speech")

    page = await database.read(lambda session: list_jobs(session, wanted, page=1, page_size=10))

    assert {record.name for record in page.records} == names
    assert page.total == len(names)


async def test_active_jobs_are_those_that_have_not_ended(database: Database) -> None:
    """Whoever looks after jobs is given the living ones of its cluster, oldest first."""
    first = await made(database, "a")
    await made(database, "b", JobStep.CANCEL)
    third = await made(database, "c", JobStep.SUBMIT)

    found = await database.read(lambda session: active_ids(session, "local"))

    assert sorted(found) == sorted([first.id, third.id])
    assert await database.read(lambda session: active_ids(session, "elsewhere")) == []


async def test_a_database_belongs_to_one_service_for_ever(database: Database) -> None:
    """The id that objects bear is chosen once."""
    first = await database.write(lambda session: service_id(session, NOW))

    assert await database.write(lambda session: service_id(session, after(1000))) == first


async def test_unknown_jobs_are_told(database: Database) -> None:
    """Whatever is asked of a job that is not there names it."""
    for work in (
        lambda session: get_job(session, "nobody"),
        lambda session: take_step(session, "nobody", JobStep.RUN, now=NOW),
        lambda session: ask_to_cancel(session, "nobody", now=NOW, actor="ann"),
        lambda session: retry_job(session, "nobody", now=NOW, actor="ann"),
    ):
        with pytest.raises(JobUnknown, match="there is no job nobody"):
            await database.write(work)


async def test_work_that_raises_leaves_nothing_behind(database: Database) -> None:
    """A transaction is kept whole or not at all."""

    def work(session: object) -> None:
        create_job(session, new_job(), NOW, job_id=str(uuid4()))  # type: ignore[arg-type]
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        await database.write(work)

    assert (await database.read(lambda session: list_jobs(session, EVERYTHING, page=1, page_size=1))).total == 0
