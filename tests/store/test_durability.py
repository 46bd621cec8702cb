"""A power cut loses nothing: files are on the disk before they get their names, and names before a call returns."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from backups import back_up, feedback, restore, write_workspace

from posttrain.data.feedback.inbox import Inbox
from posttrain.store.files import write_atomically
from posttrain.store.workspace import JOURNAL, Workspace

_TRASH = re.compile("[0-9a-f]{32}")
"""Names of temporary folders, whose content is removed."""


@dataclass
class Syncs:
    """What was synced, and what got a name."""

    sizes: dict[int, int] = field(default_factory=dict)  # at the last sync, by inode
    early: list[str] = field(default_factory=list)  # files that got their name before they were synced
    folders: dict[int, str] = field(default_factory=dict)  # with a new name since their last sync, by inode

    def holds(self, path: Path) -> bool:
        """Returns whether the whole of a file was synced."""
        return self.sizes.get(path.stat().st_ino) == path.stat().st_size


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Syncs:
    """Records the syncs and renames of this process; nothing is synced in truth."""
    syncs = Syncs()

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        syncs.sizes[status.st_ino] = status.st_size
        syncs.folders.pop(status.st_ino, None)

    def recorded(rename: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, **options: Any) -> None:
            start, end = Path(source), Path(target).absolute()
            if not any(_TRASH.fullmatch(part) for part in end.parts):
                files = [start, *start.rglob("*")] if start.is_dir() else [start]
                syncs.early += [str(end) for file in files if not file.is_symlink() and not syncs.holds(file)]
                syncs.folders[end.parent.stat().st_ino] = str(end)
            rename(source, target, **options)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name)))
    return syncs


def test_a_file_is_synced_before_its_name_and_its_folder_after(tmp_path: Path, syncs: Syncs) -> None:
    for content in (b"1", b"more"):
        write_atomically(tmp_path / "file", content)
        assert (syncs.early, syncs.folders) == ([], {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_named_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "file", b"1")
    assert list(tmp_path.iterdir()) == []


def test_changes_are_in_the_journal_on_the_disk_when_they_are_committed(tmp_path: Path, syncs: Syncs) -> None:
    with Workspace.create(tmp_path) as workspace:
        for _ in range(2):
            workspace.metadata.start_run("train", "key")
            assert syncs.holds(workspace.home / JOURNAL)
            assert workspace.home.stat().st_ino in syncs.sizes  # the file's name


def test_feedback_is_on_the_disk_when_it_is_acknowledged(tmp_path: Path, syncs: Syncs) -> None:
    with Inbox(tmp_path) as inbox:
        for number in range(3):
            inbox.append(feedback(number)).result()
            assert syncs.holds(tmp_path / "segments" / "000001.open")


def test_workspaces_backups_and_restored_workspaces_are_on_the_disk(tmp_path: Path, syncs: Syncs) -> None:
    root = write_workspace(tmp_path)
    assert (syncs.early, syncs.folders) == ([], {})
    for location in (str(tmp_path / "backup.tar"), f"{tmp_path / 'backups'}/"):
        back_up(root, location)
        assert (syncs.early, syncs.folders) == ([], {})
        restored = tmp_path / "restored" / Path(location).name
        restore(location, restored)
        assert (syncs.early, syncs.folders) == ([], {})
        for name in ("pool.csv", "labels/round-1.csv", ".posttrain/metrics/key.jsonl"):
            assert syncs.holds(restored / name)
