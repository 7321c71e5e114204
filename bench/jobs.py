"""Load on the job service: 10,000 recorded jobs, 1,000 of them active on three clusters, on SQLite and PostgreSQL.

Clusters are API servers in memory, because real ones take minutes for as many Jobs; requests pass no socket.
Prints, for each database, the time of a submission, of one whose cluster the service chooses, of a page of the list and
of the page's look (p50, p99), the time to create the objects of all active jobs and to look at all of them again, SQL
statements and CPU of each, and the memory of the process. On PostgreSQL two more processes then submit and list at
once, as two replicas do. A refused request fails the run.

    python -m bench.jobs --jobs 10000 --active 1000 --database postgresql
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from uuid import uuid4

import structlog
from sqlalchemy import event
from sqlalchemy.orm import Session

from atoll.jobs.permissions import JobCaller, TenantGrant, TenantRole
from jobs.cluster_store import ClusterTerms, register_cluster
from jobs.database import Database, opened
from jobs.page.board import read_board
from jobs.settings import JobServiceSettings
from jobs.store import create_job
from tests.explain.situations import situation
from tests.fakes.clock import ManualClock
from tests.fakes.postgres import postgres
from tests.jobservice.made import NOW, new_job
from tests.jobservice.service import JobService
from tests.jobservice.world import JobWorld, ServiceProcess

CLUSTERS = ("local", "east", "west")
AT_ONCE = 16
READS = 100
CHOSEN = 50
NODES = 50
BATCH = 50
"""PostgreSQL slows down beyond 64 savepoints in a transaction, and every new job takes one."""
REPLICAS = 2
REPLICA_SUBMISSIONS = 200
CALLER = JobCaller("ann", (TenantGrant(TenantRole.MEMBER, "acme", None),))
UNLIMITED = JobServiceSettings.model_validate(
    {"access": "/nowhere", "requests_per_second": 10_000, "requests_burst": 100_000}
)


def record_ended(database: Database, count: int) -> None:
    """Record jobs that have ended."""
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        with Session(database._engine) as session, session.begin():
            for number in numbers:
                record, _ = create_job(session, new_job(f"old-{number}"), NOW, job_id=str(uuid4()))
                record.state, record.ended_at, record.actual_micros = "succeeded", NOW, 0
                record.cluster_id = CLUSTERS[number % len(CLUSTERS)]


@dataclass
class JobLoad:
    """One database under load, and what was measured."""

    database: Database
    service: JobService
    statements: int = 0
    refused: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine = self.database._engine
        event.listen(engine, "before_cursor_execute", self._count)
        machines = situation({f"n{n}": {} for n in range(NODES)}).snapshot
        self.service.links.snapshots.update(dict.fromkeys(CLUSTERS, machines))
        for name in CLUSTERS[1:]:
            self.service.links.worlds[name] = JobWorld()
            terms = ClusterTerms(kubeconfig=f"file:{name}")
            with Session(engine) as session, session.begin():
                register_cluster(session, name, terms, now=NOW, actor="bench")

    def _count(self, *_told: object) -> None:
        self.statements += 1

    async def time(self, name: str, calls: Iterable[Callable[[], Awaitable[bool]]], *, at_once: int = 1) -> None:
        """Carry out calls and note their times, and the statements of each."""
        times, rest, before, began = list[float](), iter(calls), self.statements, time.process_time()

        async def work() -> None:
            for call in rest:
                start = time.perf_counter()
                self.refused += not await call()
                times.append(time.perf_counter() - start)

        await asyncio.gather(*(work() for _ in range(at_once)))
        seconds = time.process_time() - began
        times.sort()
        self.figures |= {
            f"{name}_p50_ms": 1000 * times[len(times) // 2],
            f"{name}_p99_ms": 1000 * times[len(times) * 99 // 100],
            f"{name}_cpu_ms": 1000 * seconds / len(times),
            f"{name}_statements": (self.statements - before) / len(times),
        }

    def submission(self, number: int, cluster: str) -> Callable[[], Awaitable[bool]]:
        """Return the call that submits a job."""
        job = {
            "name": f"job-{number}",
            "job_type": "batch",
            "container": {"image": "busybox:1"},
            "ext_ml_gpu_count": 1,
            "intent": {"expected_duration_hint": 60},
        }

        async def call() -> bool:
            answer = await self.service.call("POST", f"/api/clusters/{cluster}/jobs", by="ann", json=job)
            return answer.status_code == 201

        return call

    def reading(self, path: str, by: str = "ann") -> Callable[[], Awaitable[bool]]:
        """Return the call that reads a path."""

        async def call() -> bool:
            return (await self.service.call("GET", path, by=by)).status_code == 200

        return call

    async def list(self, jobs: int) -> None:
        """Read pages from everywhere in the list."""
        pages = (
            f"/api/clusters/auto/jobs?page={1 + number * 7 % (jobs // 50)}&page_size=50" for number in range(READS)
        )
        await self.time("list", map(self.reading, pages))

    async def look(self) -> bool:
        """Read what the page shows."""
        await self.database.read(lambda session: read_board(session, CALLER, NOW))
        return True

    async def reconcile(self, name: str) -> None:
        """Look at every active job of every cluster, one cluster after another, and note the time."""
        before, began, used, jobs = self.statements, time.perf_counter(), time.process_time(), 0
        for cluster in CLUSTERS:
            world = self.service.links.worlds[cluster]
            world.clock = ManualClock(NOW)
            process = ServiceProcess(world, self.database._engine, cluster=cluster)
            await process.resync()
            jobs += len(process.waits)
            world.ends = False
            world.settle(2)
        seconds = time.perf_counter() - began
        self.figures |= {
            f"{name}_seconds": seconds,
            f"{name}_cpu_ms_per_job": 1000 * (time.process_time() - used) / max(1, jobs),
            f"{name}_statements_per_job": (self.statements - before) / max(1, jobs),
        }


async def measure(url: str, jobs: int, active: int) -> dict[str, float]:
    """Return the figures of one database."""
    database = opened(url)
    async with JobService.of(database, settings=UNLIMITED) as service:
        load = JobLoad(database, service)
        record_ended(database, jobs - active)
        submissions = (load.submission(number, CLUSTERS[number % len(CLUSTERS)]) for number in range(active))
        await load.time("submit", submissions, at_once=AT_ONCE)
        for name in ("create", "admit", "follow"):
            await load.reconcile(name)
        await load.list(jobs)
        await load.time("show_clusters", (load.reading("/api/clusters", by="ops") for _ in range(READS // 10)))
        await load.time("look", (load.look for _ in range(READS // 10)))
        await load.time("choose", (load.submission(active + number, "auto") for number in range(CHOSEN)))
    database.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    replicas = await run_replicas(url, jobs) if url.startswith("postgresql") else {}
    return {
        "jobs": float(jobs),
        "active": float(active),
        "refused": load.refused + replicas.get("replica_refused", 0.0),
        **load.figures,
        **replicas,
        "memory_mb": memory,
    }


async def run_replicas(url: str, jobs: int) -> dict[str, float]:
    """Return the worse figure of the replicas, which submit and list at once, each a process."""
    arguments = ("-m", "bench.jobs", "--jobs", str(jobs), "--replica-url", url, "--replica")
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, *arguments, str(number), stdout=asyncio.subprocess.PIPE)
        for number in range(REPLICAS)
    ]
    answers = [json.loads((await one.communicate())[0]) for one in processes]
    return {f"replica_{key}": max(one[key] for one in answers) for key in answers[0]}


async def replica(url: str, number: int, jobs: int) -> dict[str, float]:
    """Return the figures of one of several processes on the same database."""
    database = opened(url)
    async with JobService.of(database, settings=UNLIMITED) as service:
        load = JobLoad(database, service)
        first = 10**6 * (1 + number)
        submissions = (
            load.submission(first + one, CLUSTERS[one % len(CLUSTERS)]) for one in range(REPLICA_SUBMISSIONS)
        )
        await load.time("submit", submissions, at_once=AT_ONCE)
        await load.list(jobs)
    database.close()
    return {"refused": float(load.refused), **load.figures}


def main() -> int:
    """Measure both databases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--active", type=int, default=1000)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append", help="both by default")
    parser.add_argument("--replica-url", help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    if options.replica is not None:
        print(json.dumps(asyncio.run(replica(options.replica_url, options.replica, options.jobs))))
        return 0
    refused = 0.0
    with tempfile.TemporaryDirectory() as folder, postgres() as server:
        urls = {"sqlite": f"sqlite:///{folder}/jobs.db", "postgresql": server}
        for name in options.database or urls:
            url = urls[name]
            figures = asyncio.run(measure(url, options.jobs, options.active))
            print(name, json.dumps({key: round(value, 2) for key, value in figures.items()}, indent=1))
            refused += figures["refused"]
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
