"""The contract of the database below the metadata, for SQLite and for a real PostgreSQL."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, inspect, text
from sqlalchemy.exc import IntegrityError

from faults import in_process
from posttrain.store.artifacts import Artifact, FileEntry
from posttrain.store.database import _engine, _parse
from posttrain.store.errors import UserError, WorkError
from posttrain.store.metadata import Metadata
from posttrain.store.signals import handle_signals
from posttrain.store.tables import schema
from posttrain.store.upgrade import REVISIONS, VERSION_TABLE

pytestmark = pytest.mark.slow


@pytest.fixture
def quick_tables() -> None:
    """Each new database runs the migrations, as outside of the tests."""


def artifact(number: int, kind: str = "dataset") -> Artifact:
    return Artifact(f"{kind}-{number:016x}", kind, {"n": number}, {"a": FileEntry("0" * 64, 5 * 2**30)})


class DatabaseContract:
    """A database implements `url`; every test has an empty one."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def test_a_transaction_is_all_or_nothing(self, metadata: Metadata, connect: Callable[..., Metadata]) -> None:
        second = connect()
        run = metadata.start_run("s", "k")

        def fail() -> None:
            with metadata.transaction():
                metadata.add_artifact(artifact(1))
                metadata.finish_run(run.id, artifact(1).id)
                assert metadata.finished_run("k") is not None
                assert metadata.artifacts() != []
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        for view in (metadata, second):
            assert view.artifacts() == []
            assert view.finished_run("k") is None
        with metadata.transaction():
            metadata.add_artifact(artifact(1))
            metadata.finish_run(run.id, artifact(1).id)
        assert second.finished_run("k") is not None

    def test_a_signal_within_a_statement_leaves_no_lock(
        self, metadata: Metadata, connect: Callable[..., Metadata]
    ) -> None:
        def stop(connection: Any, cursor: Any, statement: str, *arguments: Any) -> None:
            if "RETURNING" in statement:
                raise SystemExit(129)

        second = connect()
        event.listen(metadata.engine, "after_cursor_execute", stop)
        # Whoever tidies up holds the exception, and with it the cursor of the statement.
        with pytest.raises(SystemExit) as stopped, metadata.transaction():
            metadata.start_run("s", "k")
        event.remove(metadata.engine, "after_cursor_execute", stop)
        runs = [second.start_run("s", "k"), metadata.start_run("s", "k")]
        assert second.runs() == runs
        assert stopped.value.code == 129

    def test_a_signal_waits_for_the_end_of_a_transaction(
        self, metadata: Metadata, connect: Callable[..., Metadata]
    ) -> None:
        def stop(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        def work() -> None:
            with metadata.transaction():
                with metadata.transaction():
                    os.kill(os.getpid(), signal.SIGTERM)
                metadata.start_run("s", "after the signal")

        with handle_signals([signal.SIGTERM], stop):
            with pytest.raises(SystemExit):
                work()
            assert [run.key for run in connect().runs()] == ["after the signal"]
            with pytest.raises(SystemExit):
                os.kill(os.getpid(), signal.SIGTERM)

    def test_foreign_keys_are_enforced(self, metadata: Metadata) -> None:
        run = metadata.start_run("s", "k")
        with pytest.raises(IntegrityError):
            metadata.finish_run(run.id, "dataset-9")
        assert metadata.runs(status="running") == [run]

    def test_a_reader_cannot_write(self, metadata: Metadata, connect: Callable[..., Metadata]) -> None:
        metadata.add_artifact(artifact(1))
        reader = connect(write=False)
        assert len(reader.artifacts()) == 1
        with pytest.raises(UserError, match="reading only"):
            reader.add_artifact(artifact(2))

    def test_the_migration_creates_the_tables(self, metadata: Metadata) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.runtime.migration import MigrationContext

        with metadata.engine.connect() as connection:
            options = {"version_table": VERSION_TABLE, "compare_type": True}
            assert compare_metadata(MigrationContext.configure(connection, opts=options), schema) == []
            tables = inspect(connection)
            checks = {check["name"] for table in schema.tables for check in tables.get_check_constraints(table)}
        assert checks == {
            "ck_runs_status",
            "ck_rounds_status",
            "ck_deployments_action",
            "ck_deployments_hook",
            "ck_canaries_status",
            "ck_canaries_hook",
            "ck_accounts_role",
            "ck_tokens_kind",
            "ck_label_events_status",
            "ck_label_batches_status",
            "ck_label_items_status",
            "ck_label_answers_status",
        }

    def test_an_empty_database_can_be_opened_concurrently(self, url: str) -> None:
        gate = threading.Barrier(4)

        def create(number: int) -> None:
            gate.wait()
            database = Metadata(url, create=True)
            database.add_artifact(artifact(number))
            database.close()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(create, range(4)))
        database = Metadata(url)
        assert len(database.artifacts()) == 4
        database.close()

    def test_a_newer_database_raises(self, metadata: Metadata, connect: Callable[..., Metadata]) -> None:
        with metadata.transaction() as connection:
            connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
        for write in (True, False):
            with pytest.raises(UserError, match=r"newer version of posttrain.*install that version"):
                connect(write=write)


