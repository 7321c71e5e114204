"""The reconciler: it creates recorded jobs in the cluster, and records the cluster's state."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.exc import OperationalError

from atoll.api import job_names
from atoll.jobs.settings import RenderSettings
from atoll.kube.errors import Unanswered
from jobs.database import engine_of, migrate
from jobs.records import JobEventRecord, JobRecord
from jobs.store import ask_to_cancel, create_job, get_job, list_events, retry_job
from jobs.views import view_of
from tests.fakes.api_server import status
from tests.jobservice.made import NOW, new_job
from tests.jobservice.world import SERVICE_ID, Faults, JobWorld, ServiceKilled, ServiceProcess
from tests.worker.test_records import RECORD
from worker.records import Version
from worker.termination import message_of


class JobStage:
    """A world, a service, and the jobs that a test gives it."""

    def __init__(self, engine: Any, rendering: RenderSettings | None = None) -> None:
        self.world = JobWorld()
        self.world.plays = False
        self.engine = engine
        self.service = ServiceProcess(self.world, engine, rendering=rendering)

    async def give(self, name: str = "tune", **fields: Any) -> str:
        """Record a job and look at it once."""
        new = new_job(name, **fields)
        record, _ = await self.service.database.write(
            lambda session: create_job(session, new, self.world.clock.now(), job_id=str(uuid4()))
        )
        await self.service.look_at(record.id)
        return record.id

    async def record(self, job_id: str) -> JobRecord:
        """Return a record."""
        return await self.service.database.read(lambda session: get_job(session, job_id))

    async def history(self, job_id: str) -> list[JobEventRecord]:
        """Return what happened to a job."""
        events, _ = await self.service.database.read(lambda session: list_events(session, job_id, page=1, page_size=99))
        return list(events)

    async def states(self, job_id: str) -> list[str]:
        """Return the states that a job went through."""
        return [one.state for one in await self.history(job_id)]

    async def live(self, job_id: str, rounds: int = 6) -> JobRecord:
        """Let the cluster play and look at a job, in turns."""
        for _ in range(rounds):
            self.world.play()
            await self.service.look_at(job_id)
        return await self.record(job_id)

    def kinds(self) -> list[str]:
        """Return the kinds of all objects in the cluster."""
        return sorted(one["kind"] for one in self.world.server.objects.values())

    def one(self, kind: str) -> dict[str, Any]:
        """Return the only object of a kind."""
        ((_, found),) = self.world.of_kind(kind)
        return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A database of SQLite for all tests of this module."""
    url = f"sqlite:///{tmp_path_factory.mktemp('records')}/jobs.db"
    migrate(url)
    return engine_of(url)


@pytest.fixture
async def stage(engine: Any) -> AsyncIterator[JobStage]:
    """An empty world and an empty database."""
    stage = JobStage(engine)
    yield stage
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")


async def test_a_job_is_created_runs_and_succeeds(stage: JobStage) -> None:
    """A batch goes through its whole life, and the cluster bears whose it is on every object and pod."""
    job_id = await stage.give(ext_ml_gpu_count=2)
    created = {one["kind"]: one for one in stage.world.server.objects.values()}
    record = await stage.live(job_id)

    assert set(created) == {"GpuClaim", "Job"}
    for one in (*created.values(), created["Job"]["spec"]["template"]):
        labels = one["metadata"]["labels"]
        assert labels[job_names.JOB_ID] == job_id
        assert (labels[job_names.SERVICE_ID], labels[job_names.ATTEMPT]) == (SERVICE_ID, "1")
    assert created["Job"]["spec"]["backoffLimit"] == 0
    assert "ttlSecondsAfterFinished" not in created["Job"]["spec"]
    assert record.workload_uid == created["Job"]["metadata"]["uid"]
    assert await stage.states(job_id) == ["pending", "queued", "admitted", "running", "succeeded"]
    assert stage.kinds() == ["GpuClaim", "Job", "Pod"]  # kept to be looked at


async def test_a_service_runs_until_it_is_cancelled(stage: JobStage) -> None:
    """A Deployment runs when all replicas do; cancelled, it is gone with its pods before that is recorded."""
    job_id = await stage.give(job_type="service", container={"image": "web:1", "ports": [{"port": 80, "name": "http"}]})
    running = await stage.live(job_id)
    await stage.service.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    await stage.service.look_at(job_id)
    waiting = await stage.record(job_id)
    left = stage.kinds()
    cancelled = await stage.live(job_id)

    assert running.state == "running"
    assert (waiting.state, left) == ("running", ["Deployment", "Pod"])
    assert (cancelled.state, cancelled.message, stage.kinds()) == ("cancelled", "cancelled by ann", [])


