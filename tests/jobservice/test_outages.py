"""The database goes away and comes back, clocks are set back, and a backup is restored: no job is lost or doubled."""

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from jobs.database import Database, engine_of, migrate, opened
from jobs.records import JobRecord
from jobs.store import create_job, get_job
from tests.fakes.postgres import PostgresServer, postgres_server
from tests.jobservice.made import new_job
from tests.jobservice.service import JOBS, JobService
from tests.jobservice.world import JobWorld, ServiceProcess

FIRST_ID, SECOND_ID = (f"{number}9999999-0000-4000-8000-000000000000" for number in (1, 2))


class Outage:
    """A world, a service and its database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.world = JobWorld()
        self.world.plays = False
        self.service = ServiceProcess(self.world, engine)

    def give(self, job_id: str, name: str) -> None:
        """Record a job."""
        with Session(self.engine) as session, session.begin():
            create_job(session, new_job(name), self.world.clock.now(), job_id=job_id)

    async def live(self, rounds: int = 6) -> None:
        """Let cluster and service work in turns."""
        for _ in range(rounds):
            await self.service.resync()
            self.world.play()

    def record(self, job_id: str) -> JobRecord:
        """Return a record."""
        with Session(self.engine) as session:
            return get_job(session, job_id)


async def test_while_postgresql_is_gone_for_a_minute_requests_are_refused_and_jobs_go_on() -> None:
    """503 with a hint to try again; afterwards the service knows what its jobs did in the meantime."""
    with postgres_server() as server:
        database = opened(server.url)
        async with JobService.of(database) as service:
            outage = Outage(database._engine)
            made = (await service.submit()).json()
            await outage.live(3)
            running = outage.record(made["id"]).state
            server.stop()
            statuses = set()
            for _ in range(6):
                await outage.world.clock.advance(10)
                statuses.add((await service.call("GET", f"{JOBS}/{made['id']}")).status_code)
                with pytest.raises(Exception, match="connection"):
                    await outage.service.resync()
                outage.world.play()
            refused = await service.submit("other")
            server.start()
            await outage.live(2)
            shown = (await service.call("GET", f"{JOBS}/{made['id']}")).json()
            again = await service.submit("other")
        database.close()

    assert running == "running"
    assert statuses == {503}
    assert (refused.status_code, refused.json()["type"], refused.headers["Retry-After"]) == (
        503,
        "urn:atoll:unavailable",
        "2",
    )
    assert shown["status"] == "succeeded"
    assert again.status_code == 201
    assert Counter(kind for kind, _, _ in outage.world.created) == {"Job": 1}


async def test_a_clock_that_is_set_back_loses_no_job(tmp_path: Path) -> None:
    """An hour back while a job runs: it neither fails nor starts again, and ends as it should."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    migrate(url)
    outage = Outage(engine_of(url))
    outage.give(FIRST_ID, "tune")
    await outage.live(2)
    outage.world.clock._start -= timedelta(hours=1)
    outage.give(SECOND_ID, "other")
    await outage.live()
    first, second = outage.record(FIRST_ID), outage.record(SECOND_ID)
    outage.engine.dispose()

    assert (first.state, first.attempt, second.state) == ("succeeded", 1, "succeeded")
    assert Counter(job_id for _, job_id, _ in outage.world.created) == {FIRST_ID: 1, SECOND_ID: 1}


def sqlite_backup(path: Path, _server: PostgresServer | None) -> tuple[str, Callable[[], None], Callable[[], None]]:
    """Return the URL of a database, and how docs/job-service.md backs it up and restores it."""
    live, copy = path / "jobs.db", path / "copy.db"

    def back_up() -> None:
        with closing(sqlite3.connect(live)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)  # what `sqlite3 FILE ".backup COPY"` calls

    def restore() -> None:
        for suffix in ("-wal", "-shm"):
            live.with_name(live.name + suffix).unlink(missing_ok=True)
        shutil.copy(copy, live)

    return f"sqlite:///{live}", back_up, restore


def postgres_backup(path: Path, server: PostgresServer | None) -> tuple[str, Callable[[], None], Callable[[], None]]:
    """Return the same for PostgreSQL, with its own programs."""
    assert server is not None
    path.chmod(0o777)
    file, where = str(path / "jobs.dump"), (*server.client_options(), "-d", "postgres")

    def back_up() -> None:
        server.run("pg_dump", *where, "-Fc", "-f", file)

    def restore() -> None:
        server.run("pg_restore", *where, "--clean", "--if-exists", "--single-transaction", file)

    return server.url, back_up, restore


@pytest.mark.parametrize("way", [sqlite_backup, postgres_backup])
async def test_a_restored_backup_agrees_with_the_cluster_again(tmp_path: Path, way: Any) -> None:
    """A job that ran at the time of the backup is followed to its end; objects of a job that was submitted later have
    no record any more, and are removed: nothing runs unseen."""
    with postgres_server() as server:
        url, back_up, restore = way(tmp_path, server)
        database: Database = opened(url)
        before = Outage(database._engine)
        before.give(FIRST_ID, "tune")
        await before.live(2)
        back_up()
        before.give(SECOND_ID, "later")
        await before.service.resync()
        before.world.play()
        names = {one["metadata"]["name"] for _, one in before.world.of_kind("Job")}
        database.close()
        restore()
        database = opened(url)
        after = Outage(database._engine)
        after.world, after.service = before.world, ServiceProcess(before.world, database._engine)
        await after.live()
        record, left = after.record(FIRST_ID), {one["metadata"]["name"] for _, one in after.world.of_kind("Job")}
        database.close()

    assert names == {"tune", "later"}
    assert (record.state, record.attempt) == ("succeeded", 1)
    assert left == {"tune"}
    assert Counter(job_id for _, job_id, _ in after.world.created) == {FIRST_ID: 1, SECOND_ID: 1}
