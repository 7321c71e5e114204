"""What notification steps sent.

Revision: p0004
"""

import sqlalchemy as sa
from alembic import op

revision = "p0004"
down_revision = "p0003"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "pipeline_messages",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("key", sa.String(63), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("channel", sa.String(16), nullable=False),
        sa.Column("recipient", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "key", "number", name="pk_pipeline_messages"),
        sa.ForeignKeyConstraint(
            ["run_id"], ["pipeline_runs.id"], name="fk_pipeline_messages_run_id_pipeline_runs", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("pipeline_messages")
