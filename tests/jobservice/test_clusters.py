"""Several clusters: who registers and sees them, the choice of one, draining, forced removal, and one that fails."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from atoll.cluster.objects import Metadata, Node, NodeStatus
from atoll.jobs.choosing import ClusterOffer, ClusterWish, ScoreSheet, choose_cluster
from atoll.jobs.costs.estimates import CostEstimate, JobKind
from atoll.jobs.fitting import capacity_of
from atoll.jobs.model import Job
from atoll.jobs.queue_file import as_stored
from atoll.jobs.states import JobState
from atoll.kube.errors import Unanswered
from atoll.ml.tables import TPU_TOPOLOGY_LABEL, TPU_TYPE_LABEL
from jobs.chooser import NO_SNAPSHOT, quota_of
from jobs.cluster_store import (
    MOVING,
    ClusterTerms,
    activate_cluster,
    drain_cluster,
    note_health,
    register_cluster,
    remove_cluster,
)
from jobs.database import Database, engine_of, opened
from jobs.errors import ClusterBusy
from jobs.queue_store import store_queue_file
from jobs.records import JobRecord
from jobs.store import NewJob, create_job, get_job, list_events
from tests.explain.situations import holder, situation
from tests.jobs.test_queue_file import EXAMPLE, parsed
from tests.jobservice.made import NOW, new_job
from tests.jobservice.service import JobService
from tests.jobservice.world import Faults, JobWorld, ServiceKilled, ServiceProcess

CLUSTERS = "/api/clusters"
AUTO = "/api/clusters/auto/jobs"
EMPTY = situation({"n1": {}}).snapshot
FULL = situation({"n1": {}}, [holder("a", "n1", *range(8))]).snapshot
GPUS = {"ext_ml_gpu_count": 8}
KIND = capacity_of(EMPTY)[0].gpu_type


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobService]:
    """The API over SQLite, with the clusters local and east."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as service:
        service.links.worlds["east"] = JobWorld()
        await register(service, "east", kubeconfig="file:east")
        yield service
    database.close()


async def register(service: JobService, name: str, **terms: Any) -> None:
    """Register a cluster."""
    answer = await service.call("PUT", f"{CLUSTERS}/{name}", by="ops", json=terms)
    assert answer.status_code == 200, answer.text


async def chosen(service: JobService, name: str = "tune", **fields: Any) -> dict[str, Any]:
    """Submit a job of eight GPUs to any cluster and return it."""
    answer = await service.call("POST", AUTO, json=job(name, **fields))
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def job(name: str, **fields: Any) -> dict[str, Any]:
    """Return a training of eight GPUs."""
    return {"name": name, "job_type": "training", "container": {"image": "busybox:1"}} | GPUS | fields


# Registration


async def test_an_operator_registers_and_tenants_see_what_serves_them(service: JobService) -> None:
    """EDGE-1, MC-4: terms and state are shown; how a cluster is reached is for operators; others' are hidden."""
    await register(service, "theirs", kubeconfig="secret:atoll-system/theirs/kubeconfig", tenants=["other"])
    await register(
        service, "east", kubeconfig="file:east", region="eu-west-1", prices={"nvidia-h100": 2.5}, latency_ms=9
    )
    refused = await service.call("PUT", f"{CLUSTERS}/mine", by="amy", json={"kubeconfig": "file:mine"})
    seen = {who: (await service.call("GET", CLUSTERS, by=who)).json() for who in ("ops", "ann")}
    hidden = await service.call("GET", f"{CLUSTERS}/theirs")
    shown = (await service.call("GET", f"{CLUSTERS}/east", by="ops")).json()

    told = (await service.call("GET", f"{CLUSTERS}/local/audit", by="ops")).json()["items"]
    decided = [(one["user"], one["answer"]) for one in told if one["action"] == "cluster:register"]

    assert refused.status_code == 403
    assert ("amy", "refused") in decided
    assert decided.count(("ops", "allowed")) == 3
    assert [one["name"] for one in seen["ops"]["items"]] == ["east", "local", "theirs"]
    assert [(one["name"], one["kubeconfig"]) for one in seen["ann"]["items"]] == [("east", None), ("local", None)]
    assert hidden.status_code == 404
    assert (shown["state"], shown["region"], shown["prices"]) == ("active", "eu-west-1", {"nvidia-h100": 2.5})
    assert shown["kubeconfig"] == "file:east"


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("auto", {"kubeconfig": "file:x"}),
        ("Bad", {"kubeconfig": "file:x"}),
        ("x", {"kubeconfig": ""}),
        ("x", {"kubeconfig": "file:../etc/passwd"}),
        ("x", {"kubeconfig": "file:/etc/passwd"}),
        ("x", {"kubeconfig": "apiVersion: v1\nclusters: []"}),
        ("local", {"kubeconfig": "file:x"}),
        ("x", {"kubeconfig": "file:x", "prices": {"gpu": -1}}),
        ("x", {"kubeconfig": "file:x", "latency_ms": "NaN"}),
        ("x", {"kubeconfig": "file:x", "token": "secret"}),
    ],
)
async def test_bad_terms_are_refused(service: JobService, name: str, terms: dict[str, Any]) -> None:
    """A kubeconfig is a reference, never a path or a content; the own cluster has none; numbers have bounds."""
    answer = await service.call("PUT", f"{CLUSTERS}/{name}", by="ops", json=terms)

    assert answer.status_code == 422, answer.text


