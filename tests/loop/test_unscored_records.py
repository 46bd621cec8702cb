"""A pool of which the champion scores only a sample."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from posttrain.inspect.explanation import record_rounds
from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.loop.record import read_rounds
from posttrain.loop.selection_report import selection_section
from posttrain.loop.selections import read_selections
from posttrain.report.section import Fold

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]

SELECT = {"pool_sample": 15, "strategy": "facility_location", "options": {"by": "entropy"}, "explore": 0.25}


@pytest.fixture(scope="module")
def sampled_workspace(begun_workspace: Path, small_anywhere: Any, loop_class: Any, build_once: Any) -> Path:
    """A workspace after two rounds in which the champion scored a sample."""

    def build(folder: Path) -> None:
        shutil.copytree(begun_workspace, folder, symlinks=True)
        small_anywhere(folder.parent).configure(folder, select=SELECT)
        loop = loop_class(folder)
        loop.run(1)
        loop.run(2, until="label")
        loop.store.close()

    return Path(build_once("sampled", build))


@pytest.fixture
def sampled_loop(sampled_workspace: Path, open_loop: Open, tmp_path: Path) -> Any:
    """The loop of a copy of `sampled_workspace`."""
    return open_loop(shutil.copytree(sampled_workspace, tmp_path / "sampled", symlinks=True))


def selection_of(loop: Any, round: int) -> Path:
    """The folder of a round's selection."""
    result: Path = loop.store.artifacts.path(loop.metadata.rounds()[round].detail["selection"])
    return result


def scores_and_batch(loop: Any, round: int) -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    """The metadata of a round's scores, their folder, and its batch."""
    detail = loop.metadata.rounds()[round].detail
    batch = parquet.read_table(selection_of(loop, round) / "batch.parquet").to_pylist()
    scores = loop.store.artifacts
    return scores.get(detail["scores"]).meta, scores.path(detail["scores"]), batch


def test_the_champion_scores_a_sample_and_the_batch_is_chosen_from_all(sampled_loop: Any) -> None:
    loop = sampled_loop
    cold, _, _ = scores_and_batch(loop, 1)
    assert (cold["sampled"], cold["pool"], cold["unscored"]) == (60, 60, 0)
    warm, folder, batch = scores_and_batch(loop, 2)
    assert (warm["sampled"], warm["pool"], warm["unscored"]) == (15, 48, 33)
    scored = parquet.read_table(folder / "scores.parquet")
    unscored = parquet.read_table(folder / "unscored.parquet")
    assert scored["predicted"].null_count == 0
    assert unscored["predicted"].null_count == 33
    assert len({*scored["id"].to_pylist(), *unscored["id"].to_pylist()}) == 48
    explored = [row for row in batch if row["reason"] == "explore"]
    assert len(explored) == 3
    assert {row["id"] for row in explored} <= set(scored["id"].to_pylist())
    scored_later = parquet.read_table(selection_of(loop, 2) / "asked_since.parquet")
    assert scored_later.schema.equals(scored.schema)
    assert (
        set(scored_later["id"].to_pylist()) == {row["id"] for row in batch} & set(unscored["id"].to_pylist()) != set()
    )
    score_rows = {row["id"]: row for row in [*scored.to_pylist(), *scored_later.to_pylist()]}
    for row in batch:
        assert (row["predicted"], row["uncertainty"]) == (
            score_rows[row["id"]]["predicted"],
            score_rows[row["id"]]["entropy"],
        )
    map_points = parquet.read_table(selection_of(loop, 2) / "map.parquet")
    kinds = map_points["kind"].to_pylist()
    assert (kinds.count("chosen"), kinds.count("pool"), kinds.count("labelled")) == (12, 36, 12)


def test_a_curriculum_uses_the_champions_scores_of_the_whole_batch(
    small: Any, sampled_loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    curriculum = {"name": "fixed", "duration": 0.5, "start": 0.5, "difficulty": "entropy"}
    small.configure(sampled_loop.root, select=SELECT, train={"phases": [{"epochs": 2, "curriculum": curriculum}]})
    sampled_loop.run(2, until="train")
    assert "12 of 24 records have the score `entropy`" in caplog.text


def test_the_report_shows_how_many_records_were_scored(sampled_loop: Any) -> None:
    loop = sampled_loop
    cold, warm = read_selections(read_rounds(loop.store))
    assert (cold.scored, cold.embedded, cold.pool) == (0, 60, 60)
    assert (warm.scored, warm.embedded, warm.pool) == (15, 48, 48)
    assert len(warm.scores) == 15
    assert all(entry.score is not None for entry in warm.chosen)
    scored_before = len({entry.id for entry in warm.chosen}) - len(warm.scored_since)
    assert 0 < scored_before < 12
    summaries = [block.remark for block in selection_section([cold, warm]).blocks if isinstance(block, Fold)]
    assert summaries == [
        "12 of 48 embedded, 15 of them scored, by facility_location",
        "12 of 60 embedded, by facility_location",
    ]


def test_the_rounds_of_a_record_show_whether_it_was_scored(sampled_loop: Any) -> None:
    loop = sampled_loop
    _, folder, batch = scores_and_batch(loop, 2)
    context = RoundContext(loop.store, load_config(loop.root), 3, in_round=False)
    pool = context.dataset(loop.metadata.rounds()[2].detail["queried_pool"]).records
    inputs = dict(zip(pool["id"].to_pylist(), pool["input_id"].to_pylist(), strict=True))
    scored_later = parquet.read_table(selection_of(loop, 2) / "asked_since.parquet").to_pylist()
    unscored = set(parquet.read_table(folder / "unscored.parquet")["id"].to_pylist())
    round_entry = record_rounds(context, inputs[scored_later[0]["id"]])[-1]
    assert (round_entry["round"], round_entry["chosen"] is not None) == (2, True)
    assert round_entry["scores"]["entropy"] == scored_later[0]["entropy"]
    round_entry = record_rounds(context, inputs[min(unscored - {row["id"] for row in batch})])[-1]
    assert (round_entry["round"], round_entry["chosen"]) == (2, None)
    assert round_entry["scores"]["predicted"] is None


def test_with_pool_embedded_zero_only_the_sample_is_embedded(
    small: Any, begun_loop: Callable[..., Any], copied_loop: Any
) -> None:
    select = {**SELECT, "pool_embedded": 0}
    loop = begun_loop(select=select)
    loop.run(1, until="select")
    small.configure(copied_loop.root, select=select)
    copied_loop.run(3, until="select")
    for scored, round, pool_size in ((loop, 1, 60), (copied_loop, 3, 36)):
        meta, folder, _ = scores_and_batch(scored, round)
        assert (meta["sampled"], meta["pool"], meta["unscored"]) == (15, pool_size, 0)
        assert not (folder / "unscored.parquet").exists()


def test_a_sample_is_scored_for_written_answers_too(written_loop: Callable[..., Any]) -> None:
    loop = written_loop(select={**SELECT, "explore": 0})
    loop.run(2, until="select")
    meta, folder, batch = scores_and_batch(loop, 2)
    scored_ids = set(parquet.read_table(folder / "scores.parquet")["id"].to_pylist())
    assert meta["unscored"] > 0
    assert {row["id"] for row in batch} - scored_ids
    assert all(row["predicted"] is not None and row["uncertainty"] >= 0 for row in batch)
