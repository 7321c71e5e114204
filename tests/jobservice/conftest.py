"""Fixtures: databases of both kinds, SQLite in a file and a real PostgreSQL, and a service over the first."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text

from jobs.database import Database, opened
from tests.fakes.postgres import postgres
from tests.jobservice.service import JobService


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Yield a PostgreSQL server for all tests of a process."""
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of an empty database, once per kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.db"
        return
    server, name = request.getfixturevalue("postgres_server"), f"t{uuid4().hex[:12]}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield server.replace("/postgres?", f"/{name}?")
    with engine.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Yield a database with tables."""
    found = opened(database_url)
    yield found
    found.close()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[JobService]:
    """Yield the API over SQLite and a cluster in memory, without jobs."""
    database = opened(f"sqlite:///{tmp_path}/jobs.db")
    async with JobService.of(database) as service:
        yield service
    database.close()
