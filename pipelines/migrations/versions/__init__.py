"""Schema migrations, in order; `jobs.database.migrate` runs them with alembic."""