async def test_a_job_that_was_never_created_is_cancelled_at_once(stage: JobStage) -> None:
    """What waits for its start leaves nothing in the cluster."""
    start = (NOW + timedelta(hours=1)).isoformat()
    job_id = await stage.give(policy={"scheduled_start": start})
    waits = stage.service.waits[job_id]
    await stage.service.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    await stage.service.look_at(job_id)

    assert waits == 3600
    assert await stage.states(job_id) == ["pending", "pending", "cancelled"]
    assert stage.world.created == []


async def test_a_scheduled_job_starts_at_its_time(stage: JobStage) -> None:
    """Not a second before."""
    job_id = await stage.give(policy={"scheduled_start": (NOW + timedelta(seconds=60)).isoformat()})
    await stage.world.clock.advance(59)
    await stage.service.look_at(job_id)
    early = (await stage.record(job_id)).state
    await stage.world.clock.advance(1)
    await stage.service.look_at(job_id)

    assert early == "pending"
    assert (await stage.record(job_id)).state in ("queued", "admitted")


async def test_a_passing_failure_is_tried_again_after_a_pause(stage: JobStage) -> None:
    """Killed for its memory, the job is tried again twice, each time in a new try, and then it is over."""
    stage.world.fates["tune"] = "OOMKilled"
    job_id = await stage.give(policy={"max_retries": 2, "retry_delay_seconds": 10})
    first = await stage.live(job_id)
    waits = stage.service.waits[job_id]
    await stage.world.clock.advance(10)
    second = await stage.live(job_id, rounds=12)
    await stage.world.clock.advance(20)
    last = await stage.live(job_id, rounds=12)

    assert (first.state, first.retry_count, waits) == ("pending", 1, 10)
    assert first.message == "retry 1 of 2 in 10 s: BackoffLimitExceeded: pod tune-1-0: OOMKilled (exit code 137)"
    assert (second.state, second.retry_count, second.attempt) == ("pending", 2, 3)
    assert (last.state, last.retry_count, last.attempt) == ("failed", 2, 3)
    assert last.message.startswith("failed, all 2 retries are used up: ")
    assert [attempt for kind, _, attempt in stage.world.created if kind == "Job"] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        pytest.param({}, 0, id="one pod: the service decides about the next try"),
        pytest.param({"workers": 2, "ext_ml_gpu_count": 2, "job_type": "training"}, 0, id="pods that work as one"),
        pytest.param({"parallelism": 2}, 2, id="pods each on its own: the cluster tries one again"),
        pytest.param({"job_type": "training", "policy": {"max_retries": 2, "preemptible": False}}, 2, id="in place"),
    ],
)
async def test_who_tries_again(stage: JobStage, fields: dict[str, Any], limit: int) -> None:
    """Tries are counted once: by the service, or by the cluster where a pod is restarted by itself."""
    await stage.give(**{"policy": {"max_retries": 2}} | fields)

    assert stage.one("Job")["spec"]["backoffLimit"] == limit


async def test_a_mistake_of_the_program_is_not_tried_again(stage: JobStage) -> None:
    """An exit code of its own ends the job at once."""
    stage.world.fates["tune"] = "Error"
    job_id = await stage.give()
    record = await stage.live(job_id)

    assert (record.state, record.retry_count) == ("failed", 0)
    assert record.message == "failed: BackoffLimitExceeded: pod tune-1-0: Error (exit code 137)"


async def test_a_retry_by_hand_takes_the_old_try_away_first(stage: JobStage) -> None:
    """Objects of the failed try are gone, with their pods, before the new one begins."""
    stage.world.fates["tune"] = "Error"
    job_id = await stage.give(ext_ml_gpu_count=1)
    await stage.live(job_id)
    old = stage.one("Job")["metadata"]["uid"]
    stage.world.fates.clear()
    await stage.service.database.write(lambda session: retry_job(session, job_id, now=NOW, actor="ann"))
    await stage.service.look_at(job_id)
    between = stage.one("Job")
    record = await stage.live(job_id, rounds=12)

    assert between["metadata"]["uid"] == old
    assert "deletionTimestamp" in between["metadata"]
    assert (record.state, record.attempt) == ("succeeded", 2)
    assert stage.one("Job")["metadata"]["labels"][job_names.ATTEMPT] == "2"


