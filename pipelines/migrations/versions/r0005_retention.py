"""Runs by their end, so that old ones are found.

Revision: p0005
"""

from alembic import op

revision = "p0005"
down_revision = "p0004"


def upgrade() -> None:
    """Create the index."""
    op.create_index("ix_pipeline_runs_ended_at", "pipeline_runs", ["ended_at"])


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_pipeline_runs_ended_at", "pipeline_runs")
