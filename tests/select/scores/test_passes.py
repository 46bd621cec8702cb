"""Passes over records: what is kept is not scored again, whatever happens in between."""

import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.models.task import TaskConfig
from posttrain.select.scores.passes import (
    CachePartition,
    ScoreCache,
    ScoreGroup,
    ScoringInput,
    ScoringModel,
    cached_scores,
)

PROGRAM = Path(__file__).with_name("killed_passes.py")
MOMENTS = ["score:1", "kept:2", "rename:1", "score:3", "kept:1", "rename:2"]


class Counting:
    """A group whose score is the length of the input, and who was asked for it."""

    def __init__(self, **changes: Any) -> None:
        self.asked: list[str] = []
        settings = {"name": "length", "version": 1, "settings": {"a": 1}, "chunk_size": 3, **changes}
        self.group = ScoreGroup(score=self.score, **settings)

    def score(self, lm: Any, records: Sequence[ScoringInput]) -> pa.Table:
        self.asked += [item.prompt[0]["content"] for item in records]
        lengths = [float(len(item.prompt[0]["content"])) for item in records]
        return pa.table({"length": pa.array(lengths, pa.float64())})


def records(*texts: str) -> list[ScoringInput]:
    return [ScoringInput([{"role": "user", "content": text}]) for text in texts]


def model(id: str = "model-1", task: TaskConfig | None = None) -> ScoringModel:
    return ScoringModel(id, task or TaskConfig(), lambda: None)  # type: ignore[arg-type,return-value]


WORDS = ("a", "bb", "ccc", "dddd", "eeeee", "ffffff", "g")


def test_a_record_is_scored_once_and_only_new_ones_later(tmp_path: Path) -> None:
    cache, first = ScoreCache(tmp_path), Counting()
    result = cached_scores(first.group, model(), records("bb", "a", "bb"), cache)
    assert result["length"].to_pylist() == [2.0, 1.0, 2.0]
    assert result.column_names == ["length"]
    assert first.asked == ["bb", "a"]
    second = Counting()
    result = cached_scores(second.group, model(), records("a", "ccc", "bb"), cache)
    assert result["length"].to_pylist() == [1.0, 3.0, 2.0]
    assert second.asked == ["ccc"]


def test_a_model_is_loaded_only_for_what_is_new(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cached_scores(Counting().group, model(), records(*WORDS), cache)

    def refuse() -> Any:
        raise AssertionError("loaded")

    cached_scores(Counting().group, ScoringModel("model-1", TaskConfig(), refuse), records(*WORDS), cache)


@pytest.mark.parametrize(
    "other",
    [
        {"group": Counting(version=2)},
        {"group": Counting(settings={"a": 2})},
        {"group": Counting(name="another")},
        {"model": model("model-2")},
        {"model": model(task=TaskConfig(system="Be brief."))},
    ],
    ids=["version", "settings", "name", "model", "task"],
)
def test_what_the_numbers_depend_on_is_the_key(tmp_path: Path, other: dict[str, Any]) -> None:
    cache = ScoreCache(tmp_path)
    cached_scores(Counting().group, model(), records("a"), cache)
    counting = other.get("group", Counting())
    cached_scores(counting.group, other.get("model", model()), records("a"), cache)
    assert counting.asked == ["a"]


def test_without_a_folder_or_an_id_nothing_is_kept(tmp_path: Path) -> None:
    for cache, of in ((ScoreCache(), model()), (ScoreCache(tmp_path), model(""))):
        for _ in range(2):
            counting = Counting()
            cached_scores(counting.group, of, records("a"), cache)
            assert counting.asked == ["a"]
    assert list(tmp_path.iterdir()) == []


def test_no_records(tmp_path: Path) -> None:
    assert cached_scores(Counting().group, model(), [], ScoreCache(tmp_path)).column_names == ["length"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_chunk_is_named_and_scored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, number: int
) -> None:
    cache = ScoreCache(tmp_path)
    whole = cached_scores(Counting().group, model(), records(*WORDS), cache)
    chunks = sorted(tmp_path.rglob("*.chunk"))
    assert len(chunks) == 3
    before = {path.name: path.read_bytes() for path in chunks}
    content = bytearray(before[chunks[number].name])
    content[len(content) // 2] ^= 4
    chunks[number].write_bytes({"flip": bytes(content), "cut": bytes(content[:40]), "empty": b""}[damage])
    again = Counting()
    with caplog.at_level(logging.WARNING, "posttrain"):
        result = cached_scores(again.group, model(), records(*WORDS), cache)
    assert result.equals(whole)
    assert [record.getMessage() for record in caplog.records] == [
        f"{chunks[number]} is damaged; scoring its records again"
    ]
    assert 1 <= len(again.asked) <= 3
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.chunk")} == before


def test_what_a_killed_writer_left_goes(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cached_scores(Counting().group, model(), records("a"), cache)
    left = next(tmp_path.rglob("*.chunk")).parent / ".0123.chunk.x9"
    left.write_bytes(b"half")
    cached_scores(Counting().group, model(), records("a"), cache)
    assert not left.exists()


def test_only_models_of_use_are_kept(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    for id in ("model-1", "model-2", "model-3"):
        cached_scores(Counting().group, model(id), records("a"), cache)
    cache.keep_only({"model-1", "model-3", "model-9"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-1", "model-3"]


def test_a_chunk_reads_as_it_was_written(tmp_path: Path) -> None:
    shelf = CachePartition(tmp_path / "shelf")
    chunk = pa.table({"key": ["x", "y"], "groups": [[1, 2], []], "text": ["", "é"], "value": [float("nan"), 1.0]})
    shelf.write(chunk)
    (result,) = shelf.read()
    assert result.schema == chunk.schema
    assert str(result.to_pylist()) == str(chunk.to_pylist())


@pytest.mark.slow
def test_killed_again_and_again_no_record_is_scored_twice(tmp_path: Path, tiny_model: Path) -> None:
    """The scores are the same to the byte, and what was being scored at a kill is a chunk at most."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    whole.mkdir()
    killed.mkdir()
    subprocess.run([sys.executable, str(PROGRAM), str(tiny_model), str(whole), str(killed), *MOMENTS], check=True)
    assert (killed / "scores.parquet").read_bytes() == (whole / "scores.parquet").read_bytes()
    kept = Counter((killed / "scored.log").read_text().split("\n")[:-1])
    assert set(kept) == set((whole / "scored.log").read_text().split("\n")[:-1])
    # A line is missing where the kill came before the note, and none is there twice.
    assert max(kept.values()) == 1
    begun = Counter((killed / "begun.log").read_text().split("\n")[:-1])
    lost = sum(moment.startswith(("score", "rename")) for moment in MOMENTS)
    assert sum(begun.values()) - len(begun) <= lost * 4
    assert sum(begun.values()) > len(begun)
    names = {path.name: path.read_bytes() for path in (killed / "cache").rglob("*.*") if path.is_file()}
    assert names == {path.name: path.read_bytes() for path in (whole / "cache").rglob("*.*") if path.is_file()}
