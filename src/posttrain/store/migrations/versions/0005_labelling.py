"""Accounts, tokens, audit, guidelines, and the queue of items to label."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("name", sa.String(80), nullable=False),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("password_hash", sa.Text),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("paused", sa.Text),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("name", name="pk_accounts"),
        sa.CheckConstraint(
            "role IN ('owner', 'reviewer', 'annotator', 'viewer', 'model')", name=op.f("ck_accounts_role")
        ),
    )

    op.create_table(
        "tokens",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("account", sa.String(80)),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("hash", name="pk_tokens"),
        sa.ForeignKeyConstraint(["account"], ["accounts.name"], name="fk_tokens_account"),
        sa.CheckConstraint("kind IN ('session', 'api', 'invitation', 'link')", name=op.f("ck_tokens_kind")),
    )
    op.create_index("ix_tokens_account", "tokens", ["account"])

    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(80), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        sa.PrimaryKeyConstraint("number", name="pk_audit"),
    )
    op.create_index("ix_audit_actor", "audit", ["actor"])

    op.create_table(
        "guidelines",
        sa.Column("version", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("author", sa.String(80), nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_guidelines"),
    )

    op.create_table(
        "label_batches",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("round", sa.Integer),
        sa.Column("selection", sa.String(200)),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("labels", sa.JSON),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("name", name="pk_label_batches"),
        sa.CheckConstraint("status IN ('open', 'done')", name=op.f("ck_label_batches_status")),
    )

    op.create_table(
        "label_items",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("batch", sa.String(200), nullable=False),
        sa.Column("record", sa.String(100), nullable=False),
        sa.Column("priority", sa.Float, nullable=False),
        sa.Column("content", sa.JSON, nullable=False),
        sa.Column("suggestion", sa.JSON),
        sa.Column("reason", sa.Text),
        sa.Column("expected", sa.JSON),
        sa.Column("wanted", sa.Integer, nullable=False),
        sa.Column("answered", sa.Integer, nullable=False, server_default="0"),
        sa.Column("checked", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("resolution", sa.JSON),
        sa.PrimaryKeyConstraint("id", name="pk_label_items"),
        sa.ForeignKeyConstraint(["batch"], ["label_batches.name"], name="fk_label_items_batch"),
        sa.CheckConstraint("status IN ('open', 'review', 'done', 'dropped')", name=op.f("ck_label_items_status")),
    )
    op.create_index("ix_label_items_next", "label_items", ["status", "batch", "priority"])
    op.create_index("ix_label_items_record", "label_items", ["batch", "record"])

    op.create_table(
        "label_answers",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=True),
        sa.Column("item", sa.Integer, nullable=False),
        sa.Column("annotator", sa.String(80), nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("answer", sa.JSON),
        sa.Column("note", sa.Text),
        sa.Column("seconds", sa.Float),
        sa.Column("suggestion", sa.JSON),
        sa.Column("position", sa.Integer),
        sa.Column("confidence", sa.Float),
        sa.Column("guideline", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("undone_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_label_answers"),
        sa.ForeignKeyConstraint(["item"], ["label_items.id"], name="fk_label_answers_item"),
        sa.CheckConstraint("status IN ('answered', 'skipped', 'flagged')", name=op.f("ck_label_answers_status")),
    )
    op.create_index("ix_label_answers_annotator", "label_answers", ["annotator"])
    counts = sa.text("undone_at IS NULL")
    op.create_index(
        "ix_label_answers_item",
        "label_answers",
        ["item", "annotator"],
        unique=True,
        sqlite_where=counts,
        postgresql_where=counts,
    )

    op.create_table(
        "label_leases",
        sa.Column("item", sa.Integer, nullable=False),
        sa.Column("annotator", sa.String(80), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("item", "annotator", name="pk_label_leases"),
        sa.ForeignKeyConstraint(["item"], ["label_items.id"], name="fk_label_leases_item", ondelete="CASCADE"),
    )
    op.create_index("ix_label_leases_annotator", "label_leases", ["annotator"])