async def test_checkpoints_outlive_tries_and_cancelling(stage: JobStage) -> None:
    """The volume with the checkpoints of a training is taken over by the next try, and never removed."""
    stage.world.fates["tune"] = "OOMKilled"
    job_id = await stage.give(job_type="training", intent={"checkpoint_config": {}}, policy={"retry_delay_seconds": 0})
    volume = stage.one("PersistentVolumeClaim")["metadata"]["uid"]
    record = await stage.live(job_id, rounds=8)
    await stage.service.database.write(lambda session: ask_to_cancel(session, job_id, now=NOW, actor="ann"))
    cancelled = await stage.live(job_id)

    assert record.attempt > 1
    assert cancelled.state == "cancelled"
    assert stage.kinds() == ["PersistentVolumeClaim"]
    assert stage.one("PersistentVolumeClaim")["metadata"]["uid"] == volume


async def test_checkpoints_outlive_the_last_retry(engine: Any) -> None:
    """EDGE-16: a training whose retries are used up has failed, and what it saved stays, also when its objects have
    gone: the record says which checkpoint that is, and the volume is there."""
    stage = JobStage(engine, RenderSettings(finished_ttl_seconds=500))
    stage.world.fates["tune"] = "OOMKilled"
    policy = {"retry_delay_seconds": 0, "max_retries": 1}
    job_id = await stage.give(job_type="training", intent={"checkpoint_config": {}}, policy=policy)
    stage.world.told["tune"] = told(job_id, 30, 10)
    failed = await stage.live(job_id, rounds=12)
    await stage.world.clock.advance(500)
    last = view_of(await stage.live(job_id)).last_checkpoint

    assert (failed.state, failed.retry_count) == ("failed", 1)
    assert "all 1 retries are used up" in failed.message
    assert stage.kinds() == ["PersistentVolumeClaim"]
    assert last is not None
    assert last.step == 30


async def test_a_job_whose_model_is_not_there_yet_is_tried_again_and_says_so(stage: JobStage) -> None:
    """EDGE-18, REG-3: by what the library leaves as its termination message; a wrong model ends the job at once."""
    stage.world.fates |= {"tune": "Error", "wrong": "Error"}
    stage.world.told |= {
        "tune": "ModelUnavailable: the server answers 404",
        "wrong": "ModelMismatch: m.bin has another checksum: do not load it",
    }
    ids = [await stage.give(name, policy={"retry_delay_seconds": 60}) for name in ("tune", "wrong")]
    waits, wrong = [await stage.live(job_id) for job_id in ids]
    del stage.world.fates["tune"]
    await stage.world.clock.advance(60)
    ended = await stage.live(ids[0], rounds=12)

    assert (waits.state, waits.retry_count) == ("pending", 1)
    assert "retry 1 of 3 in 60 s: " in waits.message
    assert "ModelUnavailable: the server answers 404" in waits.message
    assert (ended.state, wrong.state, wrong.retry_count) == ("succeeded", "failed", 0)
    assert "ModelMismatch: m.bin has another checksum" in wrong.message


def told(job_id: str, step: int, minute: int) -> str:
    """Return the termination message of a training that saved a checkpoint."""
    record = replace(RECORD, job_id=job_id, version=Version(1, step), created_at=f"2026-01-02T03:{minute:02}:00Z")
    return message_of(record).decode()


async def test_the_last_checkpoint_that_a_job_tells_is_recorded(stage: JobStage) -> None:
    """A later one replaces it, also where its step is lower; an older one, one of another job and nonsense do not."""
    stage.world.fates["tune"] = "OOMKilled"
    job_id = await stage.give(job_type="training", policy={"retry_delay_seconds": 0, "max_retries": 9})
    found = []
    for message in (
        told(job_id, 30, 10),
        told(job_id, 20, 15),
        told(job_id, 99, 12),
        told("another", 99, 50),
        "out of memory",
    ):
        stage.world.told["tune"] = message
        before = (await stage.record(job_id)).retry_count
        while (record := await stage.live(job_id, rounds=1)).retry_count == before:
            pass
        found.append(view_of(record).last_checkpoint)

    assert [one and (one.step, one.job_id) for one in found] == [(30, job_id), *[(20, job_id)] * 4]


