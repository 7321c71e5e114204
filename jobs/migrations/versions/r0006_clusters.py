"""Clusters, and why a job runs in its cluster.

Revision: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table and the column; the service registers its own cluster at start."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "clusters",
        sa.Column("id", sa.String(63), nullable=False),
        sa.Column("kubeconfig", sa.String(512), nullable=False),
        sa.Column("region", sa.String(63), nullable=False),
        sa.Column("tenants", sa.JSON(), nullable=False),
        sa.Column("prices", sa.JSON(), nullable=False),
        sa.Column("latency_ms", sa.Float(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("changed_by", sa.String(256), nullable=False),
        sa.Column("changed_at", moment, nullable=False),
        sa.Column("checked_at", moment),
        sa.Column("trouble", sa.Text(), nullable=False),
        sa.Column("capacity", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_clusters"),
    )
    op.add_column("jobs", sa.Column("choice", sa.JSON()))


def downgrade() -> None:
    """Drop them. Jobs stay in their clusters; an older service only sees those of its own."""
    op.drop_column("jobs", "choice")
    op.drop_table("clusters")
