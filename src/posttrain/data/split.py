"""Held-out records, drawn by hash so that the draw outlives the growth of the set."""

import hashlib

import numpy as np
import pyarrow as pa


def split(table: pa.Table, fraction: float, seed: int = 0, group: bool = True) -> tuple[pa.Table, pa.Table]:
    """Part ``table`` into (rest, held out), both in table order; about ``fraction`` of it is held out.

    The side is a hash of the seed and the record's group, or of its input where it has none. So a record
    stays on its side whatever else the set holds, a group is never torn, and neither are ungrouped records
    with one input. The same input in two groups can fall on both sides; the leak check takes it from the
    training side.

    Args:
        fraction: in [0, 1].
        group: whether groups count; otherwise every record goes by its input.
    """
    sides = np.array(
        [
            _draw(seed, "group", name) if group and name is not None else _draw(seed, "input", identity)
            for name, identity in zip(table["group"].to_pylist(), table["input_id"].to_pylist(), strict=True)
        ],
        dtype=np.float64,
    )
    held_out = sides < fraction
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


def _draw(seed: int, kind: str, key: str) -> float:
    """A number in [0, 1) that only the arguments decide."""
    digest = hashlib.sha256(f"{seed}\0{kind}\0{key}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
