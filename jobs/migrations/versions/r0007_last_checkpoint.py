"""The last checkpoint of a job.

Revision: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("last_checkpoint", sa.JSON()))


def downgrade() -> None:
    """Drop it; the checkpoints themselves stay."""
    op.drop_column("jobs", "last_checkpoint")
