"""Queues in the job service: who applies and sees them, the queue of a job, and the keeper of a faulty cluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from atoll.jobs.settings import RenderSettings
from atoll.kube.errors import api_error
from jobs.database import Database, opened
from jobs.queue_cluster import QueueCluster
from jobs.queue_keeper import QueueKeeper
from jobs.queue_store import queue_file_of
from jobs.records import QueueFileRecord
from jobs.store import get_job
from jobs.views import job_of
from tests.fakes.api_server import status
from tests.jobs.test_queue_file import EXAMPLE
from tests.jobservice.service import JOBS, SETTINGS, JobService
from tests.jobservice.world import SERVICE_ID, Faults, ServiceKilled, ServiceProcess, WorldApi

QUEUES = "/api/clusters/local/queues"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"


@pytest.fixture
async def service(tmp_path: Any) -> AsyncIterator[JobService]:
    """The API over SQLite and a cluster in memory."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as service:
        yield service
    database.close()


def keeper_of(service: JobService, faults: Faults | None = None, *, is_draining: bool = False) -> QueueKeeper:
    """Return the keeper of the service's cluster."""
    queues = QueueCluster(WorldApi(service.world, faults or Faults()))
    return QueueKeeper(
        service.database,
        queues,
        RenderSettings(),
        service.clock,
        cluster="local",
        service_id=SERVICE_ID,
        is_draining=lambda: is_draining,
    )


async def stored(database: Database) -> QueueFileRecord:
    """Return the stored file."""
    record = await database.read(lambda session: queue_file_of(session, "local"))
    assert record is not None
    return record


async def test_an_operator_applies_and_tenants_see_their_own(service: JobService) -> None:
    """Only an operator applies; a dry run stores nothing; members see the queues of their tenants, and no others."""
    body = EXAMPLE.read_text()
    refused = await service.call("PUT", QUEUES, by="amy", content=body)
    dry = await service.call("PUT", QUEUES, by="ops", content=body, params={"dry_run": True})
    nothing = await service.call("GET", QUEUES, by="ops")
    done = await service.call("PUT", QUEUES, by="ops", content=body)
    await keeper_of(service).look(await stored(service.database))
    mine, all_of_them = [(await service.call("GET", QUEUES, by=who)).json() for who in ("ann", "ops")]
    hidden = await service.call("GET", f"{QUEUES}/tenant-globex-queue")
    missing = await service.call("GET", f"{QUEUES}/nothing")

    assert (refused.status_code, dry.status_code, done.status_code) == (403, 200, 200)
    assert dry.json()["changes"] == done.json()["changes"]
    assert nothing.json()["total"] == 0
    assert [one["name"] for one in mine["items"]] == ["tenant-acme-queue", "acme-small", "acme-slices"]
    assert all_of_them["total"] == 5
    assert hidden.status_code == missing.status_code == 404
    assert hidden.json() == missing.json() | {"detail": hidden.json()["detail"]}


async def test_a_bad_file_is_refused_line_by_line(service: JobService) -> None:
    """Every mistake comes with its line, and the stored file stays."""
    body = EXAMPLE.read_text().replace("cohort: production", "cohort: prod")
    refused = await service.call("PUT", QUEUES, by="ops", content=body)
    told = refused.json()

    assert refused.status_code == 422
    assert (told["type"], told["title"]) == ("urn:atoll:invalid-queues", "The queues have mistakes")
    assert {one["field"] for one in told["errors"]} == {
        f"tenants[{tenant}].queues[{queue}].cohort" for tenant, queue in ((0, 0), (0, 1), (1, 0), (1, 1))
    }
    assert all(one["line"] for one in told["errors"])


