"""The number of SQL statements of what is done again and again does not grow with the number of jobs."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from jobs.database import Database, engine_of, migrate
from jobs.store import create_job
from tests.jobservice.made import NOW, new_job
from tests.jobservice.service import JobService
from tests.jobservice.world import JobWorld, ServiceProcess

FEW, MANY = 3, 30


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An empty database."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    migrate(url)
    found = engine_of(url)
    yield found
    found.dispose()


class StatementCount:
    """How many statements an engine has executed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.count = 0
        event.listen(engine, "before_cursor_execute", self._add)

    def _add(self, *_told: object) -> None:
        self.count += 1

    def record(self, first: int, last: int) -> None:
        """Record jobs."""
        with Session(self.engine) as session, session.begin():
            for number in range(first, last):
                job_id = f"{number:08d}-0000-4000-8000-000000000000"
                create_job(session, new_job(f"job-{number}", ext_ml_gpu_count=1), NOW, job_id=job_id)

    async def of(self, call: Callable[[], Awaitable[object]]) -> int:
        """Return how many statements a call takes."""
        before = self.count
        await call()
        return self.count - before


async def test_a_sweep_reads_the_records_of_all_objects_at_once(engine: Engine) -> None:
    """With ten times as many jobs in the cluster it asks the database as often."""
    counted, service = StatementCount(engine), ServiceProcess(JobWorld(), engine)
    found = []
    for first, last in ((0, FEW), (FEW, MANY)):
        counted.record(first, last)
        await service.resync()
        found.append(await counted.of(service.reconciler.sweep))
        assert len(await service.reconciler.sweep()) == last

    assert found[0] == found[1]


@pytest.mark.parametrize(("path", "by"), [("", "ops"), ("/auto/jobs?page_size=200", "ann"), ("/local/schedule", "ann")])
async def test_lists_take_as_many_statements_for_many_jobs(engine: Engine, path: str, by: str) -> None:
    """Clusters with the counts of their jobs, jobs, and the time line."""
    counted, found = StatementCount(engine), []
    async with JobService.of(Database(engine)) as service:
        for first, last in ((0, FEW), (FEW, MANY)):
            counted.record(first, last)
            found.append(await counted.of(lambda: service.call("GET", f"/api/clusters{path}", by=by)))

    assert found[0] == found[1]
