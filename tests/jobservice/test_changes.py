"""Jobs are changed by a merge patch, and stand on a time line with the GPUs of each type."""

import asyncio
import threading
from typing import Any

import pytest

from atoll.jobs.costs.spans import GpuAccount, GpuFact, TimeUse
from atoll.jobs.relaxing import TopologyOffer
from atoll.jobs.states import JobStep
from atoll.jobs.words import TopologyConstraint
from jobs import offer_routes
from jobs.accounts import observe_gpus
from jobs.changing import merge
from jobs.store import take_step
from tests.explain.situations import holder, situation
from tests.fakes.clock import until
from tests.jobservice.made import NOW, after
from tests.jobservice.service import JOBS, JobService

SCHEDULE = "/api/clusters/local/schedule"


@pytest.mark.parametrize(
    ("value", "patch", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"a": 1, "b": 2}, {"b": None}, {"a": 1}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": None, "d": 3}}, {"a": {"b": 1, "d": 3}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        (None, {"a": {"b": None}}, {"a": {}}),
    ],
)
def test_a_merge_patch_changes_what_it_names(value: Any, patch: Any, expected: Any) -> None:
    """As RFC 7396 has it: null removes, mappings merge, anything else replaces."""
    assert merge(value, patch) == expected


async def test_a_change_keeps_what_it_does_not_name_and_is_in_the_history(service: JobService) -> None:
    """Policy, intent and labels alone; the reconciler is woken."""
    policy = {"max_retries": 1, "priority_class": "low"}
    made = (await service.submit(policy=policy, intent={"budget_cap": "5"}, labels={"team": "vision"})).json()
    changes = {"policy": {"priority_class": None}, "intent": {"budget_cap": "9"}, "labels": {"more": "x"}}
    changed = (await service.call("PATCH", f"{JOBS}/{made['id']}", json=changes)).json()
    events = (await service.call("GET", f"{JOBS}/{made['id']}/events")).json()["items"]

    assert changed["job"]["policy"] == {"max_retries": 1}
    assert changed["job"]["intent"] == {"budget_cap": "9"}
    assert changed["job"]["labels"] == {"team": "vision", "more": "x"}
    assert changed["job"]["container"] == made["job"]["container"]
    assert (events[-1]["what"], events[-1]["actor"]) == ("change", "ann")
    assert "intent" in events[-1]["message"]
    assert service.woken == [made["id"], made["id"]]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": {"max_retries": -1}}, "policy.max_retries"),
        ({"policy": {"min_replicas": 2}}, "policy.min_replicas"),
        ({"labels": {"kubernetes.io/x": "y"}}, "labels"),
        ({"container": {"image": "other"}}, "container"),
    ],
)
async def test_a_change_is_checked_like_a_new_job(service: JobService, changes: dict[str, Any], field: str) -> None:
    """The field is named, and nothing changes."""
    made = (await service.submit()).json()
    refused = await service.call("PATCH", f"{JOBS}/{made['id']}", json=changes)

    assert refused.status_code == 422
    assert field in refused.json()["errors"][0]["field"]
    assert (await service.call("GET", f"{JOBS}/{made['id']}")).json() == made


async def test_a_job_that_has_ended_is_not_changed(service: JobService) -> None:
    """What it was stays on record."""
    made = (await service.submit()).json()
    await service.database.write(lambda session: take_step(session, made["id"], JobStep.FAIL, now=NOW))
    refused = await service.call("PATCH", f"{JOBS}/{made['id']}", json={"labels": {"a": "b"}})

    assert (refused.status_code, refused.json()["type"]) == (409, "urn:atoll:job-ended")