async def test_a_job_gets_the_queue_of_its_priority(service: JobService) -> None:
    """Critical jobs go to the critical queue, others to the first; a queue that is not the tenant's is refused."""
    await service.call("PUT", QUEUES, by="ops", content=EXAMPLE.read_text())
    rows = [
        ("acme", {}, 201, "tenant-acme-queue"),
        ("acme", {"priority_class": "critical"}, 201, "tenant-acme-queue"),
        ("acme", {"queue_name": "acme-small"}, 201, "acme-small"),
        ("acme", {"queue_name": "tenant-globex-queue"}, 422, None),
        ("globex", {"priority_class": "critical"}, 201, "tenant-globex-critical"),
        ("globex", {"priority_class": "high"}, 201, "tenant-globex-queue"),
        ("initech", {}, 201, "tenant-initech-queue"),
    ]
    for number, (tenant, policy, status_code, queue) in enumerate(rows):
        answer = await service.submit(f"job-{number}", by="ops", tenant_id=tenant, policy=policy)
        assert answer.status_code == status_code, answer.text
        assert answer.json().get("queue_name") == queue


async def send_away(service: JobService, more: str = "") -> None:
    """Apply the example with a queue, acme-small, that sends its jobs to other clusters."""
    sets = "multikueue: [{name: far, clusters: {east: east}}]\n"
    away = f"- name: acme-small\n        multikueue: far{more}"
    file = sets + EXAMPLE.read_text().replace("- name: acme-small", away)
    assert (await service.call("PUT", QUEUES, by="ops", content=file)).status_code == 200


async def test_a_queue_of_other_clusters_takes_no_job_that_would_be_torn_apart(service: JobService) -> None:
    """MC-6: MultiKueue takes the Job along, but not its GpuClaim."""
    await send_away(service)
    asked = {"by": "ops", "tenant_id": "acme", "policy": {"queue_name": "acme-small"}}
    torn = await service.submit("torn", ext_ml_gpu_count=1, **asked)
    whole = await service.submit("whole", **asked)

    assert (torn.status_code, whole.status_code) == (422, 201)
    assert "sends jobs to other clusters, and MultiKueue leaves GpuClaim behind" in torn.text


async def test_a_job_that_its_queues_defaults_would_tear_apart_is_refused(service: JobService) -> None:
    """What the defaults fill in counts as what the job says itself."""
    await send_away(service, "\n        ml_defaults: {gpu_count: 1}")
    torn = await service.submit("torn", by="ops", tenant_id="acme", policy={"queue_name": "acme-small"})

    assert torn.status_code == 422
    assert "MultiKueue leaves GpuClaim behind" in torn.text


@pytest.mark.parametrize(
    ("submitted", "changes", "told"),
    [
        (
            {"job_type": "training", "policy": {"queue_name": "acme-small"}},
            {"intent": {"checkpoint_config": {"enabled": True, "checkpoint_path": "/checkpoints"}}},
            "MultiKueue leaves PersistentVolumeClaim behind",
        ),
        ({"ext_ml_gpu_count": 1}, {"policy": {"queue_name": "acme-small"}}, "MultiKueue leaves GpuClaim behind"),
        ({}, {"policy": {"queue_name": "tenant-globex-queue"}}, "is no queue of tenant acme"),
    ],
    ids=["checkpoints in the other clusters", "GPUs in the other clusters", "a queue of another tenant"],
)
async def test_a_change_is_held_to_the_queue_as_a_submission_is(
    service: JobService, submitted: Any, changes: Any, told: str
) -> None:
    """A job may leave its queue for another of its tenant that can take it, and for no other."""
    await send_away(service)
    made = (await service.submit("tune", by="ops", tenant_id="acme", **submitted)).json()
    path = f"{JOBS}/{made['id']}"
    refused = await service.call("PATCH", path, by="ops", json=changes)
    moved = await service.call("PATCH", path, by="ops", json={"policy": {"queue_name": "acme-slices"}})
    record = await service.database.read(lambda session: get_job(session, made["id"]))

    assert (refused.status_code, moved.status_code) == (422, 200), refused.text + moved.text
    assert told in refused.text
    assert moved.json()["queue_name"] == job_of(record).policy.queue_name == "acme-slices"


async def test_a_repeated_submission_is_the_same_job_after_the_file_changed(service: JobService) -> None:
    """The queue is the service's choice and no part of the request: the key still finds the job."""
    headers = {"Idempotency-Key": str(uuid4())}
    job = {"name": "tune", "job_type": "batch", "container": {"image": "busybox:1"}}
    first = await service.call("POST", "/api/clusters/local/jobs", json=job, headers=headers)
    await service.call("PUT", QUEUES, by="ops", content=EXAMPLE.read_text())
    second = await service.call("POST", "/api/clusters/local/jobs", json=job, headers=headers)

    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]


