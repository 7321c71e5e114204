"""Schema migrations of pipelines, in order; `pipelines.records.migrate_pipelines` runs them with alembic."""
