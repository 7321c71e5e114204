"""The file of queues of each cluster, and the queue that the service chose for a job.

Revision: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table and the column."""
    op.create_table(
        "queue_files",
        sa.Column("cluster_id", sa.String(63), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("applied_by", sa.String(256), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("checked_generation", sa.Integer(), nullable=False),
        sa.Column("has_kueue", sa.Boolean()),
        sa.Column("problems", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("cluster_id", name="pk_queue_files"),
    )
    op.add_column("jobs", sa.Column("queue_name", sa.String(63)))


def downgrade() -> None:
    """Drop them. The objects of the queues stay in the clusters."""
    op.drop_column("jobs", "queue_name")
    op.drop_table("queue_files")
