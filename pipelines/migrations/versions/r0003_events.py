"""What triggers remember: thresholds, and how far the histories of jobs were read.

Revision: p0003
"""

import sqlalchemy as sa
from alembic import op

revision = "p0003"
down_revision = "p0002"


def upgrade() -> None:
    """Add the column and the table."""
    with op.batch_alter_table("pipeline_triggers") as table:
        table.add_column(sa.Column("memory", sa.JSON, nullable=False, server_default="{}"))
    op.create_table(
        "pipeline_history_mark",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("dealt_with", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pipeline_history_mark"),
    )


def downgrade() -> None:
    """Drop both; thresholds are armed again."""
    op.drop_table("pipeline_history_mark")
    with op.batch_alter_table("pipeline_triggers") as table:
        table.drop_column("memory")
