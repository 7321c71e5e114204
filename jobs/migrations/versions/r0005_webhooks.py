"""Webhooks with their deliveries, and the audit of decisions.

Revision: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables."""
    _create_webhooks()
    _create_audit()


def _create_webhooks() -> None:
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("cluster_id", sa.String(63), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("url", sa.String(1024), nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("events", sa.JSON, nullable=False),
        sa.Column("job_types", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_cluster_id_tenant_id", "webhooks", ["cluster_id", "tenant_id"])
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("webhook_id", sa.String(36), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("next_at", moment),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("told", sa.Text, nullable=False),
        sa.Column("delivered_at", moment),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_deliveries_webhook_id_webhooks", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_deliveries_next_at", "deliveries", ["next_at"])
    op.create_index("ix_deliveries_webhook_id_created_at", "deliveries", ["webhook_id", "created_at"])


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("user", sa.String(256), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("answer", sa.String(16), nullable=False),
        sa.Column("resource_type", sa.String(16), nullable=False),
        sa.Column("resource_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(63)),
        sa.Column("job_type", sa.String(16)),
        sa.Column("source_type", sa.String(16)),
        sa.Column("source_id", sa.String(63)),
        sa.Column("extra", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_tenant_id_id", "audit", ["tenant_id", "id"])
    op.create_index("ix_audit_resource_id", "audit", ["resource_id"])


def downgrade() -> None:
    """Drop them, with every entry of the audit."""
    op.drop_table("audit")
    op.drop_table("deliveries")
    op.drop_table("webhooks")
