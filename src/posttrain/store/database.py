"""The metadata database: SQLite by default, PostgreSQL by URL; upgraded to the newest version when opened."""

import json
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
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from posttrain.store.errors import (
    DamagedDatabaseError,
    DatabaseAwayError,
    EmptyDatabaseError,
    LockedError,
    StorageError,
    UserError,
    WorkError,
)
from posttrain.store.installation import install_command
from posttrain.store.secrets import mask_text
from posttrain.store.signals import defer_signals
from posttrain.store.upgrade import REVISIONS, table_version, upgrade_tables

_TIMEOUT = 30  # seconds to wait for others
_CONNECT_TIMEOUT = 10  # seconds; a host that drops packets would hold each request for minutes

# SQLite checks foreign keys only if told to on each connection. FULL, as with NORMAL a write-ahead log loses the last
# transactions in a power cut: a deployment that was reported could be undone.
_PRAGMAS = (f"busy_timeout = {_TIMEOUT * 1000}", "foreign_keys = ON", "synchronous = FULL")

# A hash of the schema and the lock's name, so that workspaces in schemas of one database do not exclude each other.
_LOCK_KEY = "hashtextextended(current_schema() || '/' || :name, 0)"
_LOCK_HOLDERS = f"""
    SELECT application_name || ' since ' || to_char(backend_start, 'YYYY-MM-DD HH24:MI:SS TZ')
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND datname = current_database()
    AND (classid::bigint << 32) | objid::bigint = {_LOCK_KEY}
"""

_CONFIG_KEY = "store.database"

_FIX_DISK = "free some space or raise the limit on a file's size (ulimit -f), and run the same command again"

_FIX_HELD = "wait for it to end, or end it"

_FIX_MISSING = "check store.database, or restore it from a backup"

RECOVER = "restore a backup, or rebuild the database: posttrain verify --rebuild"


