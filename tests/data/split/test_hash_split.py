"""A record's side depends on nothing but itself."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.split import hash_split
from posttrain.testing.steps import table_of

rows = st.lists(
    st.tuples(st.text("abcdef", min_size=1, max_size=3), st.sampled_from([None, "g1", "g2", "g3"])),
    max_size=40,
)


def table_from(drawn: list[tuple[str, str | None]]) -> pa.Table:
    return table_of(*({"prompt": text, "group": group, "line": line} for line, (text, group) in enumerate(drawn)))


@settings(max_examples=60, deadline=None)
@given(drawn=rows, fraction=st.floats(0, 1), seed=st.integers(0, 3), data=st.data())
def test_sides_survive_growth_and_permutation(
    drawn: list[tuple[str, str | None]], fraction: float, seed: int, data: st.DataObject
) -> None:
    table = table_from(drawn)
    order = data.draw(st.permutations(range(len(drawn))))[: data.draw(st.integers(0, len(drawn)))]
    held_out = set(hash_split(table, fraction, seed)[1]["line"].to_pylist())
    rest, part = hash_split(table.take(pa.array(order, pa.int64())), fraction, seed)
    assert part["line"].to_pylist() == [row for row in order if row in held_out]
    assert rest["line"].to_pylist() == [row for row in order if row not in held_out]


@settings(max_examples=60, deadline=None)
@given(drawn=rows, fraction=st.floats(0, 1))
def test_groups_and_equal_inputs_stay_together(drawn: list[tuple[str, str | None]], fraction: float) -> None:
    rest, part = hash_split(table_from(drawn), fraction)
    for column, apart in (
        ("group", lambda row: row["group"]),
        ("input_id", lambda row: row["group"] is None),
    ):
        left = {row[column] for row in rest.to_pylist() if apart(row)}
        right = {row[column] for row in part.to_pylist() if apart(row)}
        assert not left & right


def test_the_share_and_the_seed(make: Callable[..., pa.Table]) -> None:
    table = make(*((f"message {n}", "x", f"user {n}") for n in range(4000)))
    drawn = [set(hash_split(table, 0.2, seed)[1]["line"].to_pylist()) for seed in (0, 1)]
    for lines in drawn:
        assert abs(len(lines) - 800) < 5 * np.sqrt(4000 * 0.2 * 0.8)
    assert abs(len(drawn[0] & drawn[1]) - 160) < 70
    assert hash_split(table, 0.0)[1].num_rows == hash_split(table, 1.0)[0].num_rows == 0
    ignored = hash_split(table, 0.2, group=False)[1]["line"].to_pylist()
    assert set(ignored) != drawn[0]


def test_sides_do_not_change_between_releases(make: Callable[..., pa.Table]) -> None:
    table = make(*((f"message {n}", "x") for n in range(20)))
    assert hash_split(table, 0.3, 0)[1]["line"].to_pylist() == [7, 16]
