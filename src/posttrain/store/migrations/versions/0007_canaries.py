"""Canaries: models that take a share of the requests beside the champion."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "canaries",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("arm", sa.String(40), nullable=False, server_default=""),
        sa.Column("model_id", sa.String(100), nullable=False),
        sa.Column("champion_id", sa.String(100), nullable=False),
        sa.Column("deployment_id", sa.Integer, nullable=False),
        sa.Column("share", sa.Float, nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("conclusion", sa.Text),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("hook", sa.String(10), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_canaries"),
        sa.CheckConstraint(
            "status IN ('running', 'promoted', 'rolled_back', 'kept', 'stopped')", name=op.f("ck_canaries_status")
        ),
        sa.CheckConstraint("hook IN ('pending', 'done', 'failed', 'none')", name=op.f("ck_canaries_hook")),
    )
