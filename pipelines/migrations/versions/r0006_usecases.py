"""Deployments of use cases.

Revision: p0006
"""

import sqlalchemy as sa
from alembic import op

revision = "p0006"
down_revision = "p0005"


def upgrade() -> None:
    """Create the table."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "usecase_deployments",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("project_id", sa.String(63)),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("template", sa.JSON, nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("pipeline_id", sa.String(36), nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("created_by", sa.String(256), nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.Column("delete_requested_at", moment),
        sa.Column("delete_requested_by", sa.String(256)),
        sa.PrimaryKeyConstraint("id", name="pk_usecase_deployments"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_usecase_deployments_tenant_id_name"),
        sa.ForeignKeyConstraint(["pipeline_id"], ["pipelines.id"], name="fk_usecase_deployments_pipeline_id_pipelines"),
    )


def downgrade() -> None:
    """Drop the table; the jobs of deployments stay."""
    op.drop_table("usecase_deployments")
