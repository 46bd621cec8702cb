"""The number of the last transaction, by which the journal beside the database is compared with it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    table = op.create_table(
        "journal",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_journal"),
    )
    op.bulk_insert(table, [{"id": 1, "number": 0}])