# The choice


async def test_a_job_goes_where_it_fits_and_shows_why(service: JobService) -> None:
    """MC-2, MC-5: cheap and full loses to dear and free; the job carries the score sheet; its objects go there."""
    await register(service, "local", prices={KIND: 0.8})
    await register(service, "east", kubeconfig="file:east", prices={KIND: 2.5})
    service.links.snapshots = {"local": EMPTY, "east": EMPTY}
    first = await chosen(service, "first")
    service.links.snapshots["local"] = FULL
    second = await chosen(service, "second")
    rows = {row["cluster"]: row for row in second["choice"]["rows"]}

    assert (first["cluster_id"], second["cluster_id"]) == ("local", "east")
    assert second["choice"]["chosen"] == "east"
    assert (rows["east"]["fits"], rows["local"]["fits"]) == (True, False)
    assert rows["local"]["reason"]
    assert service.woken == [first["id"], second["id"]]
    listed = (await service.call("GET", AUTO)).json()
    assert {one["name"] for one in listed["items"]} == {"first", "second"}
    assert (await service.call("GET", f"{CLUSTERS}/east/jobs")).json()["total"] == 1
    assert (await service.call("GET", f"{CLUSTERS}/local/jobs/{second['id']}")).status_code == 404
    assert (await service.call("GET", f"{AUTO}/{second['id']}")).status_code == 200


async def test_a_cluster_that_does_not_answer_is_no_candidate(service: JobService) -> None:
    """One failing cluster stops no job: the other takes it, and the sheet says why not the first."""
    gone = Unanswered("connection refused", path="/api/v1/nodes", sent=False)
    service.links.snapshots = {"local": gone, "east": EMPTY}
    found = await chosen(service)
    rows = {row["cluster"]: row for row in found["choice"]["rows"]}

    assert found["cluster_id"] == "east"
    assert rows["local"]["excluded"].startswith("does not answer: connection refused")


async def test_without_any_cluster_the_job_is_refused_by_name(service: JobService) -> None:
    """MC-1: no candidate is an error that names the job and says why for each cluster; nothing is recorded."""
    service.links.snapshots = {"local": EMPTY}
    answer = await service.call("POST", AUTO, json=job("tune", labels={"compliance": "eu-only"}))

    assert answer.status_code == 409
    assert answer.json()["detail"].startswith("no cluster available for job tune: ")
    assert "local: region unknown is not in the EU" in answer.json()["detail"]
    assert (await service.call("GET", AUTO)).json()["total"] == 0


async def test_a_repeated_submission_is_the_same_job_wherever_it_would_go_now(service: JobService) -> None:
    """The choice is no part of the request: the key finds the job though another cluster would be chosen today."""
    headers = {"Idempotency-Key": str(uuid4())}
    service.links.snapshots = {"local": EMPTY, "east": FULL}
    first = await service.call("POST", AUTO, json=job("tune"), headers=headers)
    service.links.snapshots = {"local": FULL, "east": EMPTY}
    second = await service.call("POST", AUTO, json=job("tune"), headers=headers)

    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json()["id"] == second.json()["id"]