async def test_kueue_holds_admits_preempts_and_admits_again(stage: JobStage) -> None:
    """A suspended Job is queued; one that Kueue preempts is preempted and queued again, which counts as no failure."""
    stage.world.holds.add("tune")
    job_id = await stage.give(policy={"max_retries": 0})
    held = await stage.live(job_id, rounds=2)
    stage.world.admit("tune")
    stage.world.play()
    stage.world.play()
    await stage.service.look_at(job_id)
    stage.world.suspend("tune")
    preempted = await stage.live(job_id, rounds=2)
    stage.world.admit("tune")
    record = await stage.live(job_id)

    assert (held.state, held.message) == ("queued", "waits for quota")
    assert (preempted.state, preempted.preemption_count, preempted.retry_count) == ("queued", 1, 0)
    assert await stage.states(job_id) == [
        "pending", "queued", "admitted", "running", "preempted", "queued", "admitted", "running", "succeeded",
    ]  # fmt: skip
    assert (record.state, record.attempt) == ("succeeded", 1)


SPOT = {"ext_ml_priority_class": "spot", "ext_ml_priority_escalation": True, "ext_ml_escalation_after_s": 600}


ESCALATION_WRITES = 5
"""The Job is deleted, the step recorded, the Job created again, that recorded, and then what it waits for."""


def escalation_faults() -> list[Any]:
    """Return no fault, and at each write of an escalation a death or a lost answer, before it is carried out or
    after."""
    each = product(range(ESCALATION_WRITES), (False, True), (False, True))
    return [
        pytest.param(Faults(), id="none"),
        *(
            pytest.param(
                Faults(kill_at=number, kill_after=is_after, loses=is_lost),
                id=f"{'lost' if is_lost else 'killed'} {'after' if is_after else 'before'} write {number}",
            )
            for number, is_after, is_lost in each
        ),
    ]


@pytest.mark.parametrize("faults", escalation_faults())
async def test_a_spot_job_that_starves_moves_up_once(stage: JobStage, faults: Faults) -> None:
    """EDGE-11: after its time in the queue it is submitted again in the next class, whichever write is lost and
    wherever the service dies; that is no failure, and its history says why."""
    stage.world.holds.add("tune")
    job_id = await stage.give(policy={"max_retries": 0}, **SPOT)
    await stage.world.clock.advance(599)
    early = await stage.live(job_id, rounds=2)
    first = stage.one("Job")["metadata"]
    assert (early.state, early.attempt, stage.service.waits[job_id]) == ("queued", 1, 1)

    await stage.world.clock.advance(1)
    stage.service = ServiceProcess(stage.world, stage.engine, faults)
    try:
        await stage.live(job_id)
        assert (faults.kill_at, faults.writes) == (None, ESCALATION_WRITES)
    except (ServiceKilled, Unanswered, OperationalError):
        assert faults.writes == (faults.kill_at or 0) + 1
    if not faults.loses:
        stage.service = ServiceProcess(stage.world, stage.engine)
    moved = await stage.live(job_id)
    second = stage.one("Job")["metadata"]

    assert (first["labels"][job_names.PRIORITY], second["labels"][job_names.PRIORITY]) == ("low", "normal")
    assert first["uid"] != second["uid"]
    assert [attempt for kind, _, attempt in stage.world.created if kind == "Job"] == ["1", "2"]
    assert (moved.state, moved.attempt, moved.retry_count) == ("queued", 2, 0)
    told = [one.message for one in await stage.history(job_id) if one.what == "escalate"]
    assert told == ["waited for 600 s as spot, so it moves up to on-demand"]

    await stage.world.clock.advance(6000)
    assert (await stage.live(job_id)).attempt == 2
    stage.world.admit("tune")
    assert (await stage.live(job_id)).state == "succeeded"


async def test_a_spot_job_that_begins_in_time_stays_spot(stage: JobStage) -> None:
    """Kueue admits it when its time is just over, and the service has not looked yet."""
    stage.world.holds.add("tune")
    job_id = await stage.give(**SPOT)
    await stage.world.clock.advance(600)
    stage.world.admit("tune")
    record = await stage.live(job_id, rounds=9)

    assert (record.state, record.attempt) == ("succeeded", 1)


@pytest.mark.parametrize(("reason", "expected"), [("Preempted", "failed"), ("PodsReadyTimeout", "queued")])
async def test_only_preemption_fails_a_job_that_wants_no_retry(stage: JobStage, reason: str, expected: str) -> None:
    """To lose quota for another reason is to be queued again, and says why."""
    job_id = await stage.give(policy={"retry_on_preemption": False})
    await stage.live(job_id, rounds=2)
    stage.world.suspend("tune", reason=reason)
    record = await stage.live(job_id, rounds=2)

    assert record.state == expected
    assert reason in record.message


