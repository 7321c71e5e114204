"""How alembic runs a migration: on the connection that is handed over, in its transaction.

Foreign keys are off on SQLite meanwhile: a table that is made anew would take its children's rows with it.
"""

from alembic import context

from jobs.records import RecordBase

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=RecordBase.metadata, render_as_batch=True)
context.run_migrations()