async def test_the_schedule_has_times_and_gpus(service: JobService) -> None:
    """Running jobs with their actual start and estimated end, waiting ones with their earliest start; others' jobs are
    not on it, their GPUs are."""
    hints = {"ext_ml_gpu_type": "nvidia-h100", "ext_ml_gpu_count": 2, "intent": {"expected_duration_hint": 600}}
    running = (await service.submit("runs", **hints)).json()
    for asked in (JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN):
        await service.database.write(
            lambda session, asked=asked: take_step(session, running["id"], asked, now=after(60))
        )
    waits = {"policy": {"scheduled_start": after(3600).isoformat()}}
    await service.submit("waits", **hints, **waits)
    await service.submit("theirs", by="zoe/others", **hints)
    held = GpuAccount(namespace="tenant-acme", pod_uid="p")
    facts = {
        "g0": GpuFact("g0", "n1", "nvidia-h100", TimeUse.USED, held),
        "g1": GpuFact("g1", "n1", "nvidia-h100", TimeUse.FREE),
    }
    await service.database.write(
        lambda session: observe_gpus(session, "local", facts, NOW, tenant_of=lambda _name: "", gap_seconds=60)
    )
    found = (await service.call("GET", SCHEDULE)).json()
    second = (await service.call("GET", f"{SCHEDULE}?page=2&page_size=1")).json()
    refused = await service.call("GET", f"{SCHEDULE}?start=2026-02-01T00:00:00Z&end=2026-01-01T00:00:00Z")
    times = {one["name"]: one for one in found["timeline"]}

    assert sorted(times) == ["runs", "waits"]
    assert (times["runs"]["actual_start"], times["runs"]["estimated_end"]) == (
        "2026-01-31T12:01:00Z",
        "2026-01-31T12:11:00Z",
    )
    assert (times["waits"]["estimated_start"], times["waits"]["estimated_end"]) == (
        "2026-01-31T13:00:00Z",
        "2026-01-31T13:10:00Z",
    )
    assert found["resources"] == {"nvidia-h100": {"total": 2.0, "used": 1.0, "queued": 4}}
    assert (found["total"], second["total"], len(second["timeline"])) == (2, 2, 1)
    assert refused.status_code == 422


async def test_a_waiting_job_is_offered_a_weaker_topology_and_takes_it(service: JobService) -> None:
    """EDGE-7: what it asks for is not free now, so the offer says what is, what that costs and which wait it saves; a
    change of the policy takes it. A job that runs, and a cluster that does not answer, have no offer."""
    held = [holder("a", "n1", 0), holder("b", "n1", 2)]  # one of each pair that NVLink joins
    service.links.snapshots["local"] = situation({"n1": {"profile": "azure-nc96ads-a100-v4"}}, held).snapshot
    made = (await service.submit(ext_ml_gpu_count=2, policy={"topology": "nvlink"})).json()
    path = f"{JOBS}/{made['id']}"
    offer = (await service.call("GET", f"{path}/topology-offer")).json()
    changed = await service.call("PATCH", path, json={"policy": {"topology": offer["suggested"]}})
    taken = (await service.call("GET", f"{path}/topology-offer")).json()
    service.links.snapshots["local"] = TimeoutError()
    unknown = await service.call("GET", f"{path}/topology-offer")
    for step in (JobStep.SUBMIT, JobStep.ADMIT, JobStep.RUN):
        await service.database.write(lambda session, step=step: take_step(session, made["id"], step, now=NOW))
    running = (await service.call("GET", f"{path}/topology-offer")).json()

    assert (offer["asked"], offer["suggested"], offer["saved_seconds"]) == ("nvlink", "same_node", None)
    assert "waits for GPUs that others hold" in offer["reason"]
    assert "PCIe" in offer["slower"]
    assert changed.status_code == 200
    assert (taken["suggested"], taken["reason"]) == (None, "the job fits with topology same_node")
    assert unknown.status_code == 503
    assert (running["suggested"], running["reason"]) == (None, "the job does not wait: it is running")


async def test_offers_are_computed_one_at_a_time_and_leave_the_database_its_threads(
    service: JobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is computed, others are sent away, also when its caller has gone, and the rest of the API answers."""
    begun, may_end = threading.Event(), threading.Event()

    def slow_offer(*_: Any, **__: Any) -> TopologyOffer:
        begun.set()
        may_end.wait(20)
        return TopologyOffer(TopologyConstraint.NVLINK, None, "computed")

    monkeypatch.setattr(offer_routes, "offer_to", slow_offer)
    made = (await service.submit(ext_ml_gpu_count=2, policy={"topology": "nvlink"})).json()
    path = f"{JOBS}/{made['id']}"
    try:
        first = asyncio.ensure_future(service.call("GET", f"{path}/topology-offer"))
        await until(begun.is_set)
        first.cancel()
        async with asyncio.timeout(10):
            others = await asyncio.gather(*(service.call("GET", f"{path}/topology-offer") for _ in range(40)))
            shown = await service.call("GET", path)
    finally:
        may_end.set()
    await until(lambda: all(one.done() for one in service.app.state.offers._left))
    last = await service.call("GET", f"{path}/topology-offer")

    assert {one.status_code for one in others} == {429}
    assert shown.status_code == 200
    assert last.json()["reason"] == "computed"
