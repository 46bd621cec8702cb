"""What labelling a record costs, where a column of the data tells."""

import numpy as np
import pyarrow as pa

from posttrain.loop.turn import Turn
from posttrain.train.columns import named, numbers

_WHERE = "select.cost"


def check_costs(turn: Turn, pool: str) -> None:
    """Find out before any model is loaded whether every record of a pool has a cost, where the config names a column.

    Raises:
        UserError: a record has no number there, or none above 0; the first such.
    """
    if turn.config.select.cost is not None:
        _costs(turn.dataset(pool).records, turn.config.select.cost)


def with_costs(scores: pa.Table, records: pa.Table, name: str | None) -> pa.Table:
    """A score table with the costs that the data tells.

    Args:
        scores: by `posttrain.select.score.score_schema`.
        records: RECORD table that has all of its records.
        name: of the column; None: the table as it is.

    Raises:
        UserError: as `check_costs`.
    """
    if name is None:
        return scores
    cost_of = dict(zip(records["id"].to_pylist(), _costs(records, name).tolist(), strict=True))
    costs = pa.array([cost_of[id] for id in scores["id"].to_pylist()], pa.float64())
    return scores.set_column(scores.column_names.index("cost"), "cost", costs)


def _costs(records: pa.Table, name: str) -> np.ndarray:
    found = numbers(records, name, _WHERE)
    if len(wrong := np.flatnonzero(~((found > 0) & np.isfinite(found)))):
        row = int(wrong[0])
        raise named(records, row, f"its cost `{name}` is {found[row]:g}", fix="give it a finite one above 0")
    return found