async def test_a_draining_cluster_takes_no_jobs(service: JobService) -> None:
    """EDGE-1: neither by name nor by choice; it is said what to do."""
    service.links.snapshots = {"local": FULL, "east": EMPTY}
    drained = await service.call("POST", f"{CLUSTERS}/east/drain", by="ops")
    by_name = await service.call("POST", f"{CLUSTERS}/east/jobs", json=job("tune"))
    found = await chosen(service)

    assert drained.json()["state"] == "draining"
    assert (by_name.status_code, by_name.json()["type"]) == (409, "urn:atoll:cluster-busy")
    assert found["cluster_id"] == "local"
    assert [row["excluded"] for row in found["choice"]["rows"]] == ["", "is draining"]


async def test_removal_needs_a_drained_cluster_or_force(service: JobService) -> None:
    """EDGE-2: forced, every job fails and names the cluster and the force; the own cluster cannot be removed."""
    made = (await service.call("POST", f"{CLUSTERS}/east/jobs", json=job("tune"))).json()
    active = await service.call("DELETE", f"{CLUSTERS}/east", by="ops")
    await service.call("POST", f"{CLUSTERS}/east/drain", by="ops")
    busy = await service.call("DELETE", f"{CLUSTERS}/east", by="ops")
    home = await service.call("DELETE", f"{CLUSTERS}/local", by="ops", params={"force": True})
    forced = await service.call("DELETE", f"{CLUSTERS}/east", by="ops", params={"force": True})
    failed = (await service.call("GET", f"{AUTO}/{made['id']}")).json()

    assert (active.status_code, busy.status_code, home.status_code) == (409, 409, 409)
    assert "1 active jobs" in busy.json()["detail"]
    assert forced.json() == {"name": "east", "jobs_failed": 1}
    assert failed["status"] == "failed"
    assert failed["message"].startswith("cluster east was removed by force by ops")
    assert (await service.call("GET", f"{CLUSTERS}/east", by="ops")).status_code == 404


@pytest.mark.parametrize(
    ("tenant", "critical", "quota"),
    [
        ("globex", False, 16 + 64 + 32 + 100 + 32 + 16 + 50),
        ("globex", True, 8),
        ("acme", False, None),
    ],
    ids=["nominal and borrowed", "critical borrows nothing", "borrows without limit"],
)
def test_the_most_that_a_quota_allows(tenant: str, critical: bool, quota: int | None) -> None:
    """MC-1: what a tenant's queue may use at a time, with what it may borrow."""
    known = parsed(EXAMPLE.read_text()).tenant(tenant)
    assert known is not None
    assert quota_of(known.queue_for(critical=critical)) == quota


# Draining


class GivenMover:
    """Moves jobs to the cluster that a test names."""

    def __init__(self, target: str | None) -> None:
        self.target = target
        self.drains = True
        self.told: list[str] = []

    def is_draining(self) -> bool:
        """Return what the test said."""
        return self.drains

    async def choose(self, record: JobRecord, job: Job) -> ScoreSheet:
        """Return a sheet with the target, if there is one."""
        offers = [ClusterOffer(name=self.target)] if self.target is not None else []
        return choose_cluster(ClusterWish(tenant=record.tenant_id), offers)

    def moved(self, job_id: str) -> None:
        """Note it."""
        self.told.append(job_id)


class TwoClusters:
    """Clusters local, which is drained, and east, with one database."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder}/jobs.db"
        self.database: Database = opened(url)
        self.engine = engine_of(url)
        self.home, self.east = JobWorld(), JobWorld()
        self.east.clock = self.home.clock
        self.mover = GivenMover("east")
        self.mover.drains = False
        self.start()

    def start(self, faults: Faults | None = None) -> None:
        """Start the service's process anew."""
        self.there = ServiceProcess(self.home, self.engine, faults, mover=self.mover)
        self.here = ServiceProcess(self.east, self.engine, cluster="east")

    async def submit(self, **fields: Any) -> str:
        """Submit a job to the cluster that will be drained; one with `gpus` is estimated with them."""
        gpus, job_id = fields.pop("gpus", 0), str(uuid4())
        priced = CostEstimate(JobKind("batch", "", gpus), None, None, ())
        new = replace(new_job(**fields, **({"ext_ml_gpu_count": gpus} if gpus else {})), estimate=priced)
        await self.database.write(lambda session: create_job(session, new, NOW, job_id=job_id))
        return job_id

    async def look(self, job_id: str, *, rounds: int = 8) -> JobRecord:
        """Let both clusters work on a job for a while."""
        for _ in range(rounds):
            for process, world in ((self.there, self.home), (self.here, self.east)):
                await process.look_at(job_id)
                world.settle(2)
        return await self.record(job_id)

    async def record(self, job_id: str) -> JobRecord:
        """Return the record."""
        return await self.database.read(lambda session: get_job(session, job_id))

    async def events(self, job_id: str) -> Sequence[str]:
        """Return what happened."""
        found, _ = await self.database.read(lambda session: list_events(session, job_id, page=1, page_size=99))
        return [one.what for one in found]


