"""One version id, whatever the engine, however often it was killed, and whether it was grown or built at once."""

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import Version, build
from posttrain.data.reading import pieces as cutting
from posttrain.store.workspace import Workspace

pytestmark = pytest.mark.slow

STEPS: list[Any] = [
    "normalise",
    "exact",
    "minhash",
    {"length": {"input": {"min_words": 2}}},
    {"substring": {"length": 12}},
    "decontaminate",
]
SPLITS = {"test": 0.2, "validation": 0.1}
"""A row step after a global one, and one that rewrites: three phases."""
PIECE_BYTES = 4_000
RECORDS = {"a": 150, "b": 60, "c": 30}
"""By file; the first is cut into more pieces than there are workers."""


def write_records(path: Path, count: int, seed: int) -> None:
    """Messages of which some stand there twice, nearly twice, or hold much of an earlier one."""
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
    """Files of a few kilobytes in several pieces; no waiting for the disk, which only a power cut would punish."""
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


def test_every_engine_makes_the_same_version(make: Make) -> None:
    inline = make("inline", ["a"])
    assert len(inline.phases) == 3
    assert all(len(shards) > 4 for shards in inline.phases)
    assert inline.id == make("processes", ["a"], engine="processes", workers=4).id
    assert inline.id == make("ray", ["a"], engine="ray", workers=2).id


def test_a_grown_version_is_the_one_built_at_once(make: Make) -> None:
    make("grown", ["a"])
    make("grown", ["b"])
    grown = make("grown", ["c"])
    at_once = make("at once", ["a", "b", "c"])
    assert grown.meta == at_once.meta
    assert grown.id == at_once.id


def test_growth_reads_only_what_is_new_and_moves_no_record(make: Make, tmp_path: Path) -> None:
    before = make("one", ["a"])
    (tmp_path / "one" / "a.jsonl").unlink()
    (tmp_path / "one" / "a.jsonl").symlink_to("nowhere")
    after = make("one", ["b"])
    sides = {split: set(before.records(split)["id"].to_pylist()) for split in before.splits}
    for split, ids in sides.items():
        now = set(after.records(split)["id"].to_pylist())
        others = set(after.records()["id"].to_pylist()) - now
        assert not ids & others
    assert after.count("train") > before.count("train")


def test_the_same_again_is_the_same_version(make: Make) -> None:
    assert make("one", ["a"]).id == make("one", ["a"]).id
    with Workspace.open(make("one", ["a"]).folder.parents[2]) as workspace:
        assert [named.text for named in workspace.metadata.names("set")] == ["set@v1.0.0"]


def test_every_record_is_in_the_version_or_among_the_rejected(make: Make) -> None:
    version = make("one", ["a"])
    kept = [(row["source"], row["line"]) for row in version.records().to_pylist()]
    rejections = [(row["source"], row["line"]) for table in version.rejected() for row in table.to_pylist()]
    assert sorted(kept + rejections) == [("a.jsonl", line) for line in range(1, 151)]
    funnel = [entry["count"] for entry in version.meta["funnel"]]
    assert funnel[0] == 150 == sum(funnel[1:])
    assert version.meta["counts"]["rejected"] == len(rejections)
    reasons = {row["reason"] for table in version.rejected() for row in table.to_pylist()}
    assert {"exact duplicate", "near duplicate"} <= reasons


def build_in(root: Path) -> None:
    """What a killed process does."""
    cutting.MAX_PIECE_BYTES, cutting.BLOCK_BYTES = PIECE_BYTES, PIECE_BYTES // 2
    os.fsync = lambda descriptor: None
    config = {"name": "set", "files": ["b.jsonl"], "workspace": root, "engine": "inline"}
    build({**config, "steps": STEPS, "splits": SPLITS})


def test_killed_at_twenty_random_moments(make: Make, tmp_path: Path) -> None:
    whole = make("whole", ["b"])
    assert all(len(shards) > 1 for shards in whole.phases)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__, "rensa", "pandas", "pyarrow.dataset", "alembic.config"])

    def run(root: Path, seconds: float | None) -> bool:
        """Whether the process was killed after so many seconds, rather than done before."""
        process = forks.Process(target=build_in, args=(root,))
        process.start()
        process.join(seconds)
        killed = process.is_alive()
        process.kill()
        process.join()
        assert killed or process.exitcode == 0
        return killed

    def workspace(name: str) -> Path:
        root = tmp_path / name
        root.mkdir()
        write_records(root / "b.jsonl", RECORDS["b"], ord("b"))
        return root

    assert not run(workspace("warm"), None)  # the first fork waits for the server's imports
    began = time.monotonic()
    assert not run(workspace("timed"), None)
    seconds = time.monotonic() - began
    generator = random.Random(1)
    kills = attempt = 0
    while kills < 20:
        attempt += 1
        root = workspace(f"attempt {attempt}")
        for _ in range(3):  # and once again, and again
            if not run(root, generator.uniform(0, seconds)):
                break
            kills += 1
        assert make(root.name, ["b"]).id == whole.id
