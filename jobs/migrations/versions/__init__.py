"""Changes of the tables, in order; alembic runs them by `jobs.database.migrate`."""
