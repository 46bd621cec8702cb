"""Shards that are damaged or missing are made again by the next build that needs them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.store.errors import DamagedArtifactError

AGAIN: dict[str, dict[str, Any]] = {
    "the same": {},
    "fresh": {"fresh": True},
    "another name": {"name": "other"},
    "grown": {"files": ["b.jsonl"]},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk, which only a power cut would punish."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write(path: Path, first: int, last: int) -> None:
    rows = [{"prompt": f"question {i} about thing {i * i}", "completion": "x"} for i in range(first, last)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def made(root: Path, **values: Any) -> Version:
    config = {"name": "q", "files": ["a.jsonl"], "steps": ["exact", "normalise"], "workspace": root, "engine": "inline"}
    return build({**config, **values})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "a.jsonl", 0, 20)
    write(tmp_path / "b.jsonl", 20, 25)
    return tmp_path


@pytest.mark.parametrize(
    ("damage", "phase", "again"),
    [
        ("a flipped bit", -1, "the same"),
        ("a flipped bit", 0, "grown"),
        ("a flipped bit", 0, "another name"),
        ("gone", 0, "the same"),
        ("gone", -1, "fresh"),
        ("gone", -1, "grown"),
    ],
)
def test_made_again(root: Path, damage: str, phase: int, again: str, caplog: pytest.LogCaptureFixture) -> None:
    version = made(root)
    records = version.records()
    folder = root / ".posttrain" / "artifacts" / version.meta["phases"][phase][0]
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        file = folder / "records.parquet"
        content = bytearray(file.read_bytes())
        content[60] ^= 255
        file.chmod(0o644)
        file.write_bytes(content)
    after = made(root, **AGAIN[again])
    assert folder.name in caplog.text, "what is made again is said"
    assert after.records().slice(0, 20).equals(records)
    assert after.records().num_rows == (25 if again == "grown" else 20)
    assert (after.id == version.id) == (again != "grown")
    assert list(after.rejected()) is not None
    caplog.clear()
    assert made(root).records().num_rows >= 20
    assert not caplog.text, "whole again"


def test_a_lost_shard_of_a_lost_file_is_an_error(root: Path) -> None:
    version = made(root)
    shutil.rmtree(root / ".posttrain" / "artifacts" / version.meta["phases"][0][0])
    (root / "a.jsonl").unlink()
    with pytest.raises(Exception, match=r"a\.jsonl: there is no such file") as error:
        made(root, files=["b.jsonl"])
    assert not isinstance(error.value, DamagedArtifactError)
