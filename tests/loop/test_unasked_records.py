"""A pool that is larger than what the champion is asked of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from posttrain.loop.config import load_config
from posttrain.loop.preview import preview_selection

Open = Callable[[Path], Any]

SELECT = {"pool_sample": 15, "strategy": "facility_location", "options": {"by": "entropy"}, "explore": 0.25}


def parts(loop: Any, round: int) -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    """What a round noted of its scores, their folder, and its batch."""
    detail = loop.metadata.rounds()[round].detail
    batch = parquet.read_table(loop.store.artifacts.path(detail["selection"]) / "batch.parquet").to_pylist()
    scores = loop.store.artifacts
    return scores.get(detail["scores"]).meta, scores.path(detail["scores"]), batch


def test_the_champion_is_asked_some_and_chooses_from_all(small: Any, turned: Open) -> None:
    loop = turned(small(select=SELECT))
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
    beyond = [row for row in batch if row["id"] in set(unasked["id"].to_pylist())]
    assert beyond
    assert all(row["predicted"] is not None and row["uncertainty"] >= 0 for row in batch)
    places = parquet.read_table(folder.parent / loop.metadata.rounds()[2].detail["selection"] / "map.parquet")
    kinds = places["kind"].to_pylist()
    assert (kinds.count("chosen"), kinds.count("pool"), kinds.count("labelled")) == (12, 36, 12)


def test_no_more_is_embedded_where_the_config_says_so(small: Any, turned: Open) -> None:
    loop = turned(small(select={**SELECT, "pool_embedded": 0}))
    loop.run()
    for round, left in ((1, 60), (2, 48)):
        told, folder, _ = parts(loop, round)
        assert (told["sampled"], told["pool"], told["unasked"]) == (15, left, 0)
        assert not (folder / "unasked.parquet").exists()


def test_the_next_batch_is_what_a_round_would_choose(small: Any, turned: Open) -> None:
    root = small(rounds=1, select=SELECT)
    loop = turned(root)
    loop.run()
    shown = preview_selection(loop.store, load_config(root)).records
    small.configure(root, rounds=2, select=SELECT)
    loop.run()
    assert [row["id"] for row in shown] == [row["id"] for row in parts(loop, 2)[2]]
    assert all(row["predicted"] is not None for row in shown)


def test_written_answers_are_asked_for_too(small: Any, turned: Open) -> None:
    loop = turned(small(select={**SELECT, "explore": 0}, task={"labels": None}, label={"per_round": 6}))
    loop.run()
    meta, folder, batch = parts(loop, 2)
    asked = set(parquet.read_table(folder / "scores.parquet")["id"].to_pylist())
    assert meta["unasked"] > 0
    assert {row["id"] for row in batch} - asked
    assert all(row["predicted"] is not None and row["uncertainty"] >= 0 for row in batch)
