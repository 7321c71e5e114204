"""The service is killed at writes, gets no answers, and runs with busy clusters: no job is lost or duplicated.

Each seed is a history with one cluster or three: people submit, pause, resume, cancel and retry, Kueue admits and
preempts, pods fail, somebody deletes objects by hand, and the process dies again and again before or after a write to
the database or an API server. Database and clusters go away and come back, watches are cut, so that most jobs are not
looked at, the clock is set back, and clusters are drained. Finally faults stop, one resync runs, and records and
clusters agree. ATOLL_HISTORIES=n runs more.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from atoll.api import job_names
from atoll.jobs.choosing import ClusterOffer, ClusterWish, ScoreSheet, choose_cluster
from atoll.jobs.model import Job
from atoll.jobs.states import ENDED, FIRST, IN_CLUSTER, IllegalStep, JobState, JobStep, step
from atoll.kube.errors import KubeError
from jobs.cluster_store import MOVING
from jobs.database import engine_of, migrate
from jobs.errors import JobServiceError
from jobs.records import JobRecord
from jobs.store import (
    JobFilter,
    active_ids,
    ask_to_cancel,
    ask_to_pause,
    create_job,
    get_job,
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
ACTS = ("submit", "submit", "cancel", "retry", "pause", "resume", "suspend", "admit", "delete", "drain")
ASKED = {"cancel": ask_to_cancel, "retry": retry_job, "pause": ask_to_pause, "resume": resume_job}
FATES = ("", "", "", "OOMKilled", "Error")
CLUSTERS = ("local", "east", "west")
LOSSES = (0.0, 0.0, 0.05, 0.2, 1.0)
"""Shares of requests without an answer; with 1.0 neither the database nor any cluster answers."""
BACK_SECONDS_MAX = 600


class LifeMover:
    """Moves jobs of a cluster that a history drains to the first one that it does not."""

    def __init__(self, life: "ServiceLife", cluster: str) -> None:
        self.life = life
        self.cluster = cluster

    def is_draining(self) -> bool:
        """Return what the history says."""
        return self.cluster in self.life.draining

    async def choose(self, record: JobRecord, job: Job) -> ScoreSheet:
        """Return a sheet with the clusters that take jobs."""
        offers = [ClusterOffer(name=name) for name in self.life.worlds if name not in self.life.draining]
        return choose_cluster(ClusterWish(tenant=record.tenant_id), offers)

    def moved(self, job_id: str) -> None:
        """Do nothing: the next look at the other cluster finds it."""


class ServiceLife:
    """One seeded life of a service and its cluster."""

    def __init__(self, seed: int, engine: Engine) -> None:
        self.rng = random.Random(seed)
        self.engine = engine
        names = CLUSTERS[:1] if seed % 2 else CLUSTERS
        self.worlds = {name: JobWorld(seed + number) for number, name in enumerate(names)}
        self.clock = self.worlds["local"].clock
        for world in self.worlds.values():
            world.clock = self.clock
        self.draining: set[str] = set()
        self.submitted: dict[str, str] = {}
        """By key: the id that was answered."""
        self.deleted_by_hand: Counter[str] = Counter()
        self.set_back_at: datetime | None = None
        """The latest time from which the clock went back."""
        self.kills = 0
        self.outages = 0
        self.start()

    def start(self) -> None:
        """Start the process anew; it will die at a write, or not, and lose some requests."""
        faults = Faults(self.rng, loss=self.rng.choice(LOSSES[:4]))
        if self.rng.random() < 0.8:
            faults.kill_at, faults.kill_after = self.rng.randrange(0, 25), self.rng.random() < 0.5
        self.run(faults)

    def run(self, faults: Faults) -> None:
        """Run the process with these faults, which all clusters and the database share."""
        self.faults = faults
        self.services = {
            name: ServiceProcess(world, self.engine, faults, cluster=name, mover=LifeMover(self, name))
            for name, world in self.worlds.items()
        }
        self.database = self.services["local"].database

    def world(self) -> JobWorld:
        """Return any of the clusters."""
        return self.worlds[self.rng.choice(sorted(self.worlds))]

    async def live(self) -> None:
        """Go through the history."""
        for _ in range(TICKS):
            await self.clock.advance(self.rng.choice((0, 1, 5, 20)))
            self.go_wrong()
            with self.dying(), suppress(JobServiceError, IllegalStep):  # people ask for what cannot be had
                await self.happen()
            for name in self.services:
                with self.dying():
                    await self.look(name)
            for _ in range(self.rng.randrange(3)):
                for world in self.worlds.values():
                    world.play()
        await self.rest()

    def go_wrong(self) -> None:
        """Take away or give back what the service needs: a cluster, the database, its time."""
        for world in self.worlds.values():
            if self.rng.random() < (0.5 if world.is_gone else 0.05):
                world.is_gone = not world.is_gone
                self.outages += 1
        if self.rng.random() < 0.05:
            self.faults.loss = self.rng.choice(LOSSES)
        if self.rng.random() < 0.05:
            self.set_back_at = max(self.set_back_at or self.clock.now(), self.clock.now())
            self.clock._start -= timedelta(seconds=self.rng.randrange(BACK_SECONDS_MAX))

    async def look(self, cluster: str) -> None:
        """Look at all jobs of a cluster, or, because its watch is cut, only at one that somebody asked about."""
        if self.rng.random() < 0.8:
            await self.services[cluster].resync()
        elif self.submitted:
            await self.services[cluster].look_at(self.submitted[self.rng.choice(sorted(self.submitted))])

    async def rest(self) -> None:
        """Let faults stop and everything that can end do so; the world goes on for good."""
        self.run(Faults())
        for world in self.worlds.values():
            world.plays = world.is_gone = False
            for name in list(world.holds):
                world.admit(name)
            for _, one in world.of_kind("Job"):
                world.admit(one["metadata"]["name"])
        for _ in range(REST_TICKS):
            await self.clock.advance(60)
            for cluster in sorted(self.draining):
                self.drain(cluster)
            before = [dict(world.server.objects) for world in self.worlds.values()]
            active = [job_id for name in self.worlds for job_id in await self.settle(name)]
            for job_id in active:
                with suppress(JobServiceError):  # most are not paused
                    now = self.clock.now()
                    await self.database.write(
                        lambda session, job_id=job_id, now=now: resume_job(session, job_id, now=now, actor="ann")
                    )
            if not active and not self.draining and before == [world.server.objects for world in self.worlds.values()]:
                return

    async def settle(self, cluster: str) -> Sequence[str]:
        """Let a cluster work and the service look at it; return its jobs that have not ended."""
        self.worlds[cluster].settle(4)
        await self.services[cluster].resync()
        return await self.database.read(lambda session: active_ids(session, cluster))

    @contextmanager
    def dying(self) -> Iterator[None]:
        """Start anew where the process dies; what is not answered is tried again at the next tick."""
        try:
            yield
        except ServiceKilled:
            self.kills += 1
            self.start()
        except (KubeError, OperationalError):
            pass

    async def happen(self) -> None:
        """Do one thing that people, Kueue or chance do."""
        act = self.rng.choice(ACTS)
        name = f"job-{self.rng.randrange(6)}"
        if act == "submit":
            await self.submit(name)
        elif act in ASKED and self.submitted:
            job_id, now = self.submitted[self.rng.choice(sorted(self.submitted))], self.clock.now()
            asked = ASKED[act]
            await self.database.write(lambda session: asked(session, job_id, now=now, actor="ann"))
        elif act == "suspend":
            self.world().suspend(name, reason=self.rng.choice(("Preempted", "PodsReadyTimeout")))
        elif act == "admit":
            self.world().admit(name)
        elif act == "drain" and len(self.worlds) > 1:
            self.drain(self.rng.choice(sorted(self.worlds)))
        elif act == "delete" and self.rng.random() < 0.3:
            world = self.world()
            for _, one in world.of_kind("Job", "Deployment"):
                if one["metadata"]["name"] == name:
                    self.deleted_by_hand[one["metadata"]["labels"][job_names.JOB_ID]] += 1
            world.delete_by_hand(name)

    def drain(self, cluster: str) -> None:
        """Drain a cluster, or undo that, unless a job is on its way out of it, as the service refuses that."""
        if cluster not in self.draining:
            self.draining.add(cluster)
        elif not self.is_leaving(cluster):
            self.draining.remove(cluster)

    def is_leaving(self, cluster: str) -> bool:
        """Return whether a job is on its way out of a cluster."""
        with Session(self.engine) as session:
            return any(MOVING in get_job(session, one).message for one in active_ids(session, cluster))

    async def submit(self, name: str) -> None:
        """Submit a job, with the key of an earlier request or a new one; repeat it until it is answered."""
        key = f"{name}-{self.rng.randrange(3)}"
        policy: dict[str, Any] = {"max_retries": self.rng.randrange(3), "retry_delay_seconds": self.rng.choice((0, 30))}
        if self.rng.random() < 0.2:
            policy["deadline"] = (self.clock.now() + timedelta(seconds=self.rng.randrange(1, 900))).isoformat()
        kind = self.rng.choice(("batch", "training", "service"))
        if kind == "service":
            policy["max_runtime"] = 600
        cluster = self.rng.choice(sorted(self.worlds))
        self.worlds[cluster].fates[name] = self.rng.choice(FATES)
        if self.rng.random() < 0.3:
            self.worlds[cluster].holds.add(name)
        job_id = str(UUID(int=self.rng.getrandbits(128), version=4))
        new = replace(new_job(name, key=key, job_type=kind, policy=policy, ext_ml_gpu_count=1), cluster_id=cluster)
        record, _ = await self.database.write(lambda session: create_job(session, new, self.clock.now(), job_id=job_id))
        assert self.submitted.setdefault(key, record.id) == record.id, "one key made two jobs"

    # What must hold

    def check_always(self) -> None:
        """No job has two objects that run pods, in any clusters, nor more than tries and deletions by hand allow."""
        made = Counter((job_id, attempt) for world in self.worlds.values() for _, job_id, attempt in world.created)
        for (job_id, _), count in made.items():
            assert count <= 1 + self.deleted_by_hand[job_id], f"job {job_id} was created {count} times in one try"

    async def check_at_rest(self) -> None:
        """Records and cluster agree."""
        with Session(self.engine) as session:
            page = list_jobs(session, JobFilter(None, None), page=1, page_size=200)
            records = {record.id: record for record in page.records}
            histories = {job_id: list_events(session, job_id, page=1, page_size=200)[0] for job_id in records}
        assert set(self.submitted.values()) <= set(records), "a job that was answered is lost"
        for job_id, record in records.items():
            assert JobState(record.state) in ENDED, f"{record.name} is {record.state}: {record.message}"
            self.check_record(record)
            whats = [one.what for one in histories[job_id]]
            if JobStep.VANISH in whats:
                told = f"{record.name} is taken for lost, and nobody deleted it: {whats}"
                assert self.deleted_by_hand[job_id] or self.is_before_again(record), told
            self.check_replay(record, whats)
        for cluster, world in self.worlds.items():
            for path, one in world.server.objects.items():
                if one["kind"] not in ("Workload", "PersistentVolumeClaim"):
                    whose = records.get(one["metadata"]["labels"][job_names.JOB_ID])
                    assert whose is not None, f"{path} has no record"
                    assert whose.cluster_id == cluster, (
                        f"{path} was left in {cluster}: its job is in {whose.cluster_id}"
                    )

    def is_before_again(self, record: JobRecord) -> bool:
        """Return whether a job's deadline had passed before the clock went back: the service may have stopped the job
        then, died, and come back before the deadline, to a job without objects."""
        deadline = record.document["policy"].get("deadline")
        if deadline is None or self.set_back_at is None:
            return False
        return datetime.fromisoformat(deadline) <= self.set_back_at

    def check_record(self, record: JobRecord) -> None:
        """Nothing in the cluster contradicts how a job ended."""
        mine = [
            one
            for world in self.worlds.values()
            for _, one in world.of_kind("Job", "Deployment", "Pod", "GpuClaim")
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

    seeds = range(max(1, HISTORIES // 20))
    kills = histories(engine, seeds)

    engine.dispose()
    assert kills > len(seeds) // 3
