"""Jobs and their events.

Revision: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

NOT_ENDED = sa.text("state NOT IN ('cancelled', 'failed', 'succeeded')")


def upgrade() -> None:
    """Create the tables."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("cluster_id", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(63)),
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("job_type", sa.String(16), nullable=False),
        sa.Column("source_type", sa.String(16), nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("idempotency_key", sa.String(512)),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("retry_count", sa.Integer, nullable=False),
        sa.Column("preemption_count", sa.Integer, nullable=False),
        sa.Column("not_before", moment),
        sa.Column("cancel_requested_at", moment),
        sa.Column("cancel_requested_by", sa.String(256)),
        sa.Column("workload_uid", sa.String(64)),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("updated_at", moment, nullable=False),
        sa.Column("started_at", moment),
        sa.Column("ended_at", moment),
        sa.Column("version", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name="uq_jobs_tenant_id_idempotency_key"),
    )
    op.create_index(
        "uq_jobs_active_name",
        "jobs",
        ["cluster_id", "namespace", "name"],
        unique=True,
        sqlite_where=NOT_ENDED,
        postgresql_where=NOT_ENDED,
    )
    op.create_index("ix_jobs_tenant_id_created_at_id", "jobs", ["tenant_id", "created_at", "id"])
    op.create_index("ix_jobs_cluster_id_state", "jobs", ["cluster_id", "state"])
    op.create_table(
        "job_events",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("at", moment, nullable=False),
        sa.Column("what", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_job_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id_jobs", ondelete="CASCADE"),
    )
    op.create_index("ix_job_events_job_id_id", "job_events", ["job_id", "id"])


def downgrade() -> None:
    """Drop the tables, with every record."""
    op.drop_table("job_events")
    op.drop_table("jobs")
