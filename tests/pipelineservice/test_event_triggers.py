"""What happens to buckets, to jobs and to numbers begins one run, also after a restart and beside another replica."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from atoll.jobs.states import JobStep
from jobs.database import Database, engine_of
from jobs.store import ask_to_cancel, create_job, take_step
from pipelines.api import PIPELINES, add_pipelines
from pipelines.firing import TriggerKeeper
from pipelines.histories import ENTRIES_TOGETHER_MAX
from pipelines.records import HistoryMarkRecord
from pipelines.serving import registered_functions
from pipelines.trigger_api import EVENTS, add_triggers
from tests.jobservice.made import new_job
from tests.jobservice.service import JobService
from tests.pipelines.made import RUNNERS, step
from tests.pipelines.test_events import RECORD, with_key

DOCUMENT = {"name": "nightly", "inputs": {"told": ""}, "steps": [step("a")]}


@pytest.fixture
async def service(database: Database) -> AsyncIterator[JobService]:
    """Yield the API, without an engine."""
    async with JobService.of(database) as found:
        add_pipelines(found.app, registered_functions(), RUNNERS)
        add_triggers(found.app)
        yield found


@pytest.fixture
def keepers(service: JobService, database_url: str) -> list[TriggerKeeper]:
    """Return two replicas that both believe to lead, each with its own connections."""
    return [TriggerKeeper(Database(engine_of(database_url)), service.clock) for _ in range(2)]


async def look(keepers: list[TriggerKeeper]) -> None:
    """Let all of them look at once; one that loses to the other looks again, as it does in its next second."""

    async def once(keeper: TriggerKeeper) -> None:
        try:
            await keeper.look()
        except SQLAlchemyError:
            await keeper.look()

    await asyncio.gather(*map(once, keepers))


async def triggered(service: JobService, **trigger: Any) -> str:
    """Apply a pipeline with a trigger; return its path."""
    made = (await service.call("POST", PIPELINES, json=DOCUMENT)).json()
    path = f"{PIPELINES}/{made['id']}"
    answer = await service.call("POST", f"{path}/triggers", json=trigger)
    assert answer.status_code == 201, answer.text
    return path


async def told(service: JobService, path: str) -> list[str]:
    """Return the input of each run, the oldest first."""
    items = (await service.call("GET", f"{path}/executions")).json()["items"]
    return [one["inputs"].get("told", "") for one in reversed(items)]


async def send(service: JobService, body: Any, *, status: int = 202, by: str = "ann") -> int:
    """Send what a bucket sends; return how many runs began."""
    answer = await service.call("POST", EVENTS, by=by, content=json.dumps(body))
    assert answer.status_code == status, answer.text
    return len(answer.json().get("executions", ()))


async def test_a_bucket_begins_a_run_for_each_object(service: JobService) -> None:
    """Once, however often and at how many replicas the store sends it; only of the senders' tenants."""
    path = await triggered(
        service,
        trigger_type="event",
        event_topic="com.amazonaws.s3.ObjectCreated:*",
        event_filter="event.subject.startsWith('llama/')",
        inputs={"told": "${event.data.s3.bucket.name}/${event.subject}"},
    )
    body = {"Records": [RECORD, with_key("llama/b"), with_key("other/b"), with_key("llama/c", "ObjectRemoved:Delete")]}

    begun = await asyncio.gather(*(send(service, body) for _ in range(3)))

    assert sum(begun) == 2
    assert await send(service, body, by="eve/others") == 0
    assert await send(service, {"Event": "s3:TestEvent", "Bucket": "models"}) == 0
    assert sorted(await told(service, path)) == ["models/llama/a b+é.bin", "models/llama/b"]
    assert await send(service, {"Records": [1]}, status=422) == 0


async def submitted(service: JobService, name: str, **fields: Any) -> str:
    """Record a job that is queued; return its id."""
    now, job_id = service.clock.now(), f"00000000-0000-4000-8000-{abs(hash(name)) % 10**12:012}"

    def write(session: Session) -> None:
        create_job(session, new_job(name, **fields), now, job_id=job_id)
        take_step(session, job_id, JobStep.SUBMIT, now=now)

    await service.database.write(write)
    return job_id


async def move(service: JobService, job_id: str, *steps: JobStep) -> None:
    """Move a job on."""
    now = service.clock.now()

    def write(session: Session) -> None:
        for one in steps:
            take_step(session, job_id, one, now=now, message=f"by {one}")

    await service.database.write(write)


TO_FAILED = (JobStep.ADMIT, JobStep.RUN, JobStep.FAIL)


async def test_a_state_of_a_job_begins_one_run(service: JobService, keepers: list[TriggerKeeper]) -> None:
    """Each time a job of the tenant enters it, also while no service ran; not what was before the trigger."""
    await move(service, await submitted(service, "before"), *TO_FAILED)
    await service.clock.advance(1)
    path = await triggered(
        service,
        trigger_type="event",
        event_topic="atoll.job.failed",
        event_filter="event.data.job_type == 'batch'",
        inputs={"told": "${event.subject}: ${event.data.message}"},
    )
    await look(keepers)
    job = await submitted(service, "tune")
    await look(keepers)
    assert await told(service, path) == []

    await move(service, job, *TO_FAILED)
    await move(service, await submitted(service, "other", tenant="other"), *TO_FAILED)
    await look(keepers)
    await look(keepers[:1])
    assert await told(service, path) == ["tune: by fail"]

    await service.clock.advance(3600)
    await move(service, job, JobStep.RETRY, JobStep.SUBMIT, *TO_FAILED)
    await service.clock.advance(3600)
    await look(keepers)
    await service.clock.advance(3600)
    await look(keepers)
    assert await told(service, path) == ["tune: by fail"] * 2


