"""The tables of pipelines: migrations give what the records say, beside the jobs' tables, and can be taken back."""

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from jobs.database import Database, engine_of, migrate
from pipelines.records import PIPELINE_TABLES, PipelineBase


def test_migrations_give_the_tables_of_the_records(database: Database, database_url: str) -> None:
    """Nothing is left to change; down and up again works, and the jobs' tables stay."""
    engine = engine_of(database_url)
    names = set(PipelineBase.metadata.tables)
    with engine.connect() as connection:
        options = {"include_name": lambda name, kind, _parents: kind != "table" or name in names}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, PipelineBase.metadata) == []
    migrate(database_url, revision="base", migrations=PIPELINE_TABLES)
    assert not names & set(inspect(engine).get_table_names())
    assert "jobs" in inspect(engine).get_table_names()
    migrate(database_url, migrations=PIPELINE_TABLES)
    engine.dispose()
