"""How alembic runs a migration: on the connection that it is given, in that connection's transaction.

Foreign keys are off on SQLite during a migration: recreating a table would delete the rows that refer to it.
"""

from alembic import context

from jobs.records import RecordBase

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=RecordBase.metadata, render_as_batch=True)
context.run_migrations()
