"""Labelling costs from a column of the data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from posttrain.inspect.preview import preview_selection
from posttrain.loop.config import load_config
from posttrain.store.errors import UserError

Open = Callable[[Path], Any]
SELECT = {"strategy": "cost_aware", "cost": "minutes", "explore": 0, "focus": 0, "near_duplicate": None}


def with_minutes(small: Any, minutes: Callable[[int], object], root: Path | None = None, **select: Any) -> Path:
    root = root or small()
    small.configure(root, select={**SELECT, **select})
    rows = [{**row, "minutes": str(minutes(number))} for number, row in enumerate(small.rows()[:60])]
    small.write(root / "pool.csv", rows, ["text", "minutes"])
    return root


def chosen_lines(loop: Any) -> set[int]:
    """The lines of the pool file with the records of the last batch."""
    detail = loop.metadata.rounds()[-1].detail
    batch = parquet.read_table(loop.store.artifacts.path(detail["selection"]) / "batch.parquet")["id"].to_pylist()
    pool = parquet.read_table(loop.store.artifacts.path(detail["queried_pool"]) / "records.parquet").to_pylist()
    return {row["line"] for row in pool if row["id"] in batch}


@pytest.mark.slow
def test_the_budget_bounds_the_costs_that_the_data_has(small: Any, copied_loop: Any) -> None:
    loop = copied_loop
    with_minutes(small, lambda row: 1 if row % 2 else 1000, loop.root, options={"budget": 50})
    loop.run(3, until="select")
    assert len(chosen_lines(loop)) == 12
    assert {line % 2 for line in chosen_lines(loop)} == {1}, "the first record is on line 2, and expensive"
    scores = loop.store.artifacts.path(loop.metadata.rounds()[3].detail["scores"]) / "scores.parquet"
    assert set(parquet.read_table(scores)["cost"].to_pylist()) == {1.0, 1000.0}
    assert loop.metadata.artifact(loop.metadata.rounds()[3].detail["scores"]).meta["pool"] == 36


@pytest.mark.parametrize(
    ("minutes", "column", "message"),
    [
        (
            lambda row: 1,
            "hours",
            r"pool\.csv:2: .*it has no number `hours` but `None`; .*select\.cost, such as `minutes`",
        ),
        (lambda row: row - 1, "minutes", r"pool\.csv:2: .*its cost `minutes` is -1; give it a finite one above 0"),
    ],
)
def test_a_bad_cost_is_reported_before_a_model_is_loaded(
    small: Any, open_loop: Open, minutes: Callable[[int], object], column: str, message: str
) -> None:
    root = with_minutes(small, minutes, cost=column)
    loop = open_loop(root)
    with pytest.raises(UserError, match=message):
        loop.run()
    assert [run.stage for run in loop.metadata.runs()] == ["collect pool", "collect test", "collect labelled"]


def test_a_preview_checks_the_costs(small: Any, copied_loop: Any) -> None:
    small.configure(copied_loop.root, select={**SELECT, "cost": "hours"})
    with pytest.raises(UserError, match="it has no number `hours`"):
        preview_selection(copied_loop.store, load_config(copied_loop.root))