async def test_a_deadline_ends_a_service_in_the_cluster_too(stage: JobStage) -> None:
    """When its time is over a service is failed, says why, and nothing of it runs any more."""
    job_id = await stage.give(job_type="service", policy={"max_runtime": 100})
    await stage.live(job_id)
    waits = stage.service.waits[job_id]
    await stage.world.clock.advance(100)
    record = await stage.live(job_id)

    assert waits == 100
    assert (record.state, record.message) == ("failed", "the service reached its maximum run time of 100 s")
    assert stage.kinds() == []


@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        ({"max_runtime": 100}, "is {}: `atoll job retry tune` goes on from it"),
        ({"deadline": (NOW + timedelta(seconds=100)).isoformat()}, "is {}"),
    ],
)
async def test_a_training_whose_time_is_over_says_what_it_leaves(
    stage: JobStage, policy: dict[str, Any], ends: str
) -> None:
    """EDGE-6: it is failed for its time, with its last checkpoint; where a retry has time of its own, with how to go
    on."""
    stage.world.fates["tune"] = "OOMKilled"
    job_id = await stage.give(job_type="training", policy={"retry_delay_seconds": 0, "max_retries": 9} | policy)
    stage.world.told["tune"] = told(job_id, 30, 10)
    while (await stage.live(job_id, rounds=1)).retry_count == 0:
        pass
    stage.world.ends = False
    await stage.live(job_id)
    await stage.world.clock.advance(100)
    record = await stage.live(job_id)

    assert record.state == "failed"
    assert "maximum run time of 100 s; its last" in record.message or "has passed; its last" in record.message
    assert record.message.endswith(f"its last checkpoint, of step 30, {ends.format(RECORD.storage_key)}")


async def test_a_queued_job_fails_at_its_deadline(stage: JobStage) -> None:
    """Nobody waits for quota beyond the time by which the job must be finished."""
    stage.world.holds.add("tune")
    job_id = await stage.give(policy={"deadline": (NOW + timedelta(seconds=50)).isoformat()})
    await stage.world.clock.advance(50)
    record = await stage.live(job_id)

    assert record.state == "failed"
    assert "its deadline 2026-01-31T12:00:50+00:00 has passed" in record.message
    assert not stage.world.of_kind("Job", "Pod")


async def test_objects_that_somebody_deletes_are_missed(stage: JobStage) -> None:
    """EDGE-10, REC-3: a job whose Job was deleted by hand has failed, and says what probably happened; it is not
    created anew."""
    job_id = await stage.give()
    await stage.live(job_id, rounds=2)
    stage.world.delete_by_hand("tune")
    record = await stage.live(job_id)

    assert record.state == "failed"
    assert (
        record.message == "its objects are gone from the cluster and the service did not delete them: deleted by hand?"
    )
    assert len(stage.world.created) == 1


async def test_a_stranger_of_the_same_name_is_not_the_job(stage: JobStage) -> None:
    """A Job that took the place of ours is not followed, and not removed."""
    job_id = await stage.give()
    await stage.live(job_id, rounds=2)
    stage.world.delete_by_hand("tune")
    path = "/apis/batch/v1/namespaces/tenant-acme/jobs/tune"
    stage.world.server.put(
        path, {"kind": "Job", "spec": {"template": {"metadata": {"labels": {}}}}, "metadata": {"labels": {}}}
    )
    await stage.service.look_at(job_id)

    assert (await stage.record(job_id)).state == "failed"
    assert "deletionTimestamp" not in stage.world.server.objects[path]["metadata"]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        pytest.param(
            {}, "exists and does not belong to this service: delete it, or give the job another name", id="a stranger's"
        ),
        pytest.param(
            {job_names.SERVICE_ID: "another", job_names.JOB_ID: "x"},
            "does not belong to this service",
            id="another service's",
        ),
    ],
)
async def test_a_name_that_strangers_have_is_told(stage: JobStage, labels: dict[str, str], told: str) -> None:
    """What is not ours is neither taken over nor removed: the job fails and names it."""
    path = "/apis/batch/v1/namespaces/tenant-acme/jobs/tune"
    stage.world.server.put(path, {"kind": "Job", "spec": {}, "metadata": {"labels": labels}})
    job_id = await stage.give()
    record = await stage.record(job_id)

    assert record.state == "failed"
    assert record.message.startswith("Job tenant-acme/tune ")
    assert told in record.message
    assert path in stage.world.server.objects


