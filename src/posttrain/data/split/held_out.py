"""Held-out records, drawn by hash so that the draw outlives the growth of the set."""

import numpy as np
import pyarrow as pa

from posttrain.data.records.made import made_of
from posttrain.data.split.draw import draws


def split(table: pa.Table, fraction: float, seed: int = 0, group: bool = True) -> tuple[pa.Table, pa.Table]:
    """Part ``table`` into (rest, held out), both in table order; about ``fraction`` of it is held out.

    The side is a hash of the seed and the record's group, or of its input where it has none. So a record
    stays on its side whatever else the set holds, a group is never torn, and neither are ungrouped records
    with one input. The same input in two groups can fall on both sides; the leak check takes it from the
    training side. What was made of others is never held out.

    Args:
        fraction: in [0, 1].
        group: whether groups count; otherwise every record goes by its input.
    """
    groups = table["group"].to_pylist() if group else None
    held_out = draws(table["input_id"].to_pylist(), groups, seed) < fraction
    held_out &= np.asarray(made_of(table).is_null())
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))
