"""Fixtures: databases with the tables of jobs and of pipelines."""

from collections.abc import Iterator

import pytest

from jobs.database import Database, opened
from pipelines.records import migrate_pipelines
from tests.jobservice.conftest import database_url, postgres_server

__all__ = ["database_url", "postgres_server"]


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Yield a database with tables."""
    found = opened(database_url)
    migrate_pipelines(database_url)
    yield found
    found.close()