async def test_a_request_is_no_state(service: JobService, keepers: list[TriggerKeeper]) -> None:
    """Asking to cancel a running job does not begin a run of a trigger on running jobs a second time."""
    path = await triggered(service, trigger_type="event", event_topic="atoll.job.running")
    job = await submitted(service, "tune")
    await move(service, job, JobStep.ADMIT, JobStep.RUN)
    await service.database.write(lambda session: ask_to_cancel(session, job, now=service.clock.now(), actor="ann"))
    await look(keepers)

    assert len(await told(service, path)) == 1


async def test_a_job_of_the_pipeline_itself_begins_no_run(service: JobService, keepers: list[TriggerKeeper]) -> None:
    """Else one failure would follow the other for ever."""
    path = await triggered(service, trigger_type="event", event_topic="atoll.job.*")
    await submitted(service, "own", source_type="pipeline", source_id=path.rpartition("/")[2])
    await look(keepers)

    assert await told(service, path) == []


async def test_more_states_than_one_transaction_takes(service: JobService, keepers: list[TriggerKeeper]) -> None:
    """One look deals with all of them, and what is older than the slack is not read again."""
    path = await triggered(service, trigger_type="event", event_topic="atoll.job.preempted")
    job = await submitted(service, "tune")
    for _ in range(ENTRIES_TOGETHER_MAX // 2):
        await move(service, job, JobStep.PREEMPT, JobStep.REQUEUE)
    await look(keepers[:1])

    total = (await service.call("GET", f"{path}/executions")).json()["total"]
    assert total == ENTRIES_TOGETHER_MAX // 2
    await service.clock.advance(120)
    await look(keepers[:1])
    mark = await service.database.read(lambda session: session.scalars(select(HistoryMarkRecord)).one())
    assert mark.dealt_with == []


async def test_a_number_in_events_fires_once_for_each_crossing(service: JobService) -> None:
    """With a limit and one to come back to; an event that is sent again changes nothing."""
    path = await triggered(
        service,
        trigger_type="threshold",
        event_topic="latency",
        event_filter="event.source == '/a'",
        threshold={"value": "event.data.ms", "above": 100, "rearm": 80},
        inputs={"told": "${event.data.ms} ms"},
    )
    begun = []
    for number, ms in enumerate((90, 110, 120, 90, 130, 70, 140)):
        head = {"specversion": "1.0", "id": str(number), "source": "/a", "type": "latency", "data": {"ms": ms}}
        headers = {"Content-Type": "application/cloudevents+json"}
        sent = [service.call("POST", EVENTS, content=json.dumps(head), headers=headers) for _ in range(2)]
        begun.append(sum([len(one.json()["executions"]) for one in await asyncio.gather(*sent)]))

    assert begun == [0, 1, 0, 0, 0, 0, 1]
    assert await told(service, path) == ["110 ms", "140 ms"]


async def test_a_number_of_the_service_fires_once_for_each_crossing(
    service: JobService, keepers: list[TriggerKeeper]
) -> None:
    """Whoever leads, and after a restart too."""
    path = await triggered(
        service,
        trigger_type="threshold",
        threshold={"metric": "queued_jobs", "above": 1, "rearm": 0},
        inputs={"told": "${string(event.data.value)}"},
    )
    jobs = [await submitted(service, name) for name in ("a", "b")]
    await submitted(service, "theirs", tenant="other")
    for _ in range(2):
        await look(keepers)
    assert await told(service, path) == ["2"]

    await move(service, jobs[0], JobStep.ADMIT)
    await look(keepers)
    await move(service, await submitted(service, "c"), JobStep.ADMIT)
    await look(keepers)
    assert len(await told(service, path)) == 1
    await move(service, jobs[1], JobStep.ADMIT)
    await look(keepers)
    for name in ("d", "e"):
        await submitted(service, name)
    await look(keepers[1:])

    assert await told(service, path) == ["2", "2"]


async def test_the_longest_wait_is_a_number(service: JobService, keepers: list[TriggerKeeper]) -> None:
    """Of the job whose state has not changed for the longest time."""
    path = await triggered(
        service, trigger_type="threshold", threshold={"metric": "longest_wait_seconds", "above": 600}
    )
    await submitted(service, "a")
    await service.clock.advance(600)
    await look(keepers)
    assert await told(service, path) == []
    await service.clock.advance(1)
    await look(keepers)

    assert len(await told(service, path)) == 1
    shown = (await service.call("GET", f"{path}/triggers")).json()["items"][0]["last_message"]
    assert shown == "began run 1: longest_wait_seconds is 601"


async def test_nobody_sends_what_the_service_tells(service: JobService) -> None:
    """An event of a type that begins with atoll. is refused."""
    head = {"specversion": "1.0", "id": "1", "source": "/a", "type": "atoll.job.failed"}
    headers = {"Content-Type": "application/cloudevents+json"}

    assert (await service.call("POST", EVENTS, content=json.dumps(head), headers=headers)).status_code == 422
