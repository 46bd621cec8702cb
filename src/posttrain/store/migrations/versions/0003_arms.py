"""Comparison arms: rounds, deployments and runs name the loop that they belong to."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for table in ("runs", "deployments"):
        op.add_column(table, _arm())
    connection = op.get_bind()
    # SQLite cannot change a primary key: the table is made again with its few rows.
    old = sa.Table("rounds", sa.MetaData(), autoload_with=connection)
    rows = [dict(row) for row in connection.execute(sa.select(old)).mappings()]
    op.drop_table("rounds")
    new = op.create_table(
        "rounds",
        _arm(),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("champion_before", sa.String(100)),
        sa.Column("candidate", sa.String(100)),
        sa.Column("decision", sa.JSON(none_as_null=True)),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True)),
        sa.Column("seconds", sa.Float),
        sa.PrimaryKeyConstraint("arm", "number", name="pk_rounds"),
        sa.CheckConstraint("status IN ('open', 'waiting', 'done')", name=op.f("ck_rounds_status")),
    )
    if rows:
        op.bulk_insert(new, rows)


def _arm() -> sa.Column[str]:
    return sa.Column("arm", sa.String(40), nullable=False, server_default="")