async def test_a_new_job_takes_the_name_of_one_that_has_ended(stage: JobStage) -> None:
    """What was kept of the old one to be looked at makes room."""
    first = await stage.give(ext_ml_gpu_count=1)
    await stage.live(first)
    second = await stage.give(ext_ml_gpu_count=1)
    record = await stage.live(second, rounds=12)

    assert (await stage.record(first)).state == record.state == "succeeded"
    assert {one["metadata"]["labels"][job_names.JOB_ID] for _, one in stage.world.of_kind("Job", "GpuClaim")} == {
        second
    }


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [(422, "Invalid", "failed"), (403, "Forbidden", "failed"), (404, "NotFound", "failed")],
)
async def test_what_the_cluster_refuses_fails_with_its_words(
    stage: JobStage, code: int, reason: str, expected: str
) -> None:
    """A namespace that is not there, or an object that is not taken, ends the job and says so."""

    def refuse(method: str, path: str, _body: Any) -> Any:
        return status(code, reason, "no such namespace") if method == "POST" and path.endswith("/jobs") else None

    respond = stage.world.server.respond
    stage.world.server.respond = lambda method, path, query, body: (  # type: ignore[method-assign]
        refuse(method, path, body) or respond(method, path, query, body)
    )
    job_id = await stage.give()
    record = await stage.record(job_id)

    assert record.state == expected
    assert record.message.startswith(f"the cluster refuses the job: {code} {reason}: no such namespace")


async def test_what_is_kept_goes_after_its_time(engine: Any) -> None:
    """REC-5, SM-16: objects of a finished job stay as long as the administrator says, and no longer."""
    stage = JobStage(engine, RenderSettings(finished_ttl_seconds=500))
    job_id = await stage.give()
    await stage.live(job_id)
    await stage.service.resync()
    waits, kept = stage.service.waits[job_id], stage.kinds()
    await stage.world.clock.advance(500)
    await stage.live(job_id)

    assert (waits, kept) == (500, ["Job", "Pod"])
    assert stage.kinds() == []


async def test_objects_without_a_record_are_removed_and_others_left_alone(stage: JobStage) -> None:
    """EDGE-4, REC-4: the sweep removes what bears this service's label and belongs to no job; everything else it does
    not touch."""
    labels = {job_names.SERVICE_ID: SERVICE_ID, job_names.JOB_ID: "gone", job_names.ATTEMPT: "1"}
    base = "/apis/batch/v1/namespaces/tenant-acme/jobs"
    spec = {"spec": {"template": {"metadata": {"labels": {}}}}, "kind": "Job"}
    stage.world.server.put(f"{base}/orphan", spec | {"metadata": {"labels": labels}})
    stage.world.server.put(
        f"{base}/theirs", spec | {"metadata": {"labels": labels | {job_names.SERVICE_ID: "another"}}}
    )
    stage.world.server.put(f"{base}/rendered", spec | {"metadata": {"labels": {job_names.JOB_NAME: "rendered"}}})
    stage.world.server.put(
        "/api/v1/namespaces/tenant-acme/persistentvolumeclaims/orphan-ckpt",
        {"kind": "PersistentVolumeClaim", "metadata": {"labels": labels}},
    )
    await stage.service.resync()

    leaving = [
        one["metadata"]["name"] for one in stage.world.server.objects.values() if "deletionTimestamp" in one["metadata"]
    ]
    assert leaving == ["orphan"]
    assert len(stage.world.server.objects) == 4


async def test_a_service_that_was_away_catches_up(stage: JobStage) -> None:
    """EDGE-8, REC-1, REC-2: what happened while nobody looked is told step by step when somebody looks again."""
    job_id = await stage.give()
    stage.world.settle()
    service = ServiceProcess(stage.world, stage.engine)
    await service.resync()

    assert await stage.states(job_id) == ["pending", "queued", "admitted", "running", "succeeded"]


async def test_why_a_job_waits_is_shown(stage: JobStage) -> None:
    """An image that cannot be pulled is told while the job waits for it."""
    job_id = await stage.give()
    stage.world.play()
    ((path, pod),) = stage.world.of_kind("Pod")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    stage.world.server.put(path, pod | {"status": {"phase": "Pending", "containerStatuses": [{"state": waiting}]}})
    await stage.service.look_at(job_id)
    record = await stage.record(job_id)

    assert (record.state, record.message) == ("admitted", "pod tune-1-0: ImagePullBackOff Back-off pulling image")
