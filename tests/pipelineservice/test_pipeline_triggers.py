"""Triggers begin runs once: cron, webhooks, events, and ends of other runs."""

import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from jobs.database import Database, opened
from pipelines.api import PIPELINES, add_pipelines
from pipelines.firing import TriggerKeeper
from pipelines.records import RunRecord, TriggerRecord, migrate_pipelines
from pipelines.serving import registered_functions
from pipelines.signing import signature
from pipelines.trigger_api import EVENTS, add_triggers
from pipelines.triggers import FIRED_TOGETHER_MAX
from tests.jobservice.service import JobService
from tests.pipelines.made import RUNNERS, step

DOCUMENT = {"name": "nightly", "inputs": {"model": "none"}, "steps": [step("a")]}
BODY = b'{"a": 1}'


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobService]:
    """Yield the API, without an engine; its clock shows Saturday, 2026-01-31 12:00."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    database = opened(url)
    migrate_pipelines(url)
    async with JobService.of(database) as found:
        add_pipelines(found.app, registered_functions(), RUNNERS)
        add_triggers(found.app)
        yield found
    database.close()


async def triggered(service: JobService, name: str = "nightly", **trigger: Any) -> tuple[str, dict[str, Any]]:
    """Apply a pipeline with a trigger; return its path and the trigger."""
    made = (await service.call("POST", PIPELINES, json=DOCUMENT | {"name": name})).json()
    path = f"{PIPELINES}/{made['id']}"
    answer = await service.call("POST", f"{path}/triggers", json=trigger)
    assert answer.status_code == 201, answer.text
    return path, answer.json()


async def runs(service: JobService, path: str) -> list[dict[str, Any]]:
    """Return the runs of a pipeline, the oldest first."""
    return list(reversed((await service.call("GET", f"{path}/executions")).json()["items"]))


async def test_cron_begins_one_run_for_an_instant(service: JobService) -> None:
    """Two leaders look at it, and a third one that still sees the old record."""
    path, trigger = await triggered(service, trigger_type="cron", cron_expression="30 12 * * *")
    assert datetime.fromisoformat(trigger["next_run"]) == service.clock.now() + timedelta(minutes=30)

    first, second = (TriggerKeeper(service.database, service.clock) for _ in range(2))
    await first.look()
    assert await runs(service, path) == []
    await service.clock.advance(30 * 60)
    await first.look()
    await second.look()
    await _turn_back(service.database, trigger["id"], service.clock.now() - timedelta(minutes=1))
    await second.look()

    assert [one["cause"] for one in await runs(service, path)] == ["cron of 2026-01-31T12:30:00+00:00"]
    shown = (await service.call("GET", f"{path}/triggers")).json()["items"][0]
    assert datetime.fromisoformat(shown["next_run"]) == datetime.fromisoformat("2026-02-01T12:30:00+00:00")


async def _turn_back(database: Database, trigger_id: str, moment: datetime) -> None:
    def write(session: Any) -> None:
        record = session.get(TriggerRecord, trigger_id)
        record.looked_at, record.next_run = moment, moment

    await database.write(write)


async def test_a_disabled_trigger_does_not_make_up_what_passed(service: JobService) -> None:
    """It goes on with the next instant after it is enabled."""
    path, trigger = await triggered(service, trigger_type="cron", cron_expression="* * * * *", missed="all")
    keeper, own = TriggerKeeper(service.database, service.clock), f"{path}/triggers/{trigger['id']}"
    await service.call("PATCH", own, json={"enabled": False})
    await service.clock.advance(10 * 60)
    await keeper.look()
    await service.call("PATCH", own, json={"enabled": True})
    await service.clock.advance(60)
    await keeper.look()

    assert len(await runs(service, path)) == 1


async def test_an_end_while_a_trigger_was_disabled_begins_no_run(service: JobService) -> None:
    """Nor does it just after the trigger is enabled again; the next end does."""
    first = (await service.call("POST", PIPELINES, json=DOCUMENT | {"name": "first"})).json()["id"]
    path, trigger = await triggered(service, "after", trigger_type="dependency", depends_on_pipeline_id=first)
    keeper, own = TriggerKeeper(service.database, service.clock), f"{path}/triggers/{trigger['id']}"

    async def one_ends() -> None:
        began = (await service.call("POST", f"{PIPELINES}/{first}/execute")).json()["execution_id"]
        await service.clock.advance(1)
        await _end(service, began, "succeeded")
        await service.clock.advance(1)

    await service.call("PATCH", own, json={"enabled": False})
    await one_ends()
    await service.call("PATCH", own, json={"enabled": True})
    await keeper.look()
    assert await runs(service, path) == []
    await one_ends()
    await keeper.look()

    assert len(await runs(service, path)) == 1


async def test_a_forbidden_overlap_is_told(service: JobService) -> None:
    """The trigger's message says why no run began, and the trigger goes on."""
    made = (await service.call("POST", PIPELINES, json=DOCUMENT | {"overlap": "forbid"})).json()
    path = f"{PIPELINES}/{made['id']}"
    await service.call("POST", f"{path}/triggers", json={"trigger_type": "cron", "cron_expression": "* * * * *"})
    for _ in range(2):
        await service.clock.advance(60)
        await TriggerKeeper(service.database, service.clock).look()

    told = (await service.call("GET", f"{path}/triggers")).json()["items"][0]["last_message"]
    assert "run 1 of pipeline nightly is active" in told
    assert len(await runs(service, path)) == 1


