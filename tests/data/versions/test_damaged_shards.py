"""Damaged and missing shards are built again by the next build that needs them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.store.errors import DamagedArtifactError

REBUILDS: dict[str, dict[str, Any]] = {
    "the same": {},
    "fresh": {"fresh": True},
    "another name": {"name": "other"},
    "grown": {"files": ["b.jsonl"]},
}


def write(path: Path, start: int, stop: int) -> None:
    rows = [{"prompt": f"question {i} about thing {i * i}", "completion": "x"} for i in range(start, stop)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_version(root: Path, **values: Any) -> Version:
    config = {"name": "q", "files": ["a.jsonl"], "steps": ["exact", "normalise"], "workspace": root, "engine": "inline"}
    return build({**config, **values})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "a.jsonl", 0, 20)
    write(tmp_path / "b.jsonl", 20, 25)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "phase", "rebuild"),
    [
        ("a flipped bit", -1, "the same"),
        ("a flipped bit", 0, "grown"),
        ("a flipped bit", 0, "another name"),
        ("gone", 0, "the same"),
        ("gone", -1, "fresh"),
        ("gone", -1, "grown"),
    ],
)
def test_a_damaged_shard_is_built_again(
    root: Path, damage: str, phase: int, rebuild: str, caplog: pytest.LogCaptureFixture
) -> None:
    version = build_version(root)
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
    rebuilt = build_version(root, **REBUILDS[rebuild])
    assert folder.name in caplog.text, "the rebuilt shard is logged"
    assert rebuilt.records().slice(0, 20).equals(records)
    assert rebuilt.records().num_rows == (25 if rebuild == "grown" else 20)
    assert (rebuilt.id == version.id) == (rebuild != "grown")
    caplog.clear()
    assert build_version(root).records().num_rows >= 20
    assert not caplog.text, "nothing is damaged any more"


def test_a_missing_shard_of_a_missing_file_raises(root: Path) -> None:
    version = build_version(root)
    shutil.rmtree(root / ".posttrain" / "artifacts" / version.meta["phases"][0][0])
    (root / "a.jsonl").unlink()
    with pytest.raises(Exception, match=r"a\.jsonl: there is no such file") as error:
        build_version(root, files=["b.jsonl"])
    assert not isinstance(error.value, DamagedArtifactError)
