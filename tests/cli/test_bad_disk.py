"""A full disk, a read-only disk, a workspace of a newer version: one clear line, exit code 2, nothing damaged."""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Call = Callable[..., Any]
Tree = Callable[[Path], dict[str, str]]
Break = Callable[[Path], None]


def newer_folder(root: Path) -> None:
    (root / ".posttrain" / "format.json").write_text(json.dumps({"format": 99}))


def newer_database(root: Path) -> None:
    with sqlite3.connect(root / ".posttrain" / "store.db") as connection:
        connection.execute("UPDATE posttrain_version SET version_num = '9999'")
    connection.close()


@pytest.mark.parametrize("damage", [newer_folder, newer_database])
@pytest.mark.parametrize("verb", [["run"], ["status"], ["show", "champion"], ["models", "rollback"], ["eval"]])
def test_a_workspace_of_a_newer_version_is_refused(
    tree: Tree, finished_copy: Path, posttrain: Call, damage: Break, verb: list[str]
) -> None:
    root = finished_copy
    damage(root)
    before = tree(root), (root / ".posttrain" / "store.db").read_bytes()
    assert "newer version" in posttrain(*verb, "-w", root).mistake
    assert (tree(root), (root / ".posttrain" / "store.db").read_bytes()) == before


Mount = Callable[..., bool]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """``mount(folder, *options)``; False if this user may not mount. Unmounts everything at the end."""
    with ExitStack() as stack:

        def mount(folder: Path, *options: str) -> bool:
            succeeded = subprocess.run(["mount", *options, folder], capture_output=True, check=False).returncode == 0
            if succeeded and "remount" not in " ".join(options):
                stack.callback(subprocess.run, ["umount", "--lazy", folder], check=True)
            return succeeded

        yield mount


@contextmanager
def refuse_fsync(code: int, after: int) -> Iterator[None]:
    """Fails every fsync except the first ``after``."""
    remaining = after

    def fsync(descriptor: int) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def test_a_run_resumes_after_a_full_disk(small: Any, posttrain: Call, finished_workspace: Path) -> None:
    """The disk is full at once, and then later and later in the run that continues."""
    root = small()
    for after in (0, 3, 40):
        with refuse_fsync(errno.ENOSPC, after):
            outcome = posttrain("run", "-w", root)
        assert outcome.code == 2
        assert "no space left on device" in outcome.err.splitlines()[-1]
        assert "Traceback" not in outcome.err
        assert list((root / ".posttrain" / "tmp").rglob("*")) == []
    assert posttrain("run", "-w", root).code == 0
    champions = [
        posttrain("status", "-w", workspace, "--json").json["champion"]["id"]
        for workspace in (root, finished_workspace)
    ]
    assert champions[0] == champions[1]


def test_a_run_on_a_mounted_full_disk_resumes_as_the_disk_grows(
    small: Any, posttrain: Call, finished_workspace: Path, tmp_path: Path, mount: Mount
) -> None:
    """The disk grows step by step until the run succeeds."""
    disk = tmp_path / "workspace"
    disk.mkdir()
    kilobytes = 300
    mounted = mount(disk, "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs")
    root = small()
    failures = 0
    while True:
        with ExitStack() as stack:
            if not mounted:  # no right to mount: patch fsync instead
                stack.enter_context(refuse_fsync(errno.ENOSPC, kilobytes // 30))
            outcome = posttrain("run", "-w", root)
        if outcome.code == 0:
            break
        failures += 1
        assert outcome.code == 2, outcome
        assert "no space left on device" in outcome.err.splitlines()[-1]
        assert "Traceback" not in outcome.err
        kilobytes = int(kilobytes * 1.6)
        if mounted:
            assert mount(disk, "-o", f"remount,size={kilobytes}k")
    assert failures >= 2
    champions = [
        posttrain("status", "-w", workspace, "--json").json["champion"]["id"]
        for workspace in (root, finished_workspace)
    ]
    assert champions[0] == champions[1]


@pytest.fixture
def read_only(finished_workspace: Path, tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace that cannot be written to, by a read-only mount or else by a patched ``os.access``."""
    root = tmp_path / "copy"
    shutil.copytree(finished_workspace, root, symlinks=True)
    if not (mount(root, "--bind", str(root)) and mount(root, "-o", "remount,ro,bind")):
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    return root


@pytest.mark.parametrize(
    "verb", [["run"], ["run", "--rounds", "3"], ["models", "rollback"], ["eval"], ["select"], ["data", "add", "x.csv"]]
)
def test_verbs_that_write_refuse_a_read_only_workspace(
    tree: Tree, read_only: Path, posttrain: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("text\none more\n")
    before = tree(read_only)
    line = posttrain(*verb, "-w", read_only).mistake
    assert "read-only" in line
    assert str(read_only) in line
    assert tree(read_only) == before


def test_a_read_only_workspace_can_be_read(read_only: Path, posttrain: Call, tmp_path: Path) -> None:
    assert posttrain("status", "-w", read_only, "--json").json["round"] == 2
    assert posttrain("show", "champion", "-w", read_only, "--json").json["kind"] == "model"
    assert posttrain("report", tmp_path / "report.html", "-w", read_only).code == 0
    assert posttrain("data", "list", "-w", read_only).code == 0
    assert posttrain("models", "export", "champion", tmp_path / "model", "-w", read_only).code == 0
