"""The process is killed between database writes of runs with every type of step, and another one goes on.

Each finished step ran once, each job exists once, and the run ends as if nothing had happened.
"""

import asyncio
import itertools
import multiprocessing
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

from atoll.pipelines.words import ENDED_STEPS
from jobs.database import Database, engine_of, migrate
from jobs.records import JobRecord
from pipelines.durable import steps_url
from pipelines.records import RunRecord, StepRecord, migrate_pipelines
from tests.pipelines.made import step
from tests.pipelineservice import killed
from tests.pipelineservice.call_server import CallServer
from tests.pipelineservice.world import WAIT_SECONDS, EngineWorld

SEEDS = 500
DEFAULT = {("sqlite", 0), ("postgresql", 25)}
"""The first runs alone, the others beside another replica: about a minute on two cores that do other work too."""
RUNS_TOGETHER = 25
WRITES_PER_RUN = 80
"""Fewer than a run has, so that the process dies before the last run ends."""
KILLS = 2
JOBS = ("prepare", "train")
CUT_OFF = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name")


class Databases:
    """Makes databases with all tables, DBOS's among them, fast: as copies of one."""

    def __init__(self, folder: Path, server: str | None) -> None:
        self.folder, self.server, self.count = folder, server, 0
        self.base = self._create("base", None)
        migrate(self.base)
        migrate_pipelines(self.base)
        asyncio.run(self._warm())

    async def _warm(self) -> None:
        world = EngineWorld(Database(engine_of(self.base)), self.base)
        async with world.leading():
            await world.until_ended(await world.begin(step("a"), name="warm"))
        world.database.close()

    def _create(self, name: str, template: str | None) -> str:
        if self.server is None:
            return f"sqlite:///{self.folder}/{name}.db"
        engine = create_engine(self.server, isolation_level="AUTOCOMMIT")
        name = f"{name}{os.getpid()}"
        with engine.connect() as connection:
            if template:  # nobody may use it meanwhile, and a thread that was left may still hold a connection
                connection.execute(CUT_OFF, {"name": template})
            connection.execute(text(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else "")))
        engine.dispose()
        return self.server.replace("/postgres?", f"/{name}?")

    def fresh(self) -> str:
        """Return the URL of a copy."""
        self.count += 1
        url = self._create(f"copy{self.count}", f"base{os.getpid()}")
        if self.server is None:
            for one, other in ((self.base, url), (steps_url(self.base), steps_url(url))):
                shutil.copy(one.removeprefix("sqlite:///"), other.removeprefix("sqlite:///"))
        return url


@pytest.fixture(scope="module")
def made() -> dict[str, Databases]:
    """Return the makers of databases so far, by kind: pytest makes what has parameters anew for each test."""
    return {}


@pytest.fixture
def databases(
    request: pytest.FixtureRequest, made: dict[str, Databases], tmp_path_factory: pytest.TempPathFactory
) -> Databases:
    """Return a maker of databases, the same for all tests of its kind."""
    if request.param not in made:
        server = request.getfixturevalue("postgres_server") if request.param == "postgresql" else None
        made[request.param] = Databases(tmp_path_factory.mktemp("crashes"), server)
    return made[request.param]