def signed(service: JobService, secret: str, *, delivery: str = "d1", age_seconds: int = 0) -> dict[str, str]:
    """Return the headers of a delivery."""
    timestamp = str(int(service.clock.now().timestamp()) - age_seconds)
    return {
        "webhook-id": delivery,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,bm90IGl0 {signature(secret, delivery, timestamp, BODY)}",
    }


async def test_a_trigger_that_can_no_longer_be_read_is_disabled_alone(service: JobService) -> None:
    """An upgrade made it invalid: it says so, and the other one begins its run."""
    cron = {"trigger_type": "cron", "cron_expression": "30 12 * * *"}
    bad_path, bad = await triggered(service, "bad", **cron)
    path, _ = await triggered(service, **cron)

    def spoil(session: Session) -> None:
        record = session.get(TriggerRecord, bad["id"])
        assert record is not None
        record.document = record.document | {"timezone": 1}

    await service.database.write(spoil)
    await service.clock.advance(30 * 60)
    await TriggerKeeper(service.database, service.clock).look()

    def shown(session: Session) -> tuple[bool, str]:
        record = session.get(TriggerRecord, bad["id"])
        assert record is not None
        return record.enabled, record.last_message

    enabled, message = await service.database.read(shown)
    assert (len(await runs(service, bad_path)), len(await runs(service, path))) == (0, 1)
    assert not enabled
    assert message.startswith("disabled: the trigger can no longer be read: timezone: ")


async def test_a_signed_webhook_begins_one_run_per_delivery(service: JobService) -> None:
    """A replay begins none; without a right signature nothing tells whether the webhook exists."""
    path, trigger = await triggered(service, trigger_type="webhook")
    secret, url = trigger["webhook_secret"], trigger["url"]

    async def deliver(where: str, body: bytes = BODY, **headers: str) -> int:
        return (await service.call("POST", where, by="", content=body, headers=headers)).status_code

    assert [await deliver(url, **signed(service, secret)) for _ in range(2)] == [202, 202]
    assert await deliver(url, **signed(service, secret, delivery="d2")) == 202
    for headers in (
        {},
        signed(service, secret, delivery="d3", age_seconds=301),
        signed(service, secret[:-8] + "AAAAAAA="),
    ):
        assert await deliver(url, **headers) == 401
    assert await deliver(url, b"other", **signed(service, secret, delivery="d4")) == 401
    assert await deliver("/api/hooks/" + "0" * 8 + "-0000-4000-8000-" + "0" * 12, **signed(service, secret)) == 401

    assert len(await runs(service, path)) == 2
    assert "webhook_secret" not in json.dumps(
        (await service.call("GET", f"{path}/triggers")).json()["items"][0]["trigger"]
    )
    assert (await service.call("GET", f"{path}/triggers")).json()["items"][0]["webhook_secret"] is None