async def test_one_refused_object_does_not_stop_the_others(service: JobService) -> None:
    """What the API server refuses is recorded with its message; everything else is written, and at last this too."""
    refuses = True

    def answer(method: str, path: str, body: Any) -> Any:
        if refuses and method == "POST" and "gpu-t4" in json.dumps(body) and path.endswith("resourceflavors"):
            return status(422, "Invalid", "no such flavor here")
        return None

    inner = service.world.answer

    def answered(method: str, path: str, body: Any = None) -> bytes:
        found = answer(method, path, body)
        if found is not None:
            raise api_error(found.body, path=path, status=found.status)
        return inner(method, path, body)

    service.world.answer = answered  # type: ignore[method-assign]
    await service.call("PUT", QUEUES, by="ops", content=EXAMPLE.read_text())
    await keeper_of(service).look(await stored(service.database))
    told = (await stored(service.database)).problems
    shown = (await service.call("GET", QUEUES, by="ops")).json()
    refuses = False
    await keeper_of(service).look(await stored(service.database))

    assert told == ["cannot create ResourceFlavor gpu-t4: no such flavor here"]
    assert (shown["problems"], shown["message"]) == (told, "1 objects do not agree with the file")
    assert f"{KUEUE}/clusterqueues/tenant-globex-queue" in service.world.server.objects
    assert f"{KUEUE}/resourceflavors/gpu-t4" in service.world.server.objects
    assert (await stored(service.database)).problems == []


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after it"])
async def test_a_keeper_killed_at_any_write_ends_with_the_same_cluster(service: JobService, after: bool) -> None:
    """Killed at each write in turn, the next keeper finishes the work, and finds nothing more to do."""
    await service.call("PUT", QUEUES, by="ops", content=EXAMPLE.read_text())
    record = await stored(service.database)
    for number in range(40):
        faults = Faults(kill_at=number, kill_after=after)
        try:
            await keeper_of(service, faults).look(record)
        except ServiceKilled:
            continue
        break
    faults = Faults()
    await keeper_of(service, faults).look(await stored(service.database))

    assert number > 0
    assert faults.writes == 0


async def test_a_drained_cluster_admits_nothing_and_is_left_without_queues(service: JobService) -> None:
    """EDGE-1: while it is drained its queues are held; a graceful removal takes our queues along, and no namespace."""
    service.links.worlds["east"] = service.world
    await service.call("PUT", "/api/clusters/east", by="ops", json={"kubeconfig": "file:east"})
    await service.call("PUT", QUEUES.replace("local", "east"), by="ops", content=EXAMPLE.read_text())
    record = await service.database.read(lambda session: queue_file_of(session, "east"))
    assert record is not None
    await keeper_of(service, is_draining=True).look(record)
    objects = service.world.server.objects
    held = {one["spec"]["stopPolicy"] for one in objects.values() if one["kind"] == "ClusterQueue"}
    await service.call("POST", "/api/clusters/east/drain", by="ops")
    removed = await service.call("DELETE", "/api/clusters/east", by="ops")

    assert held == {"Hold"}
    assert removed.status_code == 200, removed.text
    assert {one["kind"] for one in objects.values()} == {"Namespace", "PriorityClass"}


RULED = """\
flavors: [{name: any}]
tenants:
  - name: acme
    queues:
      - flavors: [{flavor: any, quota: {gpu: 64}}]
        ml_defaults: {ext_ml_timeout_seconds: 600, ext_ml_gpu_type: nvidia-a100}
        ml_limits: {max_gpu_count: 4, max_timeout_seconds: 3600, allowed_gpu_types: [a100]}
"""


