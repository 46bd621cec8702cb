"""Calls of the webhook for labelling."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "label_events",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("event", sa.String(20), nullable=False),
        sa.Column("target", sa.String(300), nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_label_events"),
        sa.CheckConstraint("status IN ('pending', 'done', 'failed', 'none')", name=op.f("ck_label_events_status")),
    )
    op.create_index("ix_label_events_target", "label_events", ["event", "target"], unique=True)
    op.create_index("ix_label_events_due", "label_events", ["status", "due_at"])
