"""Reads the labelling costs of records from a column of the data."""

import numpy as np
import pyarrow as pa

from posttrain.loop.context import RoundContext
from posttrain.train.data.record_columns import RecordColumns, row_error

_WHERE = "select.cost"


def check_costs(context: RoundContext, pool: str) -> None:
    """Checks that every record of a pool has a cost, if the config names a column; before any model is loaded.

    Raises:
        UserError: a record has no number there, or one that is not above 0; names the first.
    """
    if context.config.select.cost is not None:
        _costs(context.dataset(pool).records, context.config.select.cost)


def add_cost_column(scores: pa.Table, records: pa.Table, name: str | None) -> pa.Table:
    """Adds the costs that the data gives to a score table.

    Args:
        scores: Table of the schema `posttrain.select.scores.table.score_schema`.
        records: RECORD table that has all of its records.
        name: Name of the column; None returns the table as it is.

    Raises:
        UserError: as `check_costs`.
    """
    if name is None:
        return scores
    cost_of = dict(zip(records["id"].to_pylist(), _costs(records, name).tolist(), strict=True))
    costs = pa.array([cost_of[id] for id in scores["id"].to_pylist()], pa.float64())
    return scores.set_column(scores.column_names.index("cost"), "cost", costs)


def _costs(records: pa.Table, name: str) -> np.ndarray:
    costs = RecordColumns(records).numbers(name, _WHERE)
    # `cost_aware` divides a record's score by its cost: 0 or infinity would decide the batch alone.
    if len(wrong := np.flatnonzero(~((costs > 0) & np.isfinite(costs)))):
        row = int(wrong[0])
        raise row_error(records, row, f"its cost `{name}` is {costs[row]:g}", fix="give it a finite one above 0")
    return costs
