"""The id of the service that owns the database.

Revision: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the table; the service writes its row at start."""
    op.create_table(
        "service",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_service"),
    )


def downgrade() -> None:
    """Drop the table. Objects keep the old id, so a service that is upgraded again does not recognize them."""
    op.drop_table("service")
