"""Which service a database belongs to.

Revision: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table; the service writes its row when it starts."""
    op.create_table(
        "service",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_service"),
    )


def downgrade() -> None:
    """Remove the table. Objects in the cluster keep the id, so a service that is upgraded again does not know them."""
    op.drop_table("service")