async def test_a_queue_fills_gaps_and_refuses_what_exceeds_it(service: JobService) -> None:
    """Its defaults are in the job that is recorded; a job beyond a limit is refused with each field."""
    await service.call("PUT", QUEUES, by="ops", content=RULED)
    filled = await service.submit("filled", ext_ml_gpu_count=2)
    refused = await service.submit("refused", ext_ml_gpu_count=8, policy={"max_runtime": 7200})
    wrong = await service.submit("wrong", ext_ml_accelerator="cpu")

    assert filled.status_code == 201, filled.text
    assert filled.json()["job"]["attributes"]["ext_ml_timeout_seconds"] == 600
    assert filled.json()["estimate"]["gpu_type"] == "nvidia-a100"
    assert (refused.status_code, wrong.status_code) == (422, 422)
    assert {one["field"] for one in refused.json()["errors"]} == {"ext_ml_gpu_count", "ext_ml_timeout_seconds"}
    assert "it is a default of queue tenant-acme-queue" in wrong.text


async def test_a_repeated_submission_is_the_same_job_after_the_defaults_changed(service: JobService) -> None:
    """They are no part of the request."""
    headers, job = {"Idempotency-Key": str(uuid4())}, {"name": "tune", "job_type": "batch", "ext_ml_gpu_count": 1}
    job |= {"container": {"image": "busybox:1"}}
    answers = []
    for seconds in (600, 700):
        await service.call("PUT", QUEUES, by="ops", content=RULED.replace("600", str(seconds)))
        answers.append(await service.call("POST", "/api/clusters/local/jobs", json=job, headers=headers))

    assert [one.status_code for one in answers] == [201, 200]
    assert answers[0].json()["id"] == answers[1].json()["id"]


async def test_a_queue_takes_jobs_with_gpus_at_a_limited_rate(tmp_path: Any) -> None:
    """Whoever is refused learns when to come back; jobs without GPUs are not counted."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    settings = SETTINGS.model_copy(update={"gpu_jobs_per_second": 0.5, "gpu_jobs_burst": 2})
    async with JobService.of(database, settings=settings) as service:
        await service.call("PUT", QUEUES, by="ops", content=EXAMPLE.read_text())
        answers = [await service.submit(f"job-{number}", ext_ml_gpu_count=1) for number in range(3)]
        without = await service.submit("plain")
        await service.clock.advance(2)
        later = await service.submit("later", ext_ml_gpu_count=1)

        assert [one.status_code for one in answers] == [201, 201, 429]
        assert answers[2].headers["Retry-After"] == "1"
        assert "queue tenant-acme-queue of cluster local" in answers[2].json()["detail"]
        assert (without.status_code, later.status_code) == (201, 201)
    database.close()


TWO_QUEUES = """\
flavors: [{name: any}]
tenants:
  - name: acme
    queues:
      - flavors: [{flavor: any, quota: {gpu: 64}}]
      - name: acme-small
        flavors: [{flavor: any, quota: {gpu: 8}}]
        ml_defaults: {ext_ml_timeout_seconds: 600, ext_ml_gpu_type: nvidia-a100}
        ml_limits: {max_gpu_count: 2, max_timeout_seconds: 3600}
      - name: acme-critical
        critical: true
        flavors: [{flavor: any, quota: {gpu: 8}}]
        ml_limits: {max_gpu_count: 4}
