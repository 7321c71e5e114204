"""The service is killed at writes, gets no answers, and runs with a busy cluster: no job is lost or duplicated.

Each seed is a history: people submit, pause, resume, cancel and retry, Kueue admits and preempts, pods fail, somebody
deletes objects by hand, and the process dies again and again before or after a write to the database or the API server.
Finally faults stop, one resync runs, and records and cluster agree. ATOLL_HISTORIES=n runs more.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from atoll.api import job_names
from atoll.jobs.states import ENDED, FIRST, IN_CLUSTER, IllegalStep, JobState, JobStep, step
from atoll.kube.errors import KubeError
from jobs.database import engine_of, migrate
from jobs.errors import JobServiceError
from jobs.records import JobRecord
from jobs.store import (
    JobFilter,
    active_ids,
    ask_to_cancel,
    ask_to_pause,
    create_job,
    list_events,
    list_jobs,
    resume_job,
    retry_job,
)
from tests.jobservice.made import new_job
from tests.jobservice.world import Faults, JobWorld, ServiceKilled, ServiceProcess

HISTORIES = int(os.environ.get("ATOLL_HISTORIES", "200"))
BATCHES = 8
TICKS = 25
REST_TICKS = 60
ASKED = {"cancel": ask_to_cancel, "retry": retry_job, "pause": ask_to_pause, "resume": resume_job}
FATES = ("", "", "", "OOMKilled", "Error")


class ServiceLife:
    """One seeded life of a service and its cluster."""

    def __init__(self, seed: int, engine: Engine) -> None:
        self.rng = random.Random(seed)
        self.engine = engine
        self.world = JobWorld(seed)
        self.submitted: dict[str, str] = {}
        """By key: the id that was answered."""
        self.deleted_by_hand: Counter[str] = Counter()
        self.kills = 0
        self.service = self.start()

    def start(self) -> ServiceProcess:
        """Start the process anew; it will die at a write, or not, and lose some requests."""
        faults = Faults(self.rng, loss=self.rng.choice((0.0, 0.0, 0.05, 0.2)))
        if self.rng.random() < 0.8:
            faults.kill_at, faults.kill_after = self.rng.randrange(0, 25), self.rng.random() < 0.5
        return ServiceProcess(self.world, self.engine, faults)

    async def live(self) -> None:
        """Go through the history."""
        for _ in range(TICKS):
            await self.world.clock.advance(self.rng.choice((0, 1, 5, 20)))
            with self.dying():
                with suppress(JobServiceError, IllegalStep):  # people ask for what cannot be had
                    await self.happen()
                await self.service.resync()
            for _ in range(self.rng.randrange(3)):
                self.world.play()
        await self.rest()

    async def rest(self) -> None:
        """Let faults stop and everything that can end do so; the world goes on for good."""
        self.service = ServiceProcess(self.world, self.engine)
        self.world.plays = False
        for name in list(self.world.holds):
            self.world.admit(name)
        for _, one in self.world.of_kind("Job"):
            self.world.admit(one["metadata"]["name"])
        for _ in range(REST_TICKS):
            await self.world.clock.advance(60)
            self.world.settle(4)
            before = dict(self.world.server.objects)
            await self.service.resync()
            active = await self.service.database.read(lambda session: active_ids(session, "local"))
            for job_id in active:
                with suppress(JobServiceError):  # most are not paused
                    now = self.world.clock.now()
                    await self.service.database.write(
                        lambda session, job_id=job_id, now=now: resume_job(session, job_id, now=now, actor="ann")
                    )
            if not active and before == self.world.server.objects:
                return

    @contextmanager
    def dying(self) -> Iterator[None]:
        """Start anew where the process dies; what is not answered is tried again at the next tick."""
        try:
            yield
        except ServiceKilled:
            self.kills += 1
            self.service = self.start()
        except (KubeError, OperationalError):
            pass

    async def happen(self) -> None:
        """Do one thing that people, Kueue or chance do."""
        act = self.rng.choice(("submit", "submit", "cancel", "retry", "pause", "resume", "suspend", "admit", "delete"))
        name = f"job-{self.rng.randrange(6)}"
        if act == "submit":
            await self.submit(name)
        elif act in ASKED and self.submitted:
            job_id, now = self.submitted[self.rng.choice(sorted(self.submitted))], self.world.clock.now()
            asked = ASKED[act]
            await self.service.database.write(lambda session: asked(session, job_id, now=now, actor="ann"))
        elif act == "suspend":
            self.world.suspend(name, reason=self.rng.choice(("Preempted", "PodsReadyTimeout")))
        elif act == "admit":
            self.world.admit(name)
        elif act == "delete" and self.rng.random() < 0.3:
            for _, one in self.world.of_kind("Job", "Deployment"):
                if one["metadata"]["name"] == name:
                    self.deleted_by_hand[one["metadata"]["labels"][job_names.JOB_ID]] += 1
            self.world.delete_by_hand(name)

    async def submit(self, name: str) -> None:
        """Submit a job, with the key of an earlier request or a new one; repeat it until it is answered."""
        key = f"{name}-{self.rng.randrange(3)}"
        policy: dict[str, Any] = {"max_retries": self.rng.randrange(3), "retry_delay_seconds": self.rng.choice((0, 30))}
        if self.rng.random() < 0.2:
            policy["deadline"] = (self.world.clock.now() + timedelta(seconds=self.rng.randrange(1, 900))).isoformat()
        kind = self.rng.choice(("batch", "training", "service"))
        if kind == "service":
            policy["max_runtime"] = 600
        self.world.fates[name] = self.rng.choice(FATES)
        if self.rng.random() < 0.3:
            self.world.holds.add(name)
        job_id = str(UUID(int=self.rng.getrandbits(128), version=4))
        new = new_job(name, key=key, job_type=kind, policy=policy, ext_ml_gpu_count=1)
        record, _ = await self.service.database.write(
            lambda session: create_job(session, new, self.world.clock.now(), job_id=job_id)
        )
        assert self.submitted.setdefault(key, record.id) == record.id, "one key made two jobs"

    # What must hold

    def check_always(self) -> None:
        """No job has two objects that run pods, nor more of them than tries and deletions by hand allow."""
        made = Counter((job_id, attempt) for _, job_id, attempt in self.world.created)
        for (job_id, _), count in made.items():
            assert count <= 1 + self.deleted_by_hand[job_id], f"job {job_id} was created {count} times in one try"

    async def check_at_rest(self) -> None:
        """Records and cluster agree."""
        with Session(self.engine) as session:
            page = list_jobs(session, JobFilter("local", None), page=1, page_size=200)
            records = {record.id: record for record in page.records}
            histories = {job_id: list_events(session, job_id, page=1, page_size=200)[0] for job_id in records}
        assert set(self.submitted.values()) <= set(records), "a job that was answered is lost"
        for job_id, record in records.items():
            assert JobState(record.state) in ENDED, f"{record.name} is {record.state}: {record.message}"
            self.check_record(record)
            self.check_replay(record, [one.what for one in histories[job_id]])
        for path, one in self.world.server.objects.items():
            if one["kind"] not in ("Workload", "PersistentVolumeClaim"):
                assert one["metadata"]["labels"][job_names.JOB_ID] in records, f"{path} has no record"

    def check_record(self, record: JobRecord) -> None:
        """Nothing in the cluster contradicts how a job ended."""
        mine = [
            one
            for _, one in self.world.of_kind("Job", "Deployment", "Pod", "GpuClaim")
            if one["metadata"]["labels"][job_names.JOB_ID] == record.id
        ]
        running = [one for one in mine if one["kind"] == "Pod" and one["status"]["phase"] in ("Pending", "Running")]
        conditions = {
            condition["type"]
            for one in mine
            if one["kind"] == "Job"
            for condition in one.get("status", {}).get("conditions", ())
        }
        assert not running, f"{record.name} is {record.state} and has pods: {running}"
        if record.state == JobState.CANCELLED:
            assert not mine, f"{record.name} is cancelled, and left {mine}"
        if record.state == JobState.SUCCEEDED and mine:
            assert conditions in ({"Complete"}, set())
        if record.state == JobState.FAILED:
            assert "Complete" not in conditions, f"{record.name} failed: {record.message}; its Job completed"

    def check_replay(self, record: JobRecord, history: list[str]) -> None:
        """What is told of a job leads, step by step, to the state that it is in."""
        state = FIRST
        for what in history:
            if what in set(JobStep):
                state = step(record.name, state, JobStep(what))
        assert state == record.state
        assert len(history) < 200
        assert IN_CLUSTER.isdisjoint({state})


def histories(engine: Engine, seeds: range) -> int:
    """Live through histories; return how often the service died."""
    import asyncio

    kills = 0
    for seed in seeds:
        with engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM job_events")
            connection.exec_driver_sql("DELETE FROM jobs")
        history = ServiceLife(seed, engine)

        async def run(history: ServiceLife = history) -> None:
            await history.live()
            history.check_always()
            await history.check_at_rest()

        try:
            asyncio.run(run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        kills += history.kills
    return kills


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_job_is_lost_or_doubled_whenever_the_service_dies(
    tmp_path_factory: pytest.TempPathFactory, batch: int
) -> None:
    """After any history and one resync, every job has a record, an end that the cluster does not contradict, and no
    second self."""
    url = f"sqlite:///{tmp_path_factory.mktemp('records')}/jobs.db"
    migrate(url)
    engine = engine_of(url)
    share = max(1, HISTORIES // BATCHES)

    kills = histories(engine, range(batch * share, (batch + 1) * share))

    engine.dispose()
    assert kills > share // 2


def test_postgresql_keeps_the_same_promises(postgres_server: str) -> None:
    """The same histories over a real PostgreSQL."""
    migrate(postgres_server)
    engine = engine_of(postgres_server)

    kills = histories(engine, range(10))

    engine.dispose()
    assert kills > 3