class Database:
    """Runs transactions on one database; a thread's nested ones join the outermost.

    Args:
        url: SQLAlchemy's URL of an SQLite or PostgreSQL database.
        create: True to create missing tables; False: an empty database is an error.
        write: False refuses writing transactions, and reads an SQLite file without write permission as a copy.

    Raises:
        UserError: the URL is wrong, the driver is missing, the database is missing, or it was written by a newer
            version.
        DatabaseAwayError: the server cannot be reached.
    """

    def __init__(self, url: str, *, create: bool = False, write: bool = True) -> None:
        self.writable = write
        self.arm = ""
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        parsed, file = _parse(url), sqlite_file(url)
        if file and not create and not file.exists():
            raise EmptyDatabaseError("the database is missing", where=str(file), fix=_FIX_MISSING)
        if file and not write and not _can_write(file):
            parsed = parsed.set(database=str(self._copied(file)))
        self.location = str(file) if file else hide_password(url)
        self.engine = _engine(parsed)
        self._open = threading.local()
        try:
            self._upgrade(create)
        except BaseException:
            self.close()
            raise

    def for_arm(self, arm: str) -> Self:
        """Returns this database for a comparison arm: its own rounds, deployments and runs, everything else shared."""
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
        """Begins a writing transaction: all of it is written, or nothing after an exception or a kill.

        Raises:
            UserError: the database was opened for reading only.
            StorageError: the disk refused, or the database cannot be reached.
            WorkError: the database failed, such as a lost connection.
        """
        if not self.writable:
            raise UserError("opened for reading only", where=self.location)
        with self._begin(writes=True) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Begins a reading transaction; inside a writing one it sees the changes so far."""
        with self._begin(writes=False) as connection:
            yield connection

    def in_transaction(self) -> bool:
        """Returns whether this thread is inside a transaction."""
        return getattr(self._open, "connection", None) is not None

    @contextmanager
    def advisory_lock(self, name: str, *, shared: bool = False) -> Iterator[None]:
        """Holds a lock of a shared database; the server releases it when this process dies.

        In an SQLite database it excludes nobody: the locks of the workspace's folder are enough for a file.

        Args:
            name: The lock's name.
            shared: True to hold it beside other processes that share it.

        Raises:
            LockedError: another process holds it; names its id, its host and since when.
        """
        if self.engine.dialect.name != "postgresql":
            yield
            return
        suffix, values = "_shared" if shared else "", {"name": name}
        with ExitStack() as held:
            with self._translated_errors():
                # A connection of its own, as the lock belongs to it and must outlast every transaction. Autocommit:
                # a transaction open for hours would keep the server from cleaning up dead rows.
                plain = held.enter_context(self.engine.connect())
                connection = plain.execution_options(isolation_level="AUTOCOMMIT")
                if not connection.scalar(text(f"SELECT pg_try_advisory_lock{suffix}({_LOCK_KEY})"), values):
                    holder = connection.scalar(text(_LOCK_HOLDERS), values)
                    raise LockedError(f"held by {holder or 'another process'}", where=self.location, fix=_FIX_HELD)
            try:
                yield
            finally:
                # The pool keeps the connection open, so closing it alone would not unlock.
                with self._translated_errors():
                    connection.execute(text(f"SELECT pg_advisory_unlock{suffix}({_LOCK_KEY})"), values)

    def is_lock_held(self, name: str) -> bool:
        """Returns whether a process holds an advisory lock; False in an SQLite database, which has none."""
        if self.engine.dialect.name != "postgresql":
            return False
        with self.reading() as connection:
            return connection.execute(text(_LOCK_HOLDERS), {"name": name}).first() is not None

    @contextmanager
    def _begin(self, writes: bool) -> Iterator[Connection]:
        outer: Connection | None = getattr(self._open, "connection", None)
        if outer is not None:
            # SQLite would have to upgrade the lock, and refuses if another process has written since: a failure that
            # only shows under load is made one that always shows.
            if writes and not outer.get_execution_options().get("writes"):
                raise RuntimeError("a writing transaction cannot start inside a reading one")
            yield outer
            return
        # SQLAlchemy's connections and contexts do not survive an exception between any two of their lines.
        with defer_signals(), self._translated_errors(), self.engine.connect() as plain:
            connection = plain.execution_options(writes=writes)
            with connection.begin():
                self._open.connection, self._open.changes = connection, []
                try:
                    yield connection
                    self._before_commit(connection)
                finally:
                    del self._open.connection, self._open.changes

    def _before_commit(self, connection: Connection) -> None:
        """Completes a transaction; a derived class keeps what it needs for this in ``self._open.changes``."""

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translates a database's refusals into one clear line; a broken constraint is a bug and passes unchanged."""
        try:
            yield
        except PoolTimeoutError as error:
            raise WorkError(f"{self.location}: all connections are in use") from error
        except DBAPIError as error:
            message = " ".join(str(error.orig).split())
            if "disk is full" in message or "No space left on device" in message:
                raise StorageError("no space left on device", where=self.location, fix="free some space") from error
            if "disk I/O error" in message:  # SQLite's message for some full disks, and for a limit on a file's size
                raise StorageError(message, where=self.location, fix=_FIX_DISK) from error
            if "readonly database" in message or "read-only transaction" in message:
                raise StorageError(
                    "read-only database", where=self.location, fix="use one that can be written to"
                ) from error
            if error.connection_invalidated:
                raise WorkError(f"{self.location}: the connection was lost ({message})") from error
            is_operational = isinstance(error.orig, self.engine.dialect.loaded_dbapi.OperationalError)
            if "unable to open database" in message or (is_operational and _no_connection(error)):
                raise DatabaseAwayError(
                    f"cannot open the database ({message})", where=self.location, fix="check store.database"
                ) from error
            if "cannot contain NUL" in message:
                raise UserError("a text holds the character NUL, which PostgreSQL cannot store") from error
            if not is_operational:
                if "not a database" in message or "malformed" in message:
                    raise DamagedDatabaseError(
                        f"{self.location}: the database file is damaged ({message}); {RECOVER}"
                    ) from error
                raise
            raise WorkError(f"{self.location}: {message}") from error

    def _copied(self, file: Path) -> Path:
        """Copies an SQLite file with its log; returns the copy."""
        # Reading a database in WAL mode creates its `-shm` file, which needs a folder that can be written to. The log
        # comes along: what it holds is not in the main file yet.
        self._copy = tempfile.TemporaryDirectory(prefix="posttrain-")
        for path in (file, file.with_name(f"{file.name}-wal")):
            if path.exists():
                shutil.copyfile(path, Path(self._copy.name, path.name))
        return Path(self._copy.name, file.name)

    def _upgrade(self, create: bool) -> None:
        """Upgrades the tables to the newest version, or creates them."""
        # Read first, so that the usual opening takes no write lock and works on a read-only database.
        with self._begin(writes=False) as connection:
            version = table_version(connection, self.location)
        if version == REVISIONS[-1]:
            return
        if version is None and not create:
            raise EmptyDatabaseError("the database is empty", where=self.location, fix=_FIX_MISSING)
        with self._begin(writes=True) as connection:
            upgrade_tables(connection, self.location)


