"""Since when a job waits for its topology, and what it was offered.

Revision: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("topology_wait", sa.JSON()))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "topology_wait")