@pytest.mark.parametrize("is_binary", [False, True])
async def test_an_event_begins_runs_of_the_callers_tenants(service: JobService, is_binary: bool) -> None:
    """Once per source and id, with inputs from its data; other tenants' events reach nothing."""
    path, _ = await triggered(
        service,
        trigger_type="event",
        event_topic="model.pushed",
        event_filter="event.data.version > 2",
        inputs={"model": "${event.data.name}"},
    )

    async def send(by: str, version: int, event_id: str = "e1") -> int:
        data = {"name": "llama", "version": version}
        head = {"specversion": "1.0", "id": event_id, "source": "/models", "type": "model.pushed"}
        if is_binary:
            headers = {f"ce-{key}": value for key, value in head.items()} | {"Content-Type": "application/json"}
            answer = await service.call("POST", EVENTS, by=by, content=json.dumps(data), headers=headers)
        else:
            headers = {"Content-Type": "application/cloudevents+json"}
            answer = await service.call(
                "POST", EVENTS, by=by, content=json.dumps(head | {"data": data}), headers=headers
            )
        assert answer.status_code == 202, answer.text
        return len(answer.json()["executions"])

    assert [await send("ann", 3), await send("ann", 3), await send("ann", 2, "e2")] == [1, 0, 0]
    assert [await send("eve/others", 3, "e3"), await send("vic", 3, "e4")] == [0, 0]
    assert [one["inputs"] for one in await runs(service, path)] == [{"model": "llama"}]


async def test_events_with_long_ids_are_told_apart(service: JobService) -> None:
    """They differ at the end alone."""
    path, _ = await triggered(service, trigger_type="event", event_topic="a")
    headers = {"Content-Type": "application/cloudevents+json"}
    for last in "121":
        event = {"specversion": "1.0", "id": "i" * 255 + last, "source": "s" * 256, "type": "a"}
        answer = await service.call("POST", EVENTS, content=json.dumps(event), headers=headers)
        assert answer.status_code == 202, answer.text

    assert len(await runs(service, path)) == 2


async def test_the_end_of_another_pipeline_begins_a_run(service: JobService) -> None:
    """Only a success, unless any end is wanted; each end once."""
    first = (await service.call("POST", PIPELINES, json=DOCUMENT | {"name": "first"})).json()["id"]
    after, _ = await triggered(service, "after", trigger_type="dependency", depends_on_pipeline_id=first)
    either, _ = await triggered(
        service, "either", trigger_type="dependency", depends_on_pipeline_id=first, depends_on_job_status="any"
    )
    for state in ("succeeded", "cancelled"):
        began = (await service.call("POST", f"{PIPELINES}/{first}/execute")).json()["execution_id"]
        await _end(service, began, state)
        for _ in range(2):
            await TriggerKeeper(service.database, service.clock).look()

    assert (len(await runs(service, after)), len(await runs(service, either))) == (1, 2)


async def _end(service: JobService, run_id: str, state: str) -> None:
    def write(session: Any) -> None:
        record = session.get(RunRecord, run_id)
        record.state, record.ended_at = state, service.clock.now()

    await service.database.write(write)


async def test_many_triggers_on_one_minute_begin_a_run_each(service: JobService) -> None:
    """One transaction deals with a bounded number of them; one look with all."""
    path, _ = await triggered(service, trigger_type="cron", cron_expression="0 13 * * *")
    made = {"trigger_type": "cron", "cron_expression": "0 13 * * *"}
    for _ in range(FIRED_TOGETHER_MAX + 1):
        await service.call("POST", f"{path}/triggers", json=made)
    await service.clock.advance(3600)
    await TriggerKeeper(service.database, service.clock).look()

    count = await service.database.read(lambda session: session.scalar(select(func.count()).select_from(RunRecord)))
    made_count = FIRED_TOGETHER_MAX + 2
    assert count == made_count
    pages = [(await service.call("GET", f"{path}/triggers?page={one}&page_size=40")).json() for one in (1, 2, 3)]
    assert [(len(one["items"]), one["total"]) for one in pages] == [
        (40, made_count),
        (made_count - 40, made_count),
        (0, made_count),
    ]


async def test_only_who_may_change_the_pipeline_makes_triggers(service: JobService) -> None:
    """A viewer and another tenant do not; a dependency on a hidden pipeline looks like one on none."""
    path, trigger = await triggered(service, trigger_type="webhook")
    other = (await service.call("POST", PIPELINES, by="eve/others", json=DOCUMENT)).json()["id"]
    asked = {"trigger_type": "dependency", "depends_on_pipeline_id": other}

    assert (await service.call("POST", f"{path}/triggers", by="vic", json=asked)).status_code == 403
    assert (await service.call("POST", f"{path}/triggers", json=asked)).status_code == 422
    assert (await service.call("DELETE", f"{path}/triggers/{trigger['id']}", by="vic")).status_code == 403
    assert (await service.call("DELETE", f"{path}/triggers/{trigger['id']}", by="amy")).status_code == 204