@pytest.fixture
def two(tmp_path: Path) -> TwoClusters:
    """Two clusters."""
    return TwoClusters(tmp_path)


async def test_a_training_moves_with_a_new_try(two: TwoClusters) -> None:
    """EDGE-1: its pods end first, by their grace period; then it is another cluster's, and nothing of it is left."""
    file = as_stored(parsed(EXAMPLE.read_text()))
    await two.database.write(lambda session: store_queue_file(session, "east", file, now=NOW, actor="ops"))
    job_id = await two.submit(job_type="training")
    two.home.ends = two.east.ends = False
    running = await two.look(job_id)
    two.mover.drains = True
    moved = await two.look(job_id)

    assert (running.cluster_id, running.state) == ("local", "running")
    assert (moved.cluster_id, moved.state, moved.attempt) == ("east", "running", 2)
    assert two.home.of_kind("Job", "Pod") == []
    assert len(two.east.of_kind("Job")) == 1
    assert (await two.events(job_id))[-4:] == ["move", "submit", "admit", "run"]
    assert two.mover.told == [job_id]
    assert moved.choice is not None
    assert (running.queue_name, moved.queue_name) == (None, "tenant-acme-queue")


async def test_draining_is_undone_unless_a_job_is_on_its_way_out(two: TwoClusters) -> None:
    """A job whose objects are being removed must arrive first; afterwards the cluster takes jobs again."""
    terms = ClusterTerms(kubeconfig="")
    await two.database.write(lambda session: register_cluster(session, "local", terms, now=NOW, actor="ops"))
    await two.database.write(lambda session: drain_cluster(session, "local", now=NOW, actor="ops"))
    job_id = await two.submit(job_type="training")
    two.home.ends = two.east.ends = False
    await two.look(job_id)
    two.mover.drains = True
    await two.there.look_at(job_id)
    with pytest.raises(ClusterBusy, match="job tune is on its way out of cluster local"):
        await two.database.write(lambda session: activate_cluster(session, "local", now=NOW, actor="ops"))
    moved = await two.look(job_id)
    record = await two.database.write(lambda session: activate_cluster(session, "local", now=NOW, actor="ops"))

    assert (moved.cluster_id, moved.state) == ("east", "running")
    assert (record.state, record.changed_by) == ("active", "ops")


@pytest.mark.parametrize("job_type", ["service", "training", "batch"])
async def test_what_waits_moves(two: TwoClusters, job_type: str) -> None:
    """Jobs that wait for quota move at once, of whatever type."""
    two.home.holds.add("tune")
    fields = (
        {"container": {"image": "busybox:1", "ports": [{"name": "http", "port": 80}]}} if job_type == "service" else {}
    )
    job_id = await two.submit(job_type=job_type, **fields)
    before = await two.look(job_id, rounds=1)
    two.mover.drains = True
    moved = await two.look(job_id)

    assert before.cluster_id == "local"
    assert moved.cluster_id == "east"
    assert two.home.of_kind("Job", "Deployment", "Pod") == []


async def test_a_batch_that_runs_ends_where_it_is(two: TwoClusters) -> None:
    """EDGE-1: it may end there, within its longest run time; then it has expired, in its old cluster."""
    job_id = await two.submit(policy={"max_runtime": 60, "max_retries": 0})
    two.home.fates["tune"] = "never"
    two.home.ends = False
    two.home._progress = lambda pods, *, ends: JobWorld._progress(two.home, pods, ends=False)  # type: ignore[method-assign]
    await two.look(job_id)
    two.mover.drains = True
    running = await two.look(job_id)
    await two.home.clock.advance(61)
    over = await two.look(job_id)

    assert (running.cluster_id, running.state) == ("local", "running")
    assert (over.cluster_id, over.state) == ("local", "failed")


