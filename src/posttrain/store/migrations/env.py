"""Runs Alembic inside the caller's transaction, so that a kill leaves the old version."""

from alembic import context

from posttrain.store.tables import schema
from posttrain.store.upgrade import VERSION_TABLE

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=schema,
    version_table=VERSION_TABLE,
    # SQLite alters few things in place: a batch copies the table.
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
