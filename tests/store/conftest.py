"""An S3 API, full disks, and users without rights."""

import encodings.utf_8_sig  # noqa: F401 - `unprivileged` may not read the interpreter's folder
import os
import resource
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backups import write_workspace

from faults import Outcome, in_process
from posttrain.store.metadata import Metadata
from posttrain.store.workspace import Workspace

NOBODY = 65534


@pytest.fixture
def s3_url(s3_server: str) -> str:
    """An empty prefix in a bucket."""
    return f"s3://posttrain/{uuid.uuid4().hex}/artifacts"


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Returns a function that limits the size of files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.create(tmp_path / "workspace") as workspace:
        yield workspace


@pytest.fixture(scope="session")
def filled_workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace to back up, for tests to copy."""
    return write_workspace(tmp_path_factory.mktemp("filled"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach too, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="posttrain-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def unprivileged() -> Callable[[Callable[[], Any]], Outcome]:
    """Run a function as a user without root's right to ignore file permissions."""

    def run(function: Callable[[], Any]) -> Outcome:
        def run_as_nobody() -> Any:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            return function()

        return in_process(run_as_nobody)

    return run


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., Metadata]]:
    """Open the database like another process."""
    databases = []

    def connect(**options: Any) -> Metadata:
        databases.append(Metadata(url, **{"create": True, **options}))
        return databases[-1]

    yield connect
    for metadata in databases:
        metadata.close()


@pytest.fixture
def metadata(connect: Callable[..., Metadata]) -> Metadata:
    return connect()
