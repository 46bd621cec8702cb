"""A version does not depend on the folder of the workspace, even if its steps name files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.data.steps.step import RowStep
from posttrain.data.versions.named_versions import ids_processed_by
from posttrain.data.versions.recipe import parse_step
from posttrain.models.embedder_source import find_embedder
from posttrain.store.workspace import Workspace

Fill = Callable[[Path], None]


def lines(path: Path, *texts: str) -> None:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def records(path: Path, *texts: str) -> None:
    lines(path, *(json.dumps({"text": text}) for text in texts))


def quality_files(root: Path) -> None:
    records(root / "good.jsonl", *(f"A clear sentence on topic {i}, well written." for i in range(20)))
    records(root / "bad.jsonl", *(f"buy!!! cheap $$$ {i} click" for i in range(20)))


STEPS: list[tuple[Any, Fill]] = [
    ({"toxicity": {"words": "bad.txt"}}, lambda root: lines(root / "bad.txt", "frobnicate")),
    (
        {"quality": {"good": "good.jsonl", "bad": "bad.jsonl", "model": "kept", "quality_threshold": 0.01}},
        quality_files,
    ),
    (
        {"augment": {"methods": [{"method": "synonyms", "file": "words.txt"}]}},
        lambda root: lines(root / "words.txt", "question, query", "thing, matter"),
    ),
]


def workspace(root: Path, fill: Fill) -> Path:
    root.mkdir(parents=True)
    fill(root)
    rows = [{"prompt": f"question {i} about thing {i * i}", "completion": "x"} for i in range(12)]
    lines(root / "f.jsonl", *map(json.dumps, rows))
    return root


def build_version(root: Path, *steps: Any, **values: Any) -> Version:
    config = {"name": "s", "files": ["f.jsonl"], "steps": [*steps], "engine": "inline", "workspace": root}
    return build({**config, **values})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "fill"), STEPS, ids=lambda value: json.dumps(value) if isinstance(value, dict) else ""
)
def test_two_folders_give_the_same_version(tmp_path: Path, step: Any, fill: Fill) -> None:
    original, copy = (build_version(workspace(tmp_path / name, fill), "exact", step) for name in ("here", "far/away"))
    assert original.id == copy.id
    assert original.meta == copy.meta
    assert str(tmp_path) not in json.dumps(original.meta)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("perplexity", {}), ("difficulty", {"max_ifd": None})])
def test_a_step_with_a_model_gives_the_same_version_in_two_folders(
    tmp_path: Path, tiny_model: Path, name: str, settings: dict[str, Any]
) -> None:
    def fill(root: Path) -> None:
        shutil.copytree(tiny_model, root / "model")

    step = {name: {"model": "model", **settings}}
    original, copy = (build_version(workspace(tmp_path / name, fill), step) for name in ("here", "far/away"))
    assert original.id == copy.id


@pytest.mark.slow
def test_a_step_with_an_embedder_gives_the_same_version_in_two_folders(tmp_path: Path) -> None:
    def fill(root: Path) -> None:
        shutil.copytree(find_embedder("minilm"), root / "encoder")

    step = {"semantic": {"model": "encoder"}}
    original, copy = (build_version(workspace(tmp_path / name, fill), step) for name in ("here", "far/away"))
    assert original.id == copy.id


def test_the_recipe_holds_relative_paths_and_content_digests(tmp_path: Path) -> None:
    step, fill = STEPS[0]
    version = build_version(workspace(tmp_path / "w", fill), step)
    assert version.meta["recipe"]["steps"][0]["toxicity"]["words"] == "bad.txt"
    assert len(version.meta["keys"]["steps"][0]["words"]) == 64


def test_a_move_gives_a_minor_version_and_another_word_list_a_major_one(tmp_path: Path) -> None:
    step, fill = STEPS[0]
    build_version(workspace(tmp_path / "here", fill), step)
    moved_root = tmp_path / "there"
    (tmp_path / "here").rename(moved_root)
    lines(moved_root / "more.jsonl", json.dumps({"prompt": "something else altogether", "completion": "y"}))
    build_version(moved_root, step, files=["more.jsonl"])
    lines(moved_root / "bad.txt", "thing")
    build_version(moved_root, step, files=["more.jsonl"])
    with Workspace.open(moved_root) as store:
        assert [item.semantic for item in store.metadata.names("s")] == ["1.0.0", "1.1.0", "2.0.0"]


def test_splits_by_time_grow_by_minor_versions(tmp_path: Path) -> None:
    root = workspace(tmp_path / "w", lambda root: None)
    for name, days in (("a", range(1, 21)), ("b", range(21, 24))):
        rows = [
            {"prompt": f"{name} asks {day * 7919} of {day}", "completion": "x", "at": f"2024-01-{day:02}"}
            for day in days
        ]
        lines(root / f"{name}.jsonl", *map(json.dumps, rows))
    splits = {"test": 0.2, "by": "time", "time": "at", "near_duplicates": None}
    for name in ("a", "b"):
        build_version(root, "exact", files=[f"{name}.jsonl"], splits=splits)
    with Workspace.open(root) as store:
        assert [item.semantic for item in store.metadata.names("s")] == ["1.0.0", "1.1.0"]


def test_processed_records_are_known_after_a_move(tmp_path: Path) -> None:
    step, fill = STEPS[2]
    build_version(workspace(tmp_path / "here", fill), step)
    (tmp_path / "here").rename(tmp_path / "there")
    moved_step = parse_step(step).located(tmp_path / "there")
    assert isinstance(moved_step, RowStep)
    with Workspace.open(tmp_path / "there") as store:
        version = Version.open(store.artifacts, str(store.metadata.named("s")))
        assert ids_processed_by([version], moved_step) == set(version.records()["id"].to_pylist())