class CrashStory:
    """Some runs in one database, and the processes that ran them."""

    def __init__(self, url: str, folder: Path, server: CallServer) -> None:
        self.url, self.server = url, server
        self.effects = folder / "effects"
        self.engine = engine_of(url)
        self.finished: dict[tuple[str, str], int] = {}

    def begin(self, count: int) -> None:
        """Record the runs."""
        world = EngineWorld(Database(self.engine), self.url)

        async def write() -> None:
            for number in range(count):
                steps = killed.every_type(self.server.url)
                await world.begin(*steps, name=f"p{number}", given={"n": 3}, inputs={"n": 0})

        asyncio.run(write())

    def live(self, replicas: int, kill_at: Iterator[int]) -> int:
        """Run replicas until one has led to the end, with a new one for each that dies; return how many died."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.pipelineservice.killed"])
        processes: list[ForkServerProcess] = []
        deaths = 0
        try:
            while True:
                while len(processes) < replicas:
                    processes.append(context.Process(target=killed.live, args=(self.url, self.effects, next(kill_at))))
                    processes[-1].start()
                ended = wait([one.sentinel for one in processes], killed.LIFE_SECONDS + WAIT_SECONDS)
                assert ended, "the runs do not end"
                first = next(one for one in processes if one.sentinel in ended)
                first.join()
                processes.remove(first)
                self.remember_finished()
                if first.exitcode == 0:
                    return deaths
                assert first.exitcode == killed.KILLED
                deaths += 1
        finally:
            for one in processes:
                one.kill()
                one.join()

    def effects_so_far(self) -> Counter[str]:
        """Return how often each try had its effect, by its idempotency key."""
        noted = self.effects.read_text().split() if self.effects.exists() else []
        return Counter([*noted, *self.server.calls])

    def remember_finished(self) -> None:
        """Check that no finished step had its effect again, and keep which have finished now."""
        with Session(self.engine) as session:
            ended = [(one.run_id, one.key) for one in session.scalars(select(StepRecord)) if one.state in ENDED_STEPS]
        effects = self.effects_so_far()  # read after the steps: another replica may go on meanwhile

        def count(run_id: str, key: str) -> int:
            return sum(effects[one] for one in effects if f"-step-{key}-run-{run_id}" in one)

        for one, known in self.finished.items():
            assert count(*one) == known, one
        self.finished = {one: count(*one) for one in ended}

    def check(self, deaths: int) -> None:
        """Check how everything ended."""
        effects = self.effects_so_far()
        with Session(self.engine) as session:
            runs = session.scalars(select(RunRecord).join(StepRecord).where(StepRecord.key == "tell")).unique().all()
            assert {(run.state, run.message) for run in runs} == {("succeeded", "")}
            for run in runs:
                steps = session.scalars(select(StepRecord).where(StepRecord.run_id == run.id)).all()
                assert {one.key for one in steps if one.state != "succeeded"} == {"no"}
                assert {one.attempt for one in steps} == {0, 1}
                for key in ("call", "left", "tell", "body[0]", "body[1]", "body[2]"):
                    count = sum(effects[one] for one in effects if f"-step-{key}-run-{run.id}" in one)
                    assert 1 <= count <= 1 + deaths, (run.id, key)
            jobs = Counter(one.idempotency_key for one in session.scalars(select(JobRecord)).all())
        assert jobs == {f"pipeline-{run.pipeline_id}-step-{name}-run-{run.id}": 1 for run in runs for name in JOBS}
        self.engine.dispose()


def kill_points(rng: random.Random) -> Iterator[int]:
    """Yield before which write each process is killed: some of them, and then none."""
    for _ in range(KILLS):
        yield rng.randint(1, RUNS_TOGETHER * WRITES_PER_RUN // KILLS)
    yield from itertools.repeat(0)


@pytest.mark.parametrize(
    ("databases", "seed"),
    [
        pytest.param(kind, seed, marks=[] if (kind, seed) in DEFAULT else [pytest.mark.long])
        for kind in ("sqlite", "postgresql")
        for seed in range(0, SEEDS, RUNS_TOGETHER)
    ],
    indirect=["databases"],
)
def test_a_killed_run_ends_the_same(databases: Databases, seed: int, tmp_path: Path) -> None:
    """Many runs at a time, each at another point of its life when the process dies; twice, and then to the end.

    Alone, or with another replica that takes over at once.
    """
    with CallServer() as server:
        story = CrashStory(databases.fresh(), tmp_path, server)
        story.begin(RUNS_TOGETHER)
        deaths = story.live(1 + seed // RUNS_TOGETHER % 2, kill_points(random.Random(seed)))

        assert deaths >= 1
        story.check(deaths)
