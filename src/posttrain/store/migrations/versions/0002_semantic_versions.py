"""Semantic versions and notes of names, and tags."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("names", sa.Column("semantic", sa.String(40)))
    op.add_column("names", sa.Column("note", sa.Text))
    op.create_index("ix_names_semantic", "names", ["name", "semantic"], unique=True)
    op.create_table(
        "tags",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("tag", sa.String(200), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("name", "tag", name="pk_tags"),
    )
