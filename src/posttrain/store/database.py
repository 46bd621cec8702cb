"""The metadata database: SQLite by default, PostgreSQL by URL; upgraded to the newest version when opened."""

import os
import platform
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sqlalchemy import (
    URL,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Table,
    TypeDecorator,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from posttrain.store.errors import StorageError, UserError, WorkError

VERSION_TABLE = "posttrain_version"

REVISIONS = ("0001", "0002", "0003")  # every file of migrations/versions, oldest first

# Numbers that all posttrain processes agree on, for PostgreSQL's advisory locks.
_MIGRATION_LOCK = 0x706F7374

_TIMEOUT = 30  # seconds to wait for others

_PRAGMAS = (f"busy_timeout = {_TIMEOUT * 1000}", "foreign_keys = ON", "synchronous = FULL")

_WORK_LOCK = 0x74726169

_LOCK_HOLDER = f"""
    SELECT application_name || ' since ' || to_char(backend_start, 'YYYY-MM-DD HH24:MI:SS TZ')
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND classid = {_WORK_LOCK}
    AND objid = (hashtext(current_schema())::bigint & 4294967295)::oid
"""

_CONFIG_KEY = "store.database"

_FIX_DISK = "free some space or raise the limit on a file's size (ulimit -f), and run the same command again"

_FIX_HELD = "wait for it to end, or end it"

_FIX_MISSING = "check store.database, or restore it from a backup"


class Database:
    """Transactions on one database; nested ones of a thread join the outermost.

    Args:
        url: SQLAlchemy's URL of an SQLite or PostgreSQL database.
        create: make the tables where there are none; False: an empty database is an error.
        write: False refuses writing transactions; an SQLite file that may not be written to is then read as a
            copy.

    Raises:
        UserError: the URL is wrong, the driver is missing, the server cannot be reached, the database is
            missing, or it was written by a newer version.
    """

    def __init__(self, url: str, *, create: bool = False, write: bool = True) -> None:
        self.writable = write
        self.arm = ""
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        parsed = _parse(url)
        file = Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
        if file and not create and not file.exists():
            raise UserError("the database is missing", where=str(file), fix=_FIX_MISSING)
        if file and not write and not _can_write(file):
            parsed = parsed.set(database=str(self._copied(file)))
        self.location = str(file) if file else parsed.render_as_string(hide_password=True)
        self.engine = _engine(parsed)
        self._open = threading.local()
        try:
            self._upgrade(create)
        except BaseException:
            self.close()
            raise

    def for_arm(self, arm: str) -> Self:
        """The same database for a loop that is run beside: rounds, deployments and runs of its own, all else shared."""
        other = copy(self)
        other.arm = arm
        return other

    def close(self) -> None:
        """Closes the connections."""
        self.engine.dispose()
        if self._copy:
            self._copy.cleanup()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A writing transaction: all of it, or nothing after an exception or a kill.

        Raises:
            UserError: the database was opened for reading only.
            Refused: the disk did.
            WorkError: the database failed, such as a lost connection.
        """
        if not self.writable:
            raise UserError("opened for reading only", where=self.location)
        with self._begin(writes=True) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction to read in; inside a writing one it sees what that has written."""
        with self._begin(writes=False) as connection:
            yield connection

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold a shared database for one workspace's work; the server lets go when this process dies.

        Raises:
            UserError: another process holds it; names its id, its host and since when.
        """
        if self.engine.dialect.name != "postgresql":
            yield  # the workspace's own lock is enough for a file
            return
        key = f"{_WORK_LOCK}, hashtext(current_schema())"
        with ExitStack() as held:
            with self._refusals():
                plain = held.enter_context(self.engine.connect())
                connection = plain.execution_options(isolation_level="AUTOCOMMIT")
                if not connection.scalar(text(f"SELECT pg_try_advisory_lock({key})")):
                    holder = connection.scalar(text(_LOCK_HOLDER))
                    raise UserError(f"held by {holder or 'another process'}", where=self.location, fix=_FIX_HELD)
            try:
                yield
            finally:
                with self._refusals():
                    connection.execute(text(f"SELECT pg_advisory_unlock({key})"))

    @contextmanager
    def _begin(self, writes: bool) -> Iterator[Connection]:
        outer: Connection | None = getattr(self._open, "connection", None)
        if outer is not None:
            if writes and not outer.get_execution_options().get("writes"):
                raise RuntimeError("a writing transaction cannot start inside a reading one")
            yield outer
            return
        with self._refusals(), self.engine.connect() as plain:
            connection = plain.execution_options(writes=writes)
            with connection.begin():
                self._open.connection = connection
                try:
                    yield connection
                finally:
                    del self._open.connection

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn what a database refuses into one line; a broken constraint is our own mistake and stays."""
        try:
            yield
        except DBAPIError as error:
            message = " ".join(str(error.orig).split())
            if "disk is full" in message or "No space left on device" in message:
                raise StorageError("no space left on device", where=self.location, fix="free some space") from error
            if "disk I/O error" in message:  # what SQLite says of a full disk at times, and of a limit on a file's size
                raise StorageError(message, where=self.location, fix=_FIX_DISK) from error
            if "readonly database" in message or "read-only transaction" in message:
                raise StorageError(
                    "read-only database", where=self.location, fix="use one that can be written to"
                ) from error
            if error.connection_invalidated:
                raise WorkError(f"{self.location}: the connection was lost ({message})") from error
            if "unable to open database" in message or _no_connection(error):
                raise UserError(
                    f"cannot open the database ({message})", where=self.location, fix="check store.database"
                ) from error
            if not isinstance(error.orig, self.engine.dialect.loaded_dbapi.OperationalError):
                if "not a database" in message or "malformed" in message:
                    raise WorkError(f"{self.location}: the database file is damaged ({message})") from error
                raise
            raise WorkError(f"{self.location}: {message}") from error

    def _copied(self, file: Path) -> Path:
        """Copy an SQLite file with its log, as reading one needs a folder that can be written to."""
        self._copy = tempfile.TemporaryDirectory(prefix="posttrain-")
        for path in (file, file.with_name(f"{file.name}-wal")):
            if path.exists():
                shutil.copyfile(path, Path(self._copy.name, path.name))
        return Path(self._copy.name, file.name)

    def _upgrade(self, create: bool) -> None:
        """Bring the tables to the newest version; processes that open at once wait for each other."""
        with self._begin(writes=False) as connection:
            version = self._version(connection)
        if version == REVISIONS[-1]:
            return
        if version is None and not create:
            raise UserError("the database is empty", where=self.location, fix=_FIX_MISSING)
        with self._begin(writes=True) as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            if self._version(connection) != REVISIONS[-1]:
                _migrate(connection)

    def _version(self, connection: Connection) -> str | None:
        if not inspect(connection).has_table(VERSION_TABLE):
            return None
        version: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
        if version is not None and version not in REVISIONS:
            raise UserError(
                f"written by a newer version of posttrain (database {version}, known up to {REVISIONS[-1]})",
                where=self.location,
                fix="pip install --upgrade posttrain",
            )
        return version


def insert_new(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Insert a row unless one with the same key is there, whoever inserts it at the same time."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        connection.execute(postgresql_insert(table).values(values).on_conflict_do_nothing())
    else:
        from sqlalchemy.dialects.sqlite import insert as sqlite_insert

        connection.execute(sqlite_insert(table).values(values).on_conflict_do_nothing())


def lock_table(connection: Connection, table: Table) -> None:
    """Let no other transaction write to ``table`` until this one ends; SQLite's do so from their start."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError("no database URL", where=_CONFIG_KEY, fix="such as postgresql://user@host/name") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise UserError(
            f"`{backend}` is not supported", where=_CONFIG_KEY, fix="use postgresql:// or sqlite:///"
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            engine = create_engine(url)
        else:
            name = f"process {os.getpid()} on {platform.node()}"[:63]
            engine = create_engine(url, pool_pre_ping=True, connect_args={"application_name": name})
    except ImportError as error:
        if url.get_backend_name() == "sqlite":
            what, fix = f"this Python has no SQLite ({error})", "use a Python that has, or PostgreSQL"
        else:
            what, fix = (
                f"PostgreSQL needs a package that is not installed ({error})",
                "pip install 'posttrain[postgres]'",
            )
        raise UserError(what, where=_CONFIG_KEY, fix=fix) from None
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(str(error), where=_CONFIG_KEY) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins; the driver would not do so before a CREATE TABLE
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        _enable_wal(connection)
    except Exception:
        connection.close()  # SQLAlchemy would leave it open
        raise


def _enable_wal(connection: Any) -> None:
    """Change to a write-ahead log; SQLite does not always wait itself, but refuses some of those that do so at once."""
    end = time.monotonic() + _TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes its lock at once: one that reads first and then writes would be refused.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection, revision: str = "head") -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _can_write(file: Path) -> bool:
    return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)


def _no_connection(error: DBAPIError) -> bool:
    """Returns whether a PostgreSQL server could not be reached at all: such errors carry no SQLSTATE."""
    return type(error.orig).__module__.startswith("psycopg") and getattr(error.orig, "sqlstate", None) is None


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, in UTC whatever the database thinks of time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def utc_now() -> datetime:
    """This moment, in UTC."""
    return datetime.now(UTC)
