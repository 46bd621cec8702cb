"""A pool that is larger than what the champion is asked of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from posttrain.inspect.explanation import record_rounds
from posttrain.inspect.preview import preview_selection
from posttrain.loop.config import load_config
from posttrain.loop.context import RoundContext
from posttrain.web.selection import read_selections
from posttrain.web.selection_view import selections_view

pytestmark = pytest.mark.slow

Open = Callable[[Path], Any]

SELECT = {"pool_sample": 15, "strategy": "facility_location", "options": {"by": "entropy"}, "explore": 0.25}


def selection_of(loop: Any, round: int) -> Path:
    """The folder of what a round chose."""
    result: Path = loop.store.artifacts.path(loop.metadata.rounds()[round].detail["selection"])
    return result


def parts(loop: Any, round: int) -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    """What a round noted of its scores, their folder, and its batch."""
    detail = loop.metadata.rounds()[round].detail
    batch = parquet.read_table(selection_of(loop, round) / "batch.parquet").to_pylist()
    scores = loop.store.artifacts
    return scores.get(detail["scores"]).meta, scores.path(detail["scores"]), batch


def test_a_sample_is_scored_and_the_batch_chosen_from_all(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(select=SELECT))
    loop.run()
    cold, _, _ = parts(loop, 1)
    assert (cold["sampled"], cold["pool"], cold["unasked"]) == (60, 60, 0)
    warm, folder, batch = parts(loop, 2)
    assert (warm["sampled"], warm["pool"], warm["unasked"]) == (15, 48, 33)
    asked = parquet.read_table(folder / "scores.parquet")
    unasked = parquet.read_table(folder / "unasked.parquet")
    assert asked["predicted"].null_count == 0
    assert unasked["predicted"].null_count == 33
    assert len({*asked["id"].to_pylist(), *unasked["id"].to_pylist()}) == 48
    drawn = [row for row in batch if row["reason"] == "explore"]
    assert len(drawn) == 3
    assert {row["id"] for row in drawn} <= set(asked["id"].to_pylist())
    since = parquet.read_table(selection_of(loop, 2) / "asked_since.parquet")
    assert since.schema.equals(asked.schema)
    assert set(since["id"].to_pylist()) == {row["id"] for row in batch} & set(unasked["id"].to_pylist()) != set()
    output = {row["id"]: row for row in [*asked.to_pylist(), *since.to_pylist()]}
    for row in batch:
        assert (row["predicted"], row["uncertainty"]) == (output[row["id"]]["predicted"], output[row["id"]]["entropy"])
    places = parquet.read_table(selection_of(loop, 2) / "map.parquet")
    kinds = places["kind"].to_pylist()
    assert (kinds.count("chosen"), kinds.count("pool"), kinds.count("labelled")) == (12, 36, 12)


def test_a_curriculum_knows_the_champions_scores_of_the_batch(
    small: Any, open_loop: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    curriculum = {"name": "fixed", "duration": 0.5, "start": 0.5, "difficulty": "entropy"}
    loop = open_loop(small(select=SELECT, train={"curriculum": curriculum}))
    loop.run()
    assert "`entropy` is known of 12 of 24 records" in caplog.text


def test_the_report_shows_how_many_were_scored(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(select=SELECT))
    loop.run()
    cold, warm = read_selections(loop.store)
    assert (cold.scored, cold.embedded, cold.pool) == (0, 60, 60)
    assert (warm.scored, warm.embedded, warm.pool) == (15, 48, 48)
    assert len(warm.scores) == 15
    assert all(entry.score is not None for entry in warm.chosen)
    scored_before = len({entry.id for entry in warm.chosen}) - len(warm.scored_since)
    assert 0 < scored_before < 12
    output = [entry.summary for entry in selections_view([cold, warm]).rounds]
    assert output == [
        "12 of 48 embedded, 15 of them scored, by facility_location",
        "12 of 60 embedded, by facility_location",
    ]


def test_a_records_rounds_show_whether_it_was_scored(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(select=SELECT))
    loop.run()
    _, folder, batch = parts(loop, 2)
    context = RoundContext(loop.store, load_config(loop.root), 3, in_round=False)
    pool = context.dataset(loop.metadata.rounds()[2].detail["asked"]).records
    inputs = dict(zip(pool["id"].to_pylist(), pool["input_id"].to_pylist(), strict=True))
    since = parquet.read_table(selection_of(loop, 2) / "asked_since.parquet").to_pylist()
    unasked = set(parquet.read_table(folder / "unasked.parquet")["id"].to_pylist())
    recorded = record_rounds(context, inputs[since[0]["id"]])[-1]
    assert (recorded["round"], recorded["chosen"] is not None) == (2, True)
    assert recorded["scores"]["entropy"] == since[0]["entropy"]
    recorded = record_rounds(context, inputs[min(unasked - {row["id"] for row in batch})])[-1]
    assert (recorded["round"], recorded["chosen"]) == (2, None)
    assert recorded["scores"]["predicted"] is None


def test_no_more_is_embedded_where_the_config_says_so(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(select={**SELECT, "pool_embedded": 0}))
    loop.run()
    for round, left in ((1, 60), (2, 48)):
        meta, folder, _ = parts(loop, round)
        assert (meta["sampled"], meta["pool"], meta["unasked"]) == (15, left, 0)
        assert not (folder / "unasked.parquet").exists()


def test_the_next_batch_is_what_a_round_would_choose(small: Any, open_loop: Open) -> None:
    root = small(rounds=1, select=SELECT)
    loop = open_loop(root)
    loop.run()
    shown = preview_selection(loop.store, load_config(root)).records
    small.configure(root, rounds=2, select=SELECT)
    loop.run()
    assert [row["id"] for row in shown] == [row["id"] for row in parts(loop, 2)[2]]
    assert all(row["predicted"] is not None for row in shown)


def test_written_answers_are_scored_too(small: Any, open_loop: Open) -> None:
    loop = open_loop(small(select={**SELECT, "explore": 0}, task={"labels": None}, label={"per_round": 6}))
    loop.run()
    meta, folder, batch = parts(loop, 2)
    asked = set(parquet.read_table(folder / "scores.parquet")["id"].to_pylist())
    assert meta["unasked"] > 0
    assert {row["id"] for row in batch} - asked
    assert all(row["predicted"] is not None and row["uncertainty"] >= 0 for row in batch)
