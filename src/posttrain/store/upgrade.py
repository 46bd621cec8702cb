"""Upgrades the tables of a database to the newest version, by the migrations in `posttrain.store.migrations`."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from posttrain.store.errors import UserError

VERSION_TABLE = "posttrain_version"

REVISIONS = ("0001",)  # every file of migrations/versions, oldest first

# A number that all posttrain processes agree on, for PostgreSQL's advisory locks: "post" in ASCII.
_MIGRATION_LOCK = 0x706F7374


def table_version(connection: Connection, location: str) -> str | None:
    """Returns the version of a database's tables, one of `REVISIONS`; None if it is empty.

    Args:
        location: The database in errors.

    Raises:
        UserError: a newer version of posttrain wrote it.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if version is not None and version not in REVISIONS:
        raise UserError(
            f"written by a newer version of posttrain (database {version}, known up to {REVISIONS[-1]})",
            where=location,
            fix="install that version",
        )
    return version


def upgrade_tables(connection: Connection, location: str) -> None:
    """Upgrades the tables in a writing transaction; processes that do so at the same time wait for each other.

    Raises:
        UserError: as `table_version`.
    """
    # SQLite needs no lock: its writing transactions exclude each other from their start.
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
    # Read under the lock: another process may have migrated while this one waited.
    if table_version(connection, location) != REVISIONS[-1]:
        migrate(connection)


def migrate(connection: Connection) -> None:
    """Runs all migrations, in the caller's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    # "%" starts an interpolation in Alembic's config, and a path may hold one.
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
