"""GPU time, budgets and final costs in both databases, through restarts, and the routes that show them."""

import csv
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from atoll.jobs.costs.spans import GpuAccount, GpuFact, TimeUse
from atoll.jobs.costs.usage import UsageKey, sum_usage
from atoll.jobs.states import JobState, JobStep
from jobs.accounts import (
    UsageFilter,
    budgeted_ids,
    observe_gpus,
    settle_costs,
    spans_between,
    spend,
    usage_of_job,
)
from jobs.database import Database, opened
from jobs.records import JobRecord
from jobs.store import ask_to_cancel, get_job, list_events, take_step
from tests.jobservice.made import NOW, after
from tests.jobservice.service import JOBS, JobService

USAGE = "/api/clusters/local/usage"
PRICE_MICROS = 3_600_000
"""3.60 USD an hour: a second costs a thousand micros."""


class Accounts:
    """One cluster's GPUs and the service that records them."""

    def __init__(self, service: JobService) -> None:
        self.service = service
        self.database = service.database

    async def look(self, second: float, gpus: dict[str, GpuFact], *, gap_seconds: float = 60) -> None:
        """Look at the GPUs."""
        await self.database.write(
            lambda session: observe_gpus(
                session,
                "local",
                gpus,
                after(second),
                tenant_of=lambda name: name.removeprefix("tenant-"),
                gap_seconds=gap_seconds,
            )
        )

    async def sums(self, *by: UsageKey) -> dict[tuple[str, ...], dict[str, float]]:
        """Return GPU-seconds by group and state, without states of none."""
        spans = await self.database.read(
            lambda session: spans_between(session, UsageFilter("local"), after(0), after(10_000))
        )
        return {
            group: {use.value: float(one.gpu_seconds(use)) for use in TimeUse if one.gpu_seconds(use)}
            for group, one in sum_usage(spans, after(0), after(10_000), by).items()
        }

    async def record(self, job_id: str) -> JobRecord:
        """Return a record."""
        return await self.database.read(lambda session: get_job(session, job_id))

    async def run(self, job_id: str, *steps: JobStep, second: float = 0) -> None:
        """Let a job live."""
        for asked in steps:
            await self.database.write(lambda session, asked=asked: take_step(session, job_id, asked, now=after(second)))


@pytest.fixture
async def accounts(database: Database) -> AsyncIterator[Accounts]:
    """A service without jobs."""
    async with JobService.of(database) as service:
        yield Accounts(service)


def free(gpu: str) -> GpuFact:
    """Return a free GPU."""
    return GpuFact(gpu, "n1", "nvidia-h100", TimeUse.FREE, price_micros=PRICE_MICROS)


def held(
    gpu: str, *, job_id: str = "", namespace: str = "tenant-acme", pod: str = "p", since: float = 0, **more: Any
) -> GpuFact:
    """Return a GPU that a pod uses."""
    account = GpuAccount(namespace=namespace, job_id=job_id, pod_uid=pod)
    fact = GpuFact(gpu, "n1", "nvidia-h100", TimeUse.USED, account, price_micros=PRICE_MICROS, held_since=after(since))
    return replace(fact, **more)


async def submitted(accounts: Accounts, name: str = "tune", **fields: Any) -> str:
    """Submit a job that runs, and return its id."""
    made = (await accounts.service.submit(name, ext_ml_gpu_type="nvidia-h100", ext_ml_gpu_count=1, **fields)).json()
    await accounts.run(made["id"], JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN)
    return str(made["id"])


async def test_gpu_time_survives_restarts_to_the_second(database_url: str) -> None:
    """Three restarts, one of them long: every GPU's time is recorded once, and only proven holds are charged."""
    seconds = (0, 10, 25, 30, 530, 540)
    for number, second in enumerate(seconds):
        database = opened(database_url)
        async with JobService.of(database) as service:
            gpus = {"g0": held("g0", pod="steady"), "g1": free("g1")}
            if second >= 25:
                gpus["g1"] = held("g1", pod="late", since=17) if second < 530 else free("g1")
            await Accounts(service).look(second, gpus)
            found = await Accounts(service).sums(UsageKey.MODEL)
        database.close()
        if number:
            assert sum(found["nvidia-h100",].values()) == 2 * second
    assert found == {("nvidia-h100",): {"used": 540 + 13, "free": 17 + 10, "unseen": 500}}


