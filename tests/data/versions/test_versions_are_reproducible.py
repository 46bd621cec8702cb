"""The version id does not depend on the engine, on kills, or on growth in steps."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from killed_build import PIECE_BYTES, SPLITS, STEPS, build_in

from posttrain.data import Version, build
from posttrain.data.reading import pieces as cutting
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow

RECORDS = {"a": 100, "b": 60, "c": 30}
"""By file; the first is cut into more pieces than there are workers."""


def write_records(path: Path, count: int, seed: int) -> None:
    """Messages with duplicates, near duplicates and long repeats of earlier ones."""
    generator = random.Random(seed)
    words = [f"{a}{b}" for a in ("ba", "do", "ki", "lu", "me", "no") for b in ("ra", "ti", "so", "pe", "nu")]
    texts: list[str] = []
    for _ in range(count):
        draw = generator.random()
        text = " ".join(generator.choice(words) for _ in range(generator.randint(1, 40)))
        if texts and draw < 0.1:
            text = generator.choice(texts)
        elif texts and draw < 0.25:
            text = f"{generator.choice(texts)} {generator.choice(words)}"
        elif texts and draw < 0.4:
            text = " ".join([*text.split(), *generator.choice(texts).split()[:20], *text.split()[::-1]])
        elif draw < 0.45:
            text = "  café  \n" + text
        texts.append(text)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes in several pieces; no fsync, which only a power cut needs."""
    monkeypatch.setattr(cutting, "MAX_PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(cutting, "BLOCK_BYTES", PIECE_BYTES // 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


Make = Callable[..., Version]


@pytest.fixture
def make(tmp_path: Path, small_pieces: None) -> Make:
    """``make("workspace", ["a", "b"], ...)``: a version of the files a and b in a workspace of that name."""

    def version(name: str, files: list[str], **values: Any) -> Version:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        for file in ("a", "b", "c"):
            if not (root / f"{file}.jsonl").exists():
                write_records(root / f"{file}.jsonl", RECORDS[file], ord(file))
        config = {"name": "set", "files": [f"{file}.jsonl" for file in files], "workspace": root, "engine": "inline"}
        return build({**config, "steps": STEPS, "splits": SPLITS, **values})

    return version


def test_every_engine_builds_the_same_version(make: Make) -> None:
    inline = make("inline", ["a"])
    assert len(inline.phases) == 3
    assert all(len(shards) > 2 for shards in inline.phases)
    assert inline.id == make("processes", ["a"], engine="processes", workers=2).id
    assert inline.id == make("ray", ["a"], engine="ray", workers=2).id


def test_a_grown_version_equals_one_built_at_once(make: Make) -> None:
    make("grown", ["b"])
    grown_version = make("grown", ["c"])
    at_once = make("at once", ["b", "c"])
    assert grown_version.meta == at_once.meta
    assert grown_version.id == at_once.id


def test_what_was_found_among_other_records_is_not_reused(make: Make, tmp_path: Path) -> None:
    """The first file has as many records as before, and others."""
    make("changed", ["a", "b"], steps=["minhash"], splits=None)
    for name in ("changed", "fresh"):
        (tmp_path / name).mkdir(exist_ok=True)
        write_records(tmp_path / name / "a.jsonl", RECORDS["a"], 7)
    changed, fresh = (make(name, ["a", "b"], steps=["minhash"], splits=None) for name in ("changed", "fresh"))
    assert changed.id == fresh.id


def test_growth_reads_only_new_files_and_moves_no_record(make: Make, tmp_path: Path) -> None:
    version = make("one", ["b"])
    (tmp_path / "one" / "b.jsonl").unlink()
    (tmp_path / "one" / "b.jsonl").symlink_to("nowhere")
    grown = make("one", ["c"])
    ids_by_split = {split: set(version.records(split)["id"].to_pylist()) for split in version.splits}
    for split, ids in ids_by_split.items():
        new_ids = set(grown.records(split)["id"].to_pylist())
        other_ids = set(grown.records()["id"].to_pylist()) - new_ids
        assert not ids & other_ids
    assert grown.count("train") > version.count("train")


def test_a_repeated_build_gives_the_same_version(make: Make) -> None:
    version = make("one", ["b"])
    assert make("one", ["b"]).id == version.id
    with Workspace.open(version.folder.parents[2]) as workspace:
        assert [named.text for named in workspace.metadata.names("set")] == ["set@v1.0.0"]


def test_every_record_is_in_the_version_or_among_the_rejected(make: Make) -> None:
    version = make("one", ["a"])
    records = [(row["source"], row["line"]) for row in version.records().to_pylist()]
    rejections = [(row["source"], row["line"]) for table in version.rejected() for row in table.to_pylist()]
    assert sorted(records + rejections) == [("a.jsonl", line) for line in range(1, RECORDS["a"] + 1)]
    funnel = [entry["count"] for entry in version.meta["funnel"]]
    assert funnel[0] == RECORDS["a"] == sum(funnel[1:])
    assert version.meta["counts"]["rejected"] == len(rejections)
    reasons = {row["reason"] for table in version.rejected() for row in table.to_pylist()}
    assert {"exact duplicate", "near duplicate"} <= reasons


def test_a_build_killed_at_random_times_gives_the_same_version(make: Make, tmp_path: Path) -> None:
    expected = make("whole", ["b"])
    assert all(len(shards) > 1 for shards in expected.phases)

    def run(root: Path, seconds: float | None) -> bool:
        """Returns True if the process was killed after ``seconds``, False if it finished before."""
        process = forked.FORKS.Process(target=build_in, args=(root,))
        process.start()
        process.join(seconds)
        alive = process.is_alive()
        process.kill()
        process.join()
        assert alive or process.exitcode == 0
        return alive

    def workspace(name: str) -> Path:
        root = tmp_path / name
        root.mkdir()
        write_records(root / "b.jsonl", RECORDS["b"], ord("b"))
        return root

    assert not run(workspace("warm"), None)  # the first fork waits for the server's imports
    start = time.monotonic()
    assert not run(workspace("timed"), None)
    seconds = time.monotonic() - start
    generator = random.Random(1)
    kills = attempt = 0
    while kills < 5:
        attempt += 1
        root = workspace(f"attempt {attempt}")
        for _ in range(3):  # and once again, and again
            if not run(root, generator.uniform(0, seconds)):
                break
            kills += 1
        assert make(root.name, ["b"]).id == expected.id
