"""The split of a record depends only on the record."""

import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.split import hash_split
from posttrain.testing.steps import table_of

row_lists = st.lists(
    st.tuples(st.text("abcdef", min_size=1, max_size=3), st.sampled_from([None, "g1", "g2", "g3"])),
    max_size=40,
)


def table_from(rows: list[tuple[str, str | None]]) -> pa.Table:
    return table_of(*({"prompt": text, "group": group, "line": line} for line, (text, group) in enumerate(rows)))


@settings(max_examples=25, deadline=None)
@given(rows=row_lists, fraction=st.floats(0, 1), seed=st.integers(0, 3), data=st.data())
def test_splits_survive_growth_and_permutation(
    rows: list[tuple[str, str | None]], fraction: float, seed: int, data: st.DataObject
) -> None:
    table = table_from(rows)
    order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(0, len(rows)))]
    held_out_lines = set(hash_split(table, fraction, seed)[1]["line"].to_pylist())
    training_part, held_out_part = hash_split(table.take(pa.array(order, pa.int64())), fraction, seed)
    assert held_out_part["line"].to_pylist() == [row for row in order if row in held_out_lines]
    assert training_part["line"].to_pylist() == [row for row in order if row not in held_out_lines]


@settings(max_examples=25, deadline=None)
@given(rows=row_lists, fraction=st.floats(0, 1))
def test_groups_and_equal_inputs_stay_together(rows: list[tuple[str, str | None]], fraction: float) -> None:
    training_part, held_out_part = hash_split(table_from(rows), fraction)
    for column, applies in (
        ("group", lambda row: row["group"]),
        ("input_id", lambda row: row["group"] is None),
    ):
        training_values = {row[column] for row in training_part.to_pylist() if applies(row)}
        held_out_values = {row[column] for row in held_out_part.to_pylist() if applies(row)}
        assert not training_values & held_out_values


def test_share_and_seed_decide_what_is_held_out(make: Callable[..., pa.Table]) -> None:
    table = make(*((f"message {n}", "x", f"user {n}") for n in range(4000)))
    held_out = [set(hash_split(table, 0.2, seed)[1]["line"].to_pylist()) for seed in (0, 1)]
    for lines in held_out:
        assert abs(len(lines) - 800) < 5 * np.sqrt(4000 * 0.2 * 0.8)
    assert abs(len(held_out[0] & held_out[1]) - 160) < 70
    assert hash_split(table, 0.0)[1].num_rows == hash_split(table, 1.0)[0].num_rows == 0
    without_groups = [set(hash_split(table, 0.2, seed, group=False)[1]["line"].to_pylist()) for seed in (0, 1)]
    assert without_groups[0] not in (without_groups[1], held_out[0])


def test_splits_do_not_change_between_releases(make: Callable[..., pa.Table]) -> None:
    table = make(*((f"message {n}", "x") for n in range(20)))
    assert hash_split(table, 0.3, 0)[1]["line"].to_pylist() == [7, 16]


def test_derived_records_are_not_held_out() -> None:
    mark = json.dumps({"augmented": {"method": "typos", "of": "a"}})
    table = table_of(
        *({"prompt": f"q {row}", "completion": "x", "meta": mark if row % 2 else "{}"} for row in range(60))
    )
    rest, held_out = hash_split(table, 0.5)
    assert 5 < held_out.num_rows < 30
    assert rest.num_rows + held_out.num_rows == 60
    assert set(held_out["meta"].to_pylist()) == {"{}"}
