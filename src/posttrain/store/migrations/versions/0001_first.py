"""All tables of the first release.

Until that release this follows `posttrain.store.tables`; the first change afterwards writes these tables out here.
"""

from alembic import op

from posttrain.store import label_tables, tables

revision = "0001"
down_revision = None


def upgrade() -> None:
    # The tables for labelling join the schema when their module is imported.
    label_tables.accounts.metadata.create_all(op.get_bind())
    op.bulk_insert(tables.journal, [{"id": 1, "number": 0}])