async def test_without_another_cluster_a_job_stays_and_says_so(two: TwoClusters) -> None:
    """Nobody is stopped for nothing: what runs goes on, what waits is not submitted, and both say why."""
    two.mover.target = None
    job_id = await two.submit(job_type="training")
    two.home.ends = False
    await two.look(job_id)
    two.mover.drains = True
    stays = await two.look(job_id)
    new_id = await two.submit(name="new")
    waits = await two.look(new_id)

    assert (stays.cluster_id, stays.state) == ("local", "running")
    assert stays.message == "local is draining, and no cluster takes the job: there is no cluster"
    assert (waits.state, waits.cluster_id) == ("pending", "local")
    assert len(two.home.of_kind("Job")) == 1


async def test_a_job_whose_new_cluster_goes_away_stays_on_its_way_out(two: TwoClusters) -> None:
    """Its objects are gone already: were the draining undone now, the job would be taken for lost."""
    job_id = await two.submit(job_type="training")
    two.home.ends = False
    await two.look(job_id)
    two.mover.drains = True
    await two.there.look_at(job_id, rounds=1)
    two.mover.target = None
    waits = await two.look(job_id)

    assert (waits.cluster_id, waits.state) == ("local", "running")
    assert MOVING in waits.message
    assert "no cluster takes the job" in waits.message
    two.mover.target = "east"
    moved = await two.look(job_id)
    assert (moved.cluster_id, moved.attempt) == ("east", 2)


async def test_a_job_whose_name_is_taken_in_its_new_cluster_stays_on_its_way_out(two: TwoClusters) -> None:
    """Until the other job of that name has ended, it is in neither cluster, and the draining cannot be undone."""
    job_id = await two.submit(job_type="training")
    await two.database.write(
        lambda session: create_job(session, replace(new_job(), cluster_id="east"), NOW, job_id=str(uuid4()))
    )
    two.home.ends = two.east.ends = False
    await two.look(job_id)
    two.mover.drains = True
    waits = await two.look(job_id)

    assert (waits.cluster_id, waits.state) == ("local", "running")
    assert waits.message == f"local is draining{MOVING}east, which has an active job of the same name and namespace"


LIMITED = """\
flavors: [{name: any}]
tenants:
  - name: acme
    queues:
      - flavors: [{flavor: any, quota: {gpu: 64}}]
        ml_limits: {max_gpu_count: 4, max_total_gpus: 6}
"""


async def test_a_job_that_moves_is_held_to_the_limits_of_its_new_queue(two: TwoClusters) -> None:
    """A job beyond them stays where it is and says why; one within them moves, and waits there while the budget of the
    queue is spent; a queue that it names must be there too."""
    file = as_stored(parsed(LIMITED))
    await two.database.write(lambda session: store_queue_file(session, "east", file, now=NOW, actor="ops"))
    two.home.ends = two.east.ends = False
    many = await two.submit(name="many", ext_ml_gpu_count=8)
    named = await two.submit(name="named", policy={"queue_name": "mine"})
    first, second = [await two.submit(name=name, gpus=4) for name in ("first", "second")]
    two.mover.drains = True
    stays, stays_too, runs, waits = [await two.look(one) for one in (many, named, first, second)]

    assert (stays.cluster_id, stays_too.cluster_id) == ("local", "local")
    assert "no cluster takes the job: east: ext_ml_gpu_count is 8: may be at most 4" in stays.message
    assert "east: policy.queue_name is 'mine': is no queue of tenant acme" in stays_too.message
    assert (runs.cluster_id, runs.queue_name, runs.state) == ("east", "tenant-acme-queue", "running")
    assert (waits.cluster_id, waits.state) == ("east", "pending")
    assert "6" in waits.message


async def test_a_queue_that_refuses_a_job_is_no_candidate(service: JobService) -> None:
    """The service chooses a cluster whose queue takes the job; where none does, the field is named."""
    await service.call("PUT", f"{CLUSTERS}/local/queues", by="ops", content=LIMITED)
    service.links.snapshots = {"local": EMPTY, "east": EMPTY}
    found = await chosen(service)
    await service.call("PUT", f"{CLUSTERS}/east/queues", by="ops", content=LIMITED)
    refused = await service.call("POST", AUTO, json=job("other"))
    rows = {row["cluster"]: row for row in found["choice"]["rows"]}

    assert found["cluster_id"] == "east"
    assert rows["local"]["excluded"].startswith("its queue refuses the job: ext_ml_gpu_count is 8")
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "ext_ml_gpu_count"