class TestSQLite(DatabaseContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"

    def test_pragmas(
        self, product_pragmas: tuple[str, ...], connect: Callable[..., Metadata], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("posttrain.store.database._PRAGMAS", product_pragmas)
        with connect().reading() as connection:
            values = [
                connection.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "foreign_keys", "synchronous")
            ]
        assert values == ["wal", 1, 2]

    def test_concurrent_connections_to_an_empty_file(self, tmp_path: Path) -> None:
        """Each changes it to a write-ahead log, and SQLite refuses some of those at once, about one file in sixteen."""

        def connect(engine: Engine) -> str:
            gate.wait()
            with engine.connect().execution_options(writes=True) as connection, connection.begin():
                connection.execute(text("CREATE TABLE IF NOT EXISTS a (b)"))
                return str(connection.scalar(text("PRAGMA journal_mode")))

        gate = threading.Barrier(6)
        with ThreadPoolExecutor(6) as threads:
            for number in range(30):
                engines = [_engine(_parse(f"sqlite:///{tmp_path}/{number}.db")) for _ in range(6)]
                assert set(threads.map(connect, engines)) == {"wal"}
                for engine in engines:
                    engine.dispose()

    def test_the_file_itself_is_not_locked(self, connect: Callable[..., Metadata]) -> None:
        """The lock of the workspace's folder guards it; here a second process may read and write."""
        first, second = connect(), connect()
        with first.advisory_lock("work"), second.advisory_lock("work"):
            assert not first.is_lock_held("work")
            second.add_artifact(artifact(1))
            assert [row.id for row in first.artifacts()] == [artifact(1).id]

    def test_a_full_disk_rolls_back_the_transaction(self, metadata: Metadata) -> None:
        with metadata.engine.connect() as connection:
            pages = connection.scalar(text("PRAGMA page_count"))
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

        def fill() -> None:
            with metadata.transaction():
                for number in range(2000):
                    metadata.add_artifact(artifact(number))

        with pytest.raises(UserError, match="no space left on device"):
            fill()
        assert metadata.artifacts() == []

    def test_a_file_size_limit_raises(self, tmp_path: Path) -> None:
        """The kernel itself refuses a write, and SQLite does not say why."""
        import resource

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
            Metadata(f"sqlite:///{tmp_path}/store.db", create=True).close()

        error = in_process(work).error
        assert error.startswith(f"StorageError: {tmp_path}/store.db: ")
        assert "ulimit -f" in error

    def test_a_python_without_sqlite_raises(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sqlite3"]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "sqlite3", None)
        with pytest.raises(UserError, match="this Python has no SQLite") as error:
            Metadata(url, create=True)
        assert "PostgreSQL needs" not in str(error.value)

    def test_a_missing_or_empty_file_raises(self, tmp_path: Path, url: str) -> None:
        with pytest.raises(UserError, match="missing"):
            Metadata(url)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "store.db").touch()
        with pytest.raises(UserError, match="empty"):
            Metadata(url)

    def test_a_damaged_file_raises(self, tmp_path: Path, url: str) -> None:
        (tmp_path / "store.db").write_bytes(b"no database, " * 1000)
        with pytest.raises(WorkError, match=r"store\.db: the database file is damaged"):
            Metadata(url)

    def test_a_missing_folder_raises(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot open the database.*store\.database"):
            Metadata(f"sqlite:///{tmp_path}/none/store.db", create=True)


class TestPostgreSQL(DatabaseContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    @pytest.mark.parametrize("shared", [False, True])
    def test_an_advisory_lock_excludes_others(self, connect: Callable[..., Metadata], shared: bool) -> None:
        first, second = connect(), connect()
        with first.advisory_lock("work", shared=shared):
            assert second.is_lock_held("work")
            with (
                pytest.raises(UserError, match=rf"held by process {os.getpid()} on .+ since 20"),
                second.advisory_lock("work", shared=not shared),
            ):
                pass
            first.add_artifact(artifact(1))
            with second.advisory_lock("other"):
                assert not first.is_lock_held("a third")
        assert not second.is_lock_held("work")
        with first.advisory_lock("work", shared=True), second.advisory_lock("work", shared=True):
            pass
        with second.advisory_lock("work"):
            pass

    def test_an_empty_database_raises(self, url: str) -> None:
        with pytest.raises(UserError, match="empty"):
            Metadata(url)

    def test_an_unreachable_server_raises(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot open the database") as error:
            Metadata(f"postgresql://user:secret@/none?host={tmp_path}&sslpassword=secret")
        assert "secret" not in str(error.value)
        assert "\n" not in str(error.value)

    def test_an_unknown_database_raises(self, postgres_server: str) -> None:
        with pytest.raises(UserError, match='database "none" does not exist'):
            Metadata(postgres_server.replace("/postgres?", "/none?"))

    def test_a_lost_connection_fails_only_its_transaction(self, metadata: Metadata) -> None:
        """A connection that the server drops inside a transaction fails that one and not the next."""

        def lose_connection() -> None:
            with metadata.transaction() as connection:
                pid = connection.scalar(text("SELECT pg_backend_pid()"))
                with metadata.engine.connect() as second_connection:
                    second_connection.execute(text(f"SELECT pg_terminate_backend({pid})"))
                metadata.add_artifact(artifact(1))

        with pytest.raises(WorkError, match="the connection was lost"):
            lose_connection()
        assert metadata.artifacts() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "no database URL"),
        ("mysql://host/name", "`mysql` is not supported"),
        ("postgresql+none://host/name", "postgresql"),
    ],
)
def test_an_invalid_url_raises(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        Metadata(url)
    assert error.value.where == "store.database"


def test_a_missing_extra_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match=r"pip install 'psycopg\[binary\]'"):
        Metadata("postgresql://host/name")


def test_every_migration_is_listed() -> None:
    from alembic.script import ScriptDirectory

    import posttrain.store

    folder = Path(posttrain.store.__path__[0], "migrations")
    revisions = [script.revision for script in ScriptDirectory(str(folder)).walk_revisions()]
    assert tuple(reversed(revisions)) == REVISIONS
