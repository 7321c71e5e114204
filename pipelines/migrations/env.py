"""How alembic runs a migration of pipelines: on the connection that it is given, in that connection's transaction."""

from alembic import context

from pipelines.records import PIPELINE_TABLES, PipelineBase

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=PipelineBase.metadata,
    render_as_batch=True,
    version_table=PIPELINE_TABLES.version_table,
)
context.run_migrations()
