"""Triggers of pipelines.

Revision: p0002
"""

import sqlalchemy as sa
from alembic import op

revision = "p0002"
down_revision = "p0001"


def upgrade() -> None:
    """Create the table."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "pipeline_triggers",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("pipeline_id", sa.String(36), nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("trigger_type", sa.String(16), nullable=False),
        sa.Column("topic", sa.String(256)),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("secret", sa.String(128)),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("looked_at", moment, nullable=False),
        sa.Column("next_run", moment),
        sa.Column("last_run", moment),
        sa.Column("last_message", sa.Text, nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pipeline_triggers"),
        sa.ForeignKeyConstraint(
            ["pipeline_id"], ["pipelines.id"], name="fk_pipeline_triggers_pipeline_id_pipelines", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_pipeline_triggers_enabled_next_run", "pipeline_triggers", ["enabled", "next_run"])
    op.create_index("ix_pipeline_triggers_topic", "pipeline_triggers", ["topic"])
    op.create_index("ix_pipeline_runs_pipeline_id_ended_at", "pipeline_runs", ["pipeline_id", "ended_at"])


def downgrade() -> None:
    """Drop the table, with every trigger."""
    op.drop_index("ix_pipeline_runs_pipeline_id_ended_at", "pipeline_runs")
    op.drop_table("pipeline_triggers")
