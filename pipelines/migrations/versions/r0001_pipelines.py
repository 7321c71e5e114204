"""Pipelines, their runs and the steps of these.

Revision: p0001
"""

import sqlalchemy as sa
from alembic import op

revision = "p0001"
down_revision = None


MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables."""
    _create_pipelines()
    _create_runs()
    _create_steps()


def _create_pipelines() -> None:
    op.create_table(
        "pipelines",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(63)),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("runs_begun", sa.Integer, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pipelines"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_pipelines_tenant_id_name"),
    )


def _create_runs() -> None:
    op.create_table(
        "pipeline_runs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("pipeline_id", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("cause", sa.String(256), nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("idempotency_key", sa.String(512)),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("inputs", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("rerun_of", sa.String(36)),
        sa.Column("cancel_requested_at", MOMENT),
        sa.Column("cancel_requested_by", sa.String(256)),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("ended_at", MOMENT),
        sa.Column("version", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pipeline_runs"),
        sa.ForeignKeyConstraint(
            ["pipeline_id"], ["pipelines.id"], name="fk_pipeline_runs_pipeline_id_pipelines", ondelete="CASCADE"
        ),
        sa.UniqueConstraint("pipeline_id", "idempotency_key", name="uq_pipeline_runs_pipeline_id_idempotency_key"),
        sa.UniqueConstraint("pipeline_id", "number", name="uq_pipeline_runs_pipeline_id_number"),
    )
    op.create_index("ix_pipeline_runs_state", "pipeline_runs", ["state"])


def _create_steps() -> None:
    op.create_table(
        "pipeline_steps",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("key", sa.String(63), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("output", sa.JSON, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("skip_cause", sa.String(64)),
        sa.Column("is_stopping", sa.Boolean, nullable=False),
        sa.Column("job_id", sa.String(36)),
        sa.Column("not_before", MOMENT),
        sa.Column("started_at", MOMENT),
        sa.Column("ended_at", MOMENT),
        sa.PrimaryKeyConstraint("run_id", "key", name="pk_pipeline_steps"),
        sa.ForeignKeyConstraint(
            ["run_id"], ["pipeline_runs.id"], name="fk_pipeline_steps_run_id_pipeline_runs", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    """Drop the tables, with every record."""
    for table in ("pipeline_steps", "pipeline_runs", "pipelines"):
        op.drop_table(table)
