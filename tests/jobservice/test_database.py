"""The database: migrations up and down keep the records, and unsuitable databases give clear errors."""

from pathlib import Path
from uuid import uuid4

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from jobs.database import engine_of, migrate, opened
from jobs.errors import DatabaseUnfit
from jobs.records import RecordBase
from jobs.store import JobFilter, create_job, list_events, list_jobs, service_id
from tests.jobservice.made import NOW, new_job


def tables(engine: Engine) -> set[str]:
    """Return the tables, without alembic's own."""
    return set(inspect(engine).get_table_names()) - {"alembic_version"}


async def test_migrations_keep_records_on_the_way_down_and_up(database_url: str) -> None:
    """A job with its events survives a step down and up again; the end of the way down is an empty database."""
    database = opened(database_url)
    record, _ = await database.write(lambda session: create_job(session, new_job(), NOW, job_id=str(uuid4())))
    await database.write(lambda session: service_id(session, NOW))
    database.close()
    engine = engine_of(database_url)

    migrate(database_url, revision="0001")
    kept = tables(engine)
    database = opened(database_url)
    page = await database.read(lambda session: list_jobs(session, JobFilter("local", None), page=1, page_size=9))
    _, events = await database.read(lambda session: list_events(session, record.id, page=1, page_size=9))
    database.close()
    migrate(database_url, revision="base")

    assert kept == {"jobs", "job_events"}
    assert [one.id for one in page.records] == [record.id]
    assert events == 1
    assert tables(engine) == set()
    migrate(database_url)
    assert tables(engine) == set(RecordBase.metadata.tables)
    engine.dispose()


def test_migrations_make_what_the_code_expects(database_url: str) -> None:
    """Tables, columns, keys and indexes after all migrations are those of the mapped classes."""
    migrate(database_url)
    engine = engine_of(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, RecordBase.metadata) == []
    engine.dispose()


def test_a_second_start_finds_everything_done(database_url: str) -> None:
    """Migrations that are there already do nothing."""
    migrate(database_url)
    migrate(database_url)


def test_a_newer_database_is_left_alone(database_url: str) -> None:
    """Tables of a version that this one does not know are not touched, and it is said what to do."""
    migrate(database_url)
    engine = engine_of(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(DatabaseUnfit, match="has tables of revision 9999, which this Atoll does not know"):
        opened(database_url)
    assert "jobs" in tables(engine)
    engine.dispose()


def test_a_failed_migration_changes_nothing(database_url: str) -> None:
    """A table that is in the way stops the migration before anything is made."""
    engine = engine_of(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE job_events (id INTEGER)"))

    with pytest.raises(DatabaseUnfit, match="job_events"):
        migrate(database_url)
    assert tables(engine) == {"job_events"}
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://host/db", "mysql://host/db is neither sqlite nor postgresql"),
        ("nonsense", "the URL of the database cannot be read: write sqlite:///jobs.db"),
        ("sqlite:////nowhere/at/all/jobs.db", "cannot use sqlite:////nowhere/at/all/jobs.db: unable to open"),
        ("postgresql://ann:secret@127.0.0.1:1/db", "cannot use postgresql+psycopg://ann:***@127.0.0.1:1/db: "),
    ],
)
def test_a_database_that_cannot_be_used_is_told_without_its_password(url: str, told: str) -> None:
    """What is wrong is one line that a person can act on."""
    with pytest.raises(DatabaseUnfit) as refused:
        opened(url)

    assert str(refused.value).startswith(told)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sqlite_readers_do_not_wait_and_keys_hold(tmp_path: Path) -> None:
    """The pragmas that the service counts on are set on every connection."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    migrate(url)
    engine = engine_of(url)
    with engine.connect() as connection:
        told = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")]
    engine.dispose()

    assert told == ["wal", 1]