def insert_new(connection: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Inserts a row unless one with the same key is there, even if another process inserts it at the same time.

    Returns:
        True if the row is new.
    """
    statement = _insert(connection, table).values(values)
    statement = statement.on_conflict_do_nothing().returning(*table.primary_key.columns)
    return connection.execute(statement).first() is not None


def insert_or_update(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Inserts a row, or replaces the columns of the one with the same key."""
    statement = _insert(connection, table).values(values)
    keys = [column.name for column in table.primary_key.columns]
    changed = {name: value for name, value in values.items() if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed))


def _insert(connection: Connection, table: Table) -> Any:
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as postgresql_insert

        return postgresql_insert(table)
    from sqlalchemy.dialects.sqlite import insert as sqlite_insert

    return sqlite_insert(table)


def lock_table(connection: Connection, table: Table) -> None:
    """Keeps other transactions from writing to ``table`` until this one ends."""
    # SQLite needs none: its writing transactions exclude each other from their start (`_begin_sqlite`).
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE"))


def sqlite_file(url: str) -> Path | None:
    """Returns the file of an SQLite database; None for another one.

    Raises:
        UserError: the URL is wrong.
    """
    parsed = _parse(url)
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None


def hide_password(url: str, where: str = _CONFIG_KEY) -> str:
    """Returns a database's URL as it may be shown, without its password.

    Args:
        url: The URL, as SQLAlchemy has it.
        where: The config key that it comes from.

    Raises:
        UserError: it is not a URL.
    """
    return mask_text(_parse(url, where).render_as_string(hide_password=True))


def _parse(url: str, where: str = _CONFIG_KEY) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the latter of a port that is not a number
        raise UserError("no database URL", where=where, fix="such as postgresql://user@host/name") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise UserError(f"`{backend}` is not supported", where=where, fix="use postgresql:// or sqlite:///") from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            engine = create_engine(url, json_deserializer=_read_json)
        else:
            name = f"process {os.getpid()} on {platform.node()}"[:63]  # PostgreSQL cuts names at 63 bytes
            # A stage may train for hours between two queries: the ping replaces a connection that a server or a
            # firewall has closed meanwhile.
            options: dict[str, Any] = {"application_name": name}
            if "connect_timeout" not in url.query:
                options["connect_timeout"] = _CONNECT_TIMEOUT
            engine = create_engine(url, pool_pre_ping=True, connect_args=options)
    except ImportError as error:
        if url.get_backend_name() == "sqlite":
            what, fix = f"this Python has no SQLite ({error})", "use a Python that has, or PostgreSQL"
        else:
            what, fix = (
                f"PostgreSQL needs a package that is not installed ({error})",
                install_command("psycopg[binary]"),
            )
        raise UserError(what, where=_CONFIG_KEY, fix=fix) from None
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(str(error), where=_CONFIG_KEY) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        event.listen(engine, "invalidate", _unlock_sqlite)
    return engine


def _read_json(text: str) -> Any:
    """Reads a JSON column of an SQLite file, which holds any text; PostgreSQL refuses what is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise DamagedDatabaseError(f"store.database: a row holds no JSON; {RECOVER}") from None


def _prepare_sqlite(connection: Any, record: object) -> None:
    # `_begin_sqlite` begins transactions; the driver would not do so before a CREATE TABLE, and a kill amid a
    # migration would leave half of its tables.
    connection.isolation_level = None
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        _enable_wal(connection)
    except Exception:
        connection.close()  # SQLAlchemy would leave it open
        raise


def _enable_wal(connection: Any) -> None:
    """Changes to a write-ahead log, so that readers do not wait for a writer."""
    # SQLite's own waiting (busy_timeout) does not cover this change: it refuses some of the processes that make it at
    # the same time.
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
    # A writer takes its lock at once: if two read first and then write, SQLite refuses one without waiting.
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _unlock_sqlite(connection: Any, record: object, error: BaseException | None) -> None:
    # A signal that raises within a statement makes SQLAlchemy close the connection. SQLite closes it only once the
    # statement's cursor is gone, which the exception holds: until then nobody else, tidying up, could write.
    connection.rollback()


def _can_write(file: Path) -> bool:
    return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)


def _no_connection(error: DBAPIError) -> bool:
    """Returns whether a PostgreSQL server could not be reached at all: such errors carry no SQLSTATE."""
    return type(error.orig).__module__.startswith("psycopg") and getattr(error.orig, "sqlstate", None) is None


class UtcDateTime(TypeDecorator[datetime]):
    """A column type for times: UTC on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        # SQLite drops the zone; PostgreSQL converts to that of the session.
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def utc_now() -> datetime:
    """Returns the current time in UTC."""
    return datetime.now(UTC)
