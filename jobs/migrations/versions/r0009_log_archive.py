"""Which logs of a job are in the archive.

Revision: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("log_archive", sa.JSON()))


def downgrade() -> None:
    """Drop it; the logs themselves stay."""
    op.drop_column("jobs", "log_archive")