async def test_a_hold_is_charged_to_the_job_and_else_to_the_namespace(accounts: Accounts) -> None:
    """A job's pod by its label, in the job's own namespace; a label from elsewhere makes nobody else pay."""
    job_id = await submitted(accounts, project_id="vision")
    gpus = {
        "g0": held("g0", job_id=job_id),
        "g1": held("g1", job_id=job_id, namespace="tenant-other", pod="forged"),
        "g2": held("g2", namespace="tenant-acme", pod="bare"),
    }
    await accounts.look(0, gpus)
    await accounts.look(10, gpus)

    assert await accounts.sums(UsageKey.TENANT, UsageKey.PROJECT, UsageKey.USER, UsageKey.JOB) == {
        ("acme", "vision", "ann", job_id): {"used": 10},
        ("other", "", "", ""): {"used": 10},
        ("acme", "", "", ""): {"used": 10},
    }
    assert (await accounts.database.read(lambda session: usage_of_job(session, "local", job_id))).usd == 0.01


async def test_a_second_look_in_the_same_second_and_an_earlier_one_change_nothing(accounts: Accounts) -> None:
    """Also for a GPU that comes and goes within the second; the time goes on with the next look."""
    await accounts.look(0, {"g0": free("g0")})
    await accounts.look(0.7, {"g0": held("g0"), "g1": free("g1")})
    await accounts.look(-5, {})
    await accounts.look(4, {"g0": held("g0", since=3)})

    assert await accounts.sums(UsageKey.MODEL) == {("nvidia-h100",): {"free": 3, "used": 1}}


@pytest.mark.parametrize(
    ("action", "message", "told"),
    [
        ("warn", "", "the job goes on"),
        ("pause", "reached the budget", "the job is paused"),
        ("cancel", "cancelling", "the job is cancelled"),
    ],
)
async def test_a_spent_budget_acts(accounts: Accounts, action: str, message: str, told: str) -> None:
    """COST-2, EDGE-12: ten seconds cost a cent; the budget of a cent acts once, and its history says so."""
    job_id = await submitted(accounts, intent={"budget_cap": "0.01", "budget_action": action})
    await accounts.look(0, {"g0": held("g0", job_id=job_id)})
    await accounts.look(9, {"g0": held("g0", job_id=job_id)})
    assert await accounts.database.read(lambda session: budgeted_ids(session, "local")) == [job_id]
    early = await accounts.database.write(lambda session: spend(session, job_id, after(9)))
    await accounts.look(10, {"g0": held("g0", job_id=job_id)})
    first = await accounts.database.write(lambda session: spend(session, job_id, after(10)))
    second = await accounts.database.write(lambda session: spend(session, job_id, after(11)))
    record = await accounts.record(job_id)
    events, _ = await accounts.database.read(lambda session: list_events(session, job_id, page=1, page_size=50))

    assert (early, second) == (None, None)
    assert first is not None
    assert [one.message for one in events if one.what == "budget"] == [first.message]
    assert told in first.message
    assert message in record.message
    assert (record.pause_requested_at is not None, record.cancel_requested_at is not None) == (
        action == "pause",
        action == "cancel",
    )


async def test_a_job_is_paused_and_resumed_within_its_budget(accounts: Accounts) -> None:
    """Whoever resumes a job whose budget is spent is told to raise it; other pauses end when somebody asks."""
    job_id = await submitted(accounts, intent={"budget_cap": "0.01", "budget_action": "pause"})
    call = accounts.service.call
    early = await call("POST", f"{JOBS}/{job_id}/resume")
    paused = (await call("POST", f"{JOBS}/{job_id}/pause")).json()
    leaving = await call("POST", f"{JOBS}/{job_id}/resume")
    await accounts.run(job_id, JobStep.PAUSE)
    resumed = (await call("POST", f"{JOBS}/{job_id}/resume")).json()
    await accounts.look(0, {"g0": held("g0", job_id=job_id)})
    await accounts.look(20, {"g0": held("g0", job_id=job_id)})
    await call("POST", f"{JOBS}/{job_id}/pause")
    spent = await call("POST", f"{JOBS}/{job_id}/resume")

    assert early.json()["type"] == "urn:atoll:not-paused"
    assert (paused["message"], paused["pause_requested_by"]) == ("paused by ann", "ann")
    assert "still in the cluster" in leaving.json()["detail"]
    assert (resumed["status"], resumed["attempt"], resumed["pause_requested_at"]) == ("pending", 2, None)
    assert (spent.status_code, spent.json()["type"]) == (409, "urn:atoll:budget-spent")


