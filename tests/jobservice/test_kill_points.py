"""The service is killed at every write of a job's lifecycle, before or after it is carried out, and restarted.

The job is created, killed for its memory, retried, paused, resumed, and cancelled while it runs. The process is killed
at each write to the database or the API server in turn; the job always ends the same.
"""

from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from atoll.jobs.states import JobState
from jobs.database import engine_of, migrate
from jobs.records import JobRecord
from jobs.store import ask_to_cancel, ask_to_pause, create_job, get_job, list_events, resume_job
from tests.jobservice.made import new_job
from tests.jobservice.world import Faults, JobWorld, ServiceKilled, ServiceProcess

JOB_ID = "99999999-0000-4000-8000-000000000000"
WRITES_MIN = 15
ROUNDS = 12


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A database for all points, of each kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('records')}/jobs.db"
    else:
        url = request.getfixturevalue("postgres_server")
    migrate(url)
    return engine_of(url)


class KilledLife:
    """The life of one job, and a service that dies at one point of it."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self.engine = engine
        self.world = JobWorld()
        self.world.plays = False
        self.service = ServiceProcess(self.world, engine, faults)
        self.deaths = 0

    def record(self) -> JobRecord:
        """Return the record as it is."""
        with Session(self.engine) as session:
            return get_job(session, JOB_ID)

    async def look(self) -> None:
        """Look at everything; start anew where the service dies."""
        for _ in range(2):
            try:
                await self.service.resync()
                return
            except ServiceKilled:
                self.deaths += 1
                self.service = ServiceProcess(self.world, self.engine)

    async def live(self) -> None:
        """Live the whole life."""
        new = new_job("tune", job_type="training", ext_ml_gpu_count=1, policy={"retry_delay_seconds": 5})
        with Session(self.engine) as session, session.begin():
            create_job(session, new, self.world.clock.now(), job_id=JOB_ID)
        self.world.fates["tune"] = "OOMKilled"
        for _ in range(ROUNDS):
            await self.look()
            self.world.play()
            if self.record().retry_count:
                self.world.fates["tune"] = ""
        self.world.plays = True  # the second try runs on for a while
        await self.world.clock.advance(5)
        for _ in range(3):
            await self.look()
            self.world.play()
        with Session(self.engine) as session, session.begin():
            ask_to_pause(session, JOB_ID, now=self.world.clock.now(), actor="ann")
        for _ in range(ROUNDS):
            await self.look()
            self.world.play()
        with Session(self.engine) as session, session.begin():
            resume_job(session, JOB_ID, now=self.world.clock.now(), actor="ann")
        for _ in range(3):
            await self.look()
            self.world.play()
        with Session(self.engine) as session, session.begin():
            ask_to_cancel(session, JOB_ID, now=self.world.clock.now(), actor="ann")
        for _ in range(ROUNDS):
            await self.look()
            self.world.play()


async def life(engine: Engine, faults: Faults) -> KilledLife:
    """Live a life in an empty database."""
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM jobs")
    life = KilledLife(engine, faults)
    await life.live()
    return life


async def test_a_life_ends_the_same_wherever_the_service_dies(engine: Engine) -> None:
    """Cancelled after one retry and one pause, one Job for each try, and nothing left in the cluster."""
    whole = await life(engine, Faults())
    points = whole.service.faults.writes
    assert points >= WRITES_MIN

    for number in range(points):
        for is_after in (False, True):
            lived = await life(engine, Faults(kill_at=number, kill_after=is_after))
            record, where = lived.record(), f"write {number}, {'after' if is_after else 'before'}"
            with Session(engine) as session:
                events, _ = list_events(session, JOB_ID, page=1, page_size=200)
            told = [one.what for one in events]

            assert lived.deaths == 1, where
            assert (record.state, record.retry_count, record.attempt) == (JobState.CANCELLED, 1, 3), where
            assert Counter(lived.world.created) == Counter(("Job", JOB_ID, attempt) for attempt in "123"), where
            assert not lived.world.server.objects, where
            assert [told.count(what) for what in ("submit", "retry", "pause", "cancel")] == [3, 1, 1, 1], where
