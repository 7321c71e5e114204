"""Estimates, pauses and budgets of jobs, and the ledger of GPU time.

Revision: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    """Add the columns and tables; jobs from before have no estimate, and GPU time counts from now on."""
    moment = sa.DateTime(timezone=True)
    for column in (
        sa.Column("pause_requested_at", moment),
        sa.Column("pause_requested_by", sa.String(256)),
        sa.Column("estimate", sa.JSON),
        sa.Column("estimated_micros", sa.BigInteger),
        sa.Column("actual_micros", sa.BigInteger),
        sa.Column("budget_mark", sa.String(64), nullable=False, server_default=""),
    ):
        op.add_column("jobs", column)
    _create_spans()
    _create_errors()


def _create_spans() -> None:
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "gpu_spans",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("cluster_id", sa.String(63), nullable=False),
        sa.Column("gpu", sa.String(96), nullable=False),
        sa.Column("node", sa.String(253), nullable=False),
        sa.Column("model", sa.String(63), nullable=False),
        sa.Column("use", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("user", sa.String(256), nullable=False),
        sa.Column("namespace", sa.String(63), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("pod_uid", sa.String(64), nullable=False),
        sa.Column("share_ppm", sa.Integer, nullable=False),
        sa.Column("price_micros", sa.BigInteger),
        sa.Column("held_since", moment),
        sa.Column("started_at", moment, nullable=False),
        sa.Column("ended_at", moment),
        sa.PrimaryKeyConstraint("id", name="pk_gpu_spans"),
    )
    op.create_index(
        "uq_gpu_spans_open", "gpu_spans", ["cluster_id", "gpu"], unique=True, sqlite_where=OPEN, postgresql_where=OPEN
    )
    op.create_index("ix_gpu_spans_cluster_id_ended_at", "gpu_spans", ["cluster_id", "ended_at"])
    op.create_index("ix_gpu_spans_job_id", "gpu_spans", ["job_id"])
    op.create_table(
        "usage_clocks",
        sa.Column("cluster_id", sa.String(63), nullable=False),
        sa.Column("seen_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("cluster_id", name="pk_usage_clocks"),
    )


def _create_errors() -> None:
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "estimate_errors",
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("cluster_id", sa.String(63), nullable=False),
        sa.Column("job_type", sa.String(16), nullable=False),
        sa.Column("gpu_type", sa.String(63), nullable=False),
        sa.Column("gpu_count", sa.Integer, nullable=False),
        sa.Column("seconds", sa.Integer, nullable=False),
        sa.Column("estimated_micros", sa.BigInteger, nullable=False),
        sa.Column("actual_micros", sa.BigInteger, nullable=False),
        sa.Column("error_ppm", sa.BigInteger, nullable=False),
        sa.Column("is_far", sa.Boolean, nullable=False),
        sa.Column("recorded_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_estimate_errors"),
    )
    op.create_index(
        "ix_estimate_errors_kind", "estimate_errors", ["cluster_id", "job_type", "gpu_type", "gpu_count", "recorded_at"]
    )


def downgrade() -> None:
    """Drop them. A paused job would be submitted again."""
    op.drop_table("estimate_errors")
    op.drop_table("usage_clocks")
    op.drop_table("gpu_spans")
    for name in (
        "budget_mark",
        "actual_micros",
        "estimated_micros",
        "estimate",
        "pause_requested_by",
        "pause_requested_at",
    ):
        op.drop_column("jobs", name)
