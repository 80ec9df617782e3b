"""Record why a model could not be restored, and which weights a base model's name stands for."""

import sqlalchemy as sa
from alembic import op
from sqlmodel.sql.sqltypes import AutoString

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the column and the table."""
    op.add_column("models", sa.Column("lost_because", AutoString(), nullable=True))
    op.create_table(
        "base_weights",
        sa.Column("base_model", AutoString(), primary_key=True, nullable=False),
        sa.Column("fingerprint", AutoString(), nullable=False),
    )


def downgrade() -> None:
    """Drop the column and the table."""
    op.drop_table("base_weights")
    op.drop_column("models", "lost_because")
