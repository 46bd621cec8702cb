"""Training data that leaks test records is refused, data of models is kept, and names are checked before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.store.workspace import Workspace

Call = Callable[..., Any]
ROWS = [
    {"prompt": f"question {number * 7919} about thing {number}", "completion": "xy"[number % 2]} for number in range(20)
]
INLINE = ("--engine", "inline")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_config(root: Path, **data: Any) -> None:
    config = {"model": "tiny", "task": {"labels": ["x", "y"]}, "data": data}
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "f.jsonl", ROWS)
    return tmp_path


def artifacts(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".posttrain").glob("artifacts/*"))


def test_a_test_file_among_the_training_files_is_refused(root: Path, posttrain: Call) -> None:
    write(root / "t.jsonl", ROWS)
    write_config(root, labelled=["f.jsonl"], test=["t.jsonl"], steps=["exact"])
    message = posttrain("data", "add", root / "f.jsonl", "--name", "x", *INLINE, "-w", root).mistake
    assert message.startswith("t.jsonl: all 20 records of the suite stand in the training files")
    assert artifacts(root) == []


@pytest.mark.parametrize("name", ["train", "labelled@v1"])
def test_a_training_set_that_leaks_the_test_set_is_refused(root: Path, posttrain: Call, name: str) -> None:
    write_config(root, labelled=["f.jsonl"], test=0.2)
    outcome = posttrain("run", "--until", "collect", "-w", root)
    assert outcome.code == 0, outcome
    with Workspace.open(root) as store:
        labelled = str(store.metadata.named("labelled"))
        # A training set that was built for another test set.
        with store.artifacts.temporary_folder() as folder:
            records = store.artifacts.path(labelled)
            for file in ("records.parquet", "rejected.parquet", "dataset.json"):
                (folder / file).write_bytes((records / file).read_bytes())
            leaking_set = store.artifacts.commit(
                folder, "dataset", {"counts": {"records": 15, "rejected": 0}, "name": "test"}
            )
        store.metadata.add_artifact(leaking_set)
        store.metadata.name_artifact("test", leaking_set.id)
        store.metadata.name_artifact("train", labelled)
    out = root / "out"
    message = posttrain("train", "--model", "tiny", "--data", name, "--out", out, "-w", root).mistake
    assert message.startswith(f"{name}: 15 records of train overlap with test, the first: f.jsonl:")
    assert "(train): the same input as f.jsonl:" in message
    assert not out.exists()


@pytest.mark.slow
def test_gc_keeps_the_training_data_of_a_model(root: Path, posttrain: Call) -> None:
    for number in range(3):
        write(root / "f.jsonl", ROWS[: 10 + number])
        assert posttrain("data", "add", root / "f.jsonl", "--name", "x", "--fresh", *INLINE, "-w", root).code == 0
    out, settings = root / "out", ("--set", "train.epochs=1", "--set", "train.max_length=64")
    assert posttrain("train", "--model", "tiny", "--data", "x@v1", "--out", out, *settings, "-w", root).code == 0
    with Workspace.open(root) as store:
        (run,) = store.metadata.consumers(store.metadata.resolve("x@v1"))
        assert (run.status, run.config["out"], run.round) == ("done", str(out), None)
    output = posttrain("data", "gc", "--keep", "1", "-w", root, "--json").json
    assert output["versions"] == ["x@v2.0.0"] or output["versions"] == ["x@v1.0.1"], output
    assert posttrain("data", "show", "x@v1", "-w", root, "--json").code == 0


def test_an_existing_version_number_is_refused_before_the_build(root: Path, posttrain: Call) -> None:
    add = ("data", "add", root / "f.jsonl", "--name", "x", "--version", "1.0.0", *INLINE, "-w", root)
    assert posttrain(*add).code == 0
    assert posttrain(*add).code == 0, "the same data is the same version"
    before = artifacts(root)
    write(root / "f.jsonl", ROWS[:5])
    assert "x@v1.0.0 is dataset-" in posttrain(*add).mistake
    assert artifacts(root) == before


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["a@b", "v1", "a b", "1.0.0", "v2.3.1", "", "-x", "a/b"])
def test_both_verbs_check_tags_by_the_same_rule(root: Path, posttrain: Call, tag: str) -> None:
    add = ("data", "add", root / "f.jsonl", "--name", "x", *INLINE, "-w", root)
    assert f"`{tag}` is not a tag" in posttrain(*add, "--tag", tag).mistake
    assert artifacts(root) == []
    assert posttrain(*add, "--tag", "production", "--tag", "very.good_2").code == 0
    assert f"`{tag}` is not a tag" in posttrain("data", "tag", "-w", root, "--", "x", tag).mistake
    assert posttrain("data", "tag", "x@production", "version-2", "-w", root).code == 0
