"""Passes over records: cached scores are not computed again, even after a kill or a damaged file."""

import logging
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


class LengthScorer:
    """A group whose score is the length of the input; records the texts that it scores."""

    def __init__(self, **changes: Any) -> None:
        self.scored: list[str] = []
        settings = {"name": "length", "version": 1, "settings": {"a": 1}, "chunk_size": 3, **changes}
        self.group = ScoreGroup(score=self.score, **settings)

    def score(self, lm: Any, records: Sequence[ScoringInput]) -> pa.Table:
        self.scored += [item.prompt[0]["content"] for item in records]
        lengths = [float(len(item.prompt[0]["content"])) for item in records]
        return pa.table({"length": pa.array(lengths, pa.float64())})


def records(*texts: str) -> list[ScoringInput]:
    return [ScoringInput([{"role": "user", "content": text}]) for text in texts]


def model(id: str = "model-1", task: TaskConfig | None = None) -> ScoringModel:
    return ScoringModel(id, task or TaskConfig(), lambda: None)  # type: ignore[arg-type,return-value]


WORDS = ("a", "bb", "ccc", "dddd", "eeeee", "ffffff", "g")


def test_only_new_records_are_scored(tmp_path: Path) -> None:
    cache, first = ScoreCache(tmp_path), LengthScorer()
    result = cached_scores(first.group, model(), records("bb", "a", "bb"), cache)
    assert result["length"].to_pylist() == [2.0, 1.0, 2.0]
    assert result.column_names == ["length"]
    assert first.scored == ["bb", "a"]
    second = LengthScorer()
    result = cached_scores(second.group, model(), records("a", "ccc", "bb"), cache)
    assert result["length"].to_pylist() == [1.0, 3.0, 2.0]
    assert second.scored == ["ccc"]


def test_a_model_is_loaded_only_for_new_records(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cached_scores(LengthScorer().group, model(), records(*WORDS), cache)

    def refuse() -> Any:
        raise AssertionError("loaded")

    cached_scores(LengthScorer().group, ScoringModel("model-1", TaskConfig(), refuse), records(*WORDS), cache)


@pytest.mark.parametrize(
    "other",
    [
        {"group": LengthScorer(version=2)},
        {"group": LengthScorer(settings={"a": 2})},
        {"group": LengthScorer(name="another")},
        {"model": model("model-2")},
        {"model": model(task=TaskConfig(system="Be brief."))},
    ],
    ids=["version", "settings", "name", "model", "task"],
)
def test_the_cache_key_has_everything_that_scores_depend_on(tmp_path: Path, other: dict[str, Any]) -> None:
    cache = ScoreCache(tmp_path)
    cached_scores(LengthScorer().group, model(), records("a"), cache)
    scorer = other.get("group", LengthScorer())
    cached_scores(scorer.group, other.get("model", model()), records("a"), cache)
    assert scorer.scored == ["a"]


def test_without_a_folder_or_an_id_nothing_is_cached(tmp_path: Path) -> None:
    for cache, scoring_model in ((ScoreCache(), model()), (ScoreCache(tmp_path), model(""))):
        for _ in range(2):
            scorer = LengthScorer()
            cached_scores(scorer.group, scoring_model, records("a"), cache)
            assert scorer.scored == ["a"]
    assert list(tmp_path.iterdir()) == []


def test_no_records(tmp_path: Path) -> None:
    assert cached_scores(LengthScorer().group, model(), [], ScoreCache(tmp_path)).column_names == ["length"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_chunk_is_named_and_scored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, number: int
) -> None:
    cache = ScoreCache(tmp_path)
    whole = cached_scores(LengthScorer().group, model(), records(*WORDS), cache)
    chunks = sorted(tmp_path.rglob("*.chunk"))
    assert len(chunks) == 3
    before = {path.name: path.read_bytes() for path in chunks}
    content = bytearray(before[chunks[number].name])
    content[len(content) // 2] ^= 4
    chunks[number].write_bytes({"flip": bytes(content), "cut": bytes(content[:40]), "empty": b""}[damage])
    again = LengthScorer()
    with caplog.at_level(logging.WARNING, "posttrain"):
        result = cached_scores(again.group, model(), records(*WORDS), cache)
    assert result.equals(whole)
    assert [record.getMessage() for record in caplog.records] == [f"{chunks[number]} is damaged: it is computed again"]
    assert 1 <= len(again.scored) <= 3
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*.chunk")} == before


def test_an_unfinished_file_of_another_writer_is_ignored(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    cached_scores(LengthScorer().group, model(), records("a"), cache)
    unfinished = next(tmp_path.rglob("*.chunk")).parent / ".0123.chunk.x9"
    unfinished.write_bytes(b"half")
    again = LengthScorer()
    cached_scores(again.group, model(), records("a"), cache)
    assert again.scored == []
    assert unfinished.exists()


def test_only_the_listed_models_stay_in_the_cache(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path)
    for id in ("model-1", "model-2", "model-3"):
        cached_scores(LengthScorer().group, model(id), records("a"), cache)
    cache.keep_only({"model-1", "model-3", "model-9"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-1", "model-3"]


def test_a_chunk_is_read_back_unchanged(tmp_path: Path) -> None:
    partition = CachePartition(tmp_path / "partition")
    chunk = pa.table({"key": ["x", "y"], "groups": [[1, 2], []], "text": ["", "é"], "value": [float("nan"), 1.0]})
    partition.write(chunk)
    (result,) = partition.read()
    assert result.schema == chunk.schema
    assert str(result.to_pylist()) == str(chunk.to_pylist())