async def test_an_ended_job_has_a_final_cost_and_teaches_the_next_estimate(accounts: Accounts) -> None:
    """The cost is final when its GPUs are released; after three jobs of a kind, the next one is expected to run as
    long as they did."""
    for number in range(3):
        hint: dict[str, Any] = {"intent": {"expected_duration_hint": 100}}
        job_id, start = await submitted(accounts, f"tune{number}", **hint), 1000 * number
        await accounts.look(start, {"g0": held("g0", job_id=job_id, since=start, pod=job_id)}, gap_seconds=5000)
        await accounts.run(job_id, JobStep.SUCCEED, second=50)
        settled = await accounts.database.write(lambda session: settle_costs(session, "local", NOW))
        await accounts.look(start + 50, {"g0": free("g0")})
        assert settled == 0
        assert await accounts.database.write(lambda session: settle_costs(session, "local", NOW)) == 1
    shown = (await accounts.service.call("GET", f"{JOBS}/{job_id}")).json()
    cost = (await accounts.service.call("GET", f"{JOBS}/{job_id}/cost")).json()
    following = (await accounts.service.submit("next", ext_ml_gpu_type="nvidia-h100", ext_ml_gpu_count=1)).json()

    assert (shown["cost_usd"], shown["estimate"]["seconds"]) == (0.05, 100)
    assert (cost["is_final"], cost["cost_usd"], cost["gpu_hours"]["used"]) == (True, 0.05, round(50 / 3600, 6))
    assert following["estimate"]["seconds"] == 50
    assert any("median of the last jobs" in reason for reason in following["estimate"]["reasons"])


async def test_a_retried_job_has_no_final_cost_until_it_ends_again(accounts: Accounts) -> None:
    """A failed job that is tried again goes on costing."""
    job_id = await submitted(accounts)
    await accounts.look(0, {"g0": held("g0", job_id=job_id)})
    await accounts.look(10, {"g0": free("g0")})
    await accounts.run(job_id, JobStep.FAIL)
    await accounts.database.write(lambda session: settle_costs(session, "local", NOW))
    final = (await accounts.record(job_id)).actual_micros
    await accounts.run(job_id, JobStep.RETRY)

    assert final == 10_000
    assert (await accounts.record(job_id)).actual_micros is None


async def test_usage_is_summed_as_asked_for_those_who_may_see_it(accounts: Accounts) -> None:
    """COST-7: an operator sees the whole cluster, others the held time of their tenant or project; CSV says the
    same."""
    job_id = await submitted(accounts, project_id="vision")
    gpus = {"g0": held("g0", job_id=job_id), "g1": held("g1", namespace="tenant-other", pod="q"), "g2": free("g2")}
    await accounts.look(0, gpus)
    await accounts.look(36, gpus)
    await accounts.service.clock.advance(3600)

    async def usage(by: str, query: str = "by=tenant") -> dict[str, Any]:
        found: dict[str, Any] = (await accounts.service.call("GET", f"{USAGE}?{query}", by=by)).json()
        return found

    operator, own, project = await usage("ops"), await usage("ann"), await usage("bob")
    text = (await accounts.service.call("GET", f"{USAGE}.csv?by=tenant&by=user", by="ops")).text
    rows = list(csv.DictReader(io.StringIO(text)))
    nobody = await usage("stranger")

    assert [(one["group"]["tenant"], one["gpu_hours"]["total"]) for one in operator["rows"]] == [
        ("", 0.01),
        ("acme", 0.01),
        ("other", 0.01),
    ]
    assert (operator["sum"]["gpu_hours"]["free"], operator["sum"]["gpu_hours"]["total"]) == (0.01, 0.03)
    assert [one["group"]["tenant"] for one in own["rows"]] == ["acme"]
    assert (own["sum"]["gpu_hours"]["free"], own["sum"]["cost_usd"]) == (None, 0.036)
    assert project["rows"] == own["rows"]
    assert nobody["rows"] == []
    assert [(row["tenant"], row["user"], row["used_gpu_hours"]) for row in rows] == [
        ("", "", "0.000000"),
        ("acme", "ann", "0.010000"),
        ("other", "", "0.010000"),
    ]
    assert Decimal(rows[1]["cost_usd"]) == Decimal("0.036")


@pytest.mark.parametrize(
    "query",
    [
        "start=2026-01-31T12:00:00Z&end=2026-01-31T11:00:00Z",
        "start=2020-01-01T00:00:00Z",
        "by=colour",
        "start=x",
        "start=0.5",
    ],
)
async def test_times_and_groups_that_make_no_sense_are_refused(accounts: Accounts, query: str) -> None:
    """An end before the start, more than a year, unknown groups, no time at all."""
    answer = await accounts.service.call("GET", f"{USAGE}?{query}", by="ops")

    assert (answer.status_code, answer.json()["type"]) == (422, "urn:atoll:invalid-request")


async def test_a_cancelled_job_that_never_ran_costs_nothing(accounts: Accounts) -> None:
    """Its cost is final at once."""
    made = (await accounts.service.submit()).json()
    await accounts.database.write(lambda session: ask_to_cancel(session, made["id"], now=NOW, actor="ann"))
    await accounts.run(made["id"], JobStep.CANCEL)
    await accounts.database.write(lambda session: settle_costs(session, "local", NOW))
    record = await accounts.record(made["id"])

    assert (record.state, record.actual_micros) == (JobState.CANCELLED, 0)