async def test_what_has_ended_does_not_run_again(two: TwoClusters) -> None:
    """A training that completed just before its cluster was drained has succeeded, and moves nowhere."""
    job_id = await two.submit(job_type="training")
    for _ in range(3):
        await two.there.look_at(job_id)
    two.home.settle(40)
    two.mover.drains = True
    ended = await two.look(job_id)

    assert (ended.cluster_id, ended.state) == ("local", "succeeded")
    assert two.east.of_kind("Job") == []


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after it"])
async def test_a_service_killed_while_a_job_moves_doubles_nothing(tmp_path: Path, after: bool) -> None:
    """Killed at each write of the move in turn: at last the job runs once, in the new cluster."""
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        two = TwoClusters(folder)
        job_id = await two.submit(job_type="training")
        two.home.ends = two.east.ends = False
        await two.look(job_id)
        two.mover.drains = True
        faults = Faults(kill_at=number, kill_after=after)
        two.start(faults)
        try:
            await two.look(job_id)
            was_killed = False
        except ServiceKilled:
            was_killed = True
        two.start()
        moved = await two.look(job_id)

        assert (moved.cluster_id, moved.state, moved.attempt) == ("east", "running", 2)
        assert two.home.of_kind("Job", "Pod") == []
        assert [kind for kind, *_ in two.east.created if kind == "Job"] == ["Job"]
        two.database.close()
        two.engine.dispose()
        if not was_killed:
            break
    assert number > 2


# Health


async def test_health_is_shown_and_the_last_capacity_stays(service: JobService) -> None:
    """A cluster that stops answering is unreachable, says why, and keeps what was last known of its GPUs."""
    capacity = capacity_of(EMPTY)
    for trouble, known in (("", capacity), ("connection refused", None)):
        await service.database.write(
            lambda session, trouble=trouble, known=known: note_health(
                session, "east", now=NOW, trouble=trouble, capacity=known
            )
        )
    shown = (await service.call("GET", f"{CLUSTERS}/east", by="ops")).json()

    assert (shown["is_healthy"], shown["message"]) == (False, "connection refused")
    assert (shown["capacity"][0]["total"], shown["capacity"][0]["islands"]) == (8, {"8": 1})


async def test_forced_removal_reaches_every_state(tmp_path: Path) -> None:
    """EDGE-2: pending, queued, admitted, running and preempted jobs fail alike."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    terms = ClusterTerms(kubeconfig="")
    await database.write(lambda session: register_cluster(session, "local", terms, now=NOW, actor="ops"))
    states = [JobState.PENDING, JobState.QUEUED, JobState.ADMITTED, JobState.RUNNING, JobState.PREEMPTED]
    ids = [str(uuid4()) for _ in states]
    for number, (job_id, state) in enumerate(zip(ids, states, strict=True)):
        new = new_job(f"job-{number}")

        def make(session: Session, new: NewJob = new, job_id: str = job_id, state: JobState = state) -> None:
            record, _ = create_job(session, new, NOW, job_id=job_id)
            record.state = state.value

        await database.write(make)
    failed = await database.write(lambda session: remove_cluster(session, "local", force=True, now=NOW, actor="ops"))
    found = [await database.read(lambda session, job_id=job_id: get_job(session, job_id)) for job_id in ids]
    database.close()

    assert failed == 5
    assert {one.state for one in found} == {"failed"}
    assert all("local was removed by force by ops" in one.message for one in found)


async def test_a_slice_that_no_node_has_is_refused(service: JobService) -> None:
    """It would wait for ever; a slice of a shape that is there may be busy, and a silent cluster refuses nothing."""
    labels = {TPU_TYPE_LABEL: "tpu-v5-lite-podslice", TPU_TOPOLOGY_LABEL: "4x4"}
    host = Node(Metadata("host", labels=labels), status=NodeStatus(allocatable={"google.com/tpu": "4"}))
    service.links.snapshots["local"] = replace(NO_SNAPSHOT, nodes=(host,))
    told = {"job_type": "training", "ext_ml_tpu_type": "v5e"}
    there = await service.submit("there", **told, ext_ml_tpu_topology="4x4")
    never = await service.submit("never", **told, ext_ml_tpu_topology="4x8")
    service.links.snapshots["local"] = TimeoutError()
    silent = await service.submit("silent", **told, ext_ml_tpu_topology="4x8")

    assert [one.status_code for one in (there, never, silent)] == [201, 422, 201]
    assert never.json()["errors"][0]["field"] == "ext_ml_tpu_topology"
    assert "cluster local: no worker has v5e 4x8; there is v5e 4x4" in never.text