"""


async def test_a_job_that_moves_to_another_queue_is_held_to_its_limits_and_gets_its_defaults(
    service: JobService,
) -> None:
    """As at submission: each field beyond a limit is refused and nothing changes, gaps are filled, and the estimate is
    that of the job as it is now."""
    await service.call("PUT", QUEUES, by="ops", content=TWO_QUEUES)
    to_small = {"policy": {"queue_name": "acme-small"}}
    large = (await service.submit("large", ext_ml_gpu_count=4, policy={"max_runtime": 7200})).json()
    small = (await service.submit("small", ext_ml_gpu_count=2)).json()
    refused = await service.call("PATCH", f"{JOBS}/{large['id']}", json=to_small)
    unchanged = (await service.call("GET", f"{JOBS}/{large['id']}")).json()
    moved = (await service.call("PATCH", f"{JOBS}/{small['id']}", json=to_small)).json()
    there = (await service.submit("there", policy={"queue_name": "acme-small", "max_runtime": 60})).json()
    longer = await service.call("PATCH", f"{JOBS}/{there['id']}", json={"policy": {"max_runtime": 7200}})
    record = await service.database.read(lambda session: get_job(session, small["id"]))

    assert refused.status_code == 422
    assert {one["field"] for one in refused.json()["errors"]} == {"ext_ml_gpu_count", "ext_ml_timeout_seconds"}
    assert (unchanged["job"], unchanged["queue_name"]) == (large["job"], large["queue_name"])
    assert (small["estimate"]["gpu_type"], moved["estimate"]["gpu_type"]) == ("", "nvidia-a100")
    assert moved["queue_name"] == "acme-small"
    assert job_of(record).attributes.timeout_seconds == 600
    assert longer.status_code == 422


async def test_a_job_that_becomes_critical_moves_to_the_critical_queue(service: JobService) -> None:
    """As at submission, if it names no queue; and back. What does not fit into that queue is refused. A queue that the
    job names and that is gone meanwhile prevents no change."""
    await service.call("PUT", QUEUES, by="ops", content=TWO_QUEUES)
    small, large = [(await service.submit(f"job-{count}", ext_ml_gpu_count=count)).json() for count in (2, 8)]
    named = (await service.submit("named", policy={"queue_name": "acme-small"})).json()

    async def patch(job: Any, **policy: Any) -> Any:
        return await service.call("PATCH", f"{JOBS}/{job['id']}", by="ops", json={"policy": policy})

    critical = await patch(small, priority_class="critical")
    again = await patch(small, priority_class="low", max_retries=2)
    refused = await patch(large, priority_class="critical")
    freed = await patch(named, queue_name=None)
    await patch(named, queue_name="acme-small")
    await service.call("PUT", QUEUES, by="ops", content=TWO_QUEUES.replace("acme-small", "acme-other"))
    gone = await patch(named, max_retries=2)

    assert critical.json()["queue_name"] == "acme-critical"
    assert again.json()["queue_name"] == "tenant-acme-queue"
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "ext_ml_gpu_count")
    assert freed.json()["queue_name"] == "tenant-acme-queue"
    assert (gone.status_code, gone.json()["queue_name"]) == (200, "acme-small")


async def test_a_job_that_moves_counts_for_the_rate_of_its_new_queue(tmp_path: Any) -> None:
    """A change is no way around it."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    settings = SETTINGS.model_copy(update={"gpu_jobs_per_second": 0.5, "gpu_jobs_burst": 1})
    async with JobService.of(database, settings=settings) as service:
        await service.call("PUT", QUEUES, by="ops", content=TWO_QUEUES)
        first = (await service.submit("first", ext_ml_gpu_count=1)).json()
        await service.submit("second", ext_ml_gpu_count=1, policy={"queue_name": "acme-small"})
        change = {"policy": {"queue_name": "acme-small"}}
        refused = await service.call("PATCH", f"{JOBS}/{first['id']}", json=change)
        await service.clock.advance(2)
        later = await service.call("PATCH", f"{JOBS}/{first['id']}", json=change)

        assert (refused.status_code, later.status_code) == (429, 200)
    database.close()


async def test_a_job_waits_for_the_budget_of_its_queue(service: JobService) -> None:
    """EDGE-13: it is recorded and says what it waits for; it starts when another one has ended. Of jobs that look at
    once, no more enter than the budget has room for."""
    service.world.plays = False
    await service.call("PUT", QUEUES, by="ops", content=RULED.replace("max_gpu_count: 4", "max_total_gpus: 5"))
    ids = [(await service.submit(f"job-{number}", ext_ml_gpu_count=2)).json()["id"] for number in range(3)]
    process = ServiceProcess(service.world, service.database._engine)
    await asyncio.gather(*(process.look_at(job_id) for job_id in ids))
    states = [(await service.call("GET", f"/api/clusters/local/jobs/{job_id}")).json() for job_id in ids]
    waiting = next(one for one in states if one["status"] == "pending")

    assert sorted(one["status"] for one in states) == ["admitted", "admitted", "pending"]
    assert "4 of 5 GPUs of queue tenant-acme-queue are in use and the job asks for 2" in waiting["message"]
    service.world.settle()
    for job_id in ids:
        await process.look_at(job_id)
    await process.look_at(waiting["id"])
    assert (await service.call("GET", f"/api/clusters/local/jobs/{waiting['id']}")).json()["status"] == "admitted"
