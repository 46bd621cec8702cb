"""Splits of growing sets: no record moves, linked records stay together, and the shares hold."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.split import FrozenSplits, assign_splits, hash_split, split_keys
from posttrain.data.split.split_step import freeze_settings
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

HALVES = FrozenSplits(validation=0.25, test=0.25)

row_lists = st.lists(
    st.tuples(st.sampled_from("abcdefghij"), st.sampled_from([None, None, "g", "h", "i"]), st.sampled_from("xy")),
    min_size=1,
    max_size=25,
)


def records(rows: list[tuple[str, str | None, str]]) -> pa.Table:
    return table_of(*({"prompt": text, "group": group, "completion": label} for text, group, label in rows))


def with_times(*times: str | int | None, groups: list[str | None] | None = None) -> pa.Table:
    metas = ["{}" if time is None else f'{{"at": {time!r}}}'.replace("'", '"') for time in times]
    return table_of(
        *(
            {"text": f"text {row}", "meta": meta, "group": groups[row] if groups else None}
            for row, meta in enumerate(metas)
        )
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rows=row_lists, seed=st.integers(0, 5), stratify=st.sampled_from([None, "label"]), group=st.booleans())
def test_no_record_moves_when_records_are_appended(
    rows: list[tuple[str, str | None, str]], seed: int, stratify: str | None, group: bool
) -> None:
    config = HALVES.model_copy(update={"seed": seed, "stratify": stratify, "group": group})
    table = split_keys(records(rows), config)
    config = freeze_settings(table.slice(0, len(rows) // 2), config)
    final = assign_splits(table, config)
    for size in range(len(rows) + 1):
        part = assign_splits(table.slice(0, size), config)
        assert part.splits.tolist() == final.splits[:size].tolist()
        assert part.rejections == {row: rejection for row, rejection in final.rejections.items() if row < size}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(rows=row_lists, seed=st.integers(0, 5), data=st.data())
def test_clusters_grow_together_and_nothing_moves(
    rows: list[tuple[str, str | None, str]], seed: int, data: st.DataObject
) -> None:
    config = HALVES.model_copy(update={"seed": seed})
    table = split_keys(records(rows), config)
    sizes = sorted({data.draw(st.integers(0, len(rows))) for _ in range(3)} | {len(rows)})
    clusters = np.arange(len(rows))
    previous = None
    for size in sizes:
        for _ in range(2):  # a newer version may find more near duplicates
            row_a, row_b = (data.draw(st.integers(0, max(0, size - 1))) for _ in range(2))
            clusters[clusters == clusters[row_a]] = clusters[row_b]
        splits, rejections = assign_splits(table.slice(0, size), config, clusters[:size], previous)
        if previous is not None:
            assert (splits[: len(previous)][previous >= 0] == previous[previous >= 0]).all()
        new = np.arange(size) >= (0 if previous is None else len(previous))
        assert {row for row in np.flatnonzero(splits < 0) if new[row]} <= set(rejections)
        for labels in (table["input_id"].to_pylist(), table["group"].to_pylist(), clusters.tolist()):
            for row in np.flatnonzero(new & (splits >= 0)).tolist():
                earlier_rows = [at for at in range(row) if labels[at] is not None and labels[at] == labels[row]]
                assert {splits[at] for at in earlier_rows} <= {splits[row], -1}
        previous = splits


def test_only_the_record_that_links_two_splits_is_rejected() -> None:
    rows = [("a", "g", "x"), ("b", "h", "x"), ("b", "g", "x"), ("c", "g", "x"), ("d", "h", "x")]
    config = next(
        config
        for config in (FrozenSplits(test=0.5, seed=seed) for seed in range(50))
        if assign_splits(split_keys(records(rows), config), config).splits[:2].tolist() == [0, 2]
    )
    splits, rejections = assign_splits(split_keys(records(rows), config), config)
    assert splits.tolist() == [0, 2, -1, 0, 2]
    assert rejections[2].reason == "links two splits"
    assert rejections[2].detail == "is linked to `train` (f:1) and `test` (f:2)"
    one_cluster = assign_splits(split_keys(records(rows[:2]), config), config, np.array([0, 0]))
    assert one_cluster.splits.tolist() == [0, 0], "alike from the start, they share a split"
    grown = assign_splits(
        split_keys(records([*rows[:2], ("e", None, "x")]), config), config, np.zeros(3, np.int64), splits[:2]
    )
    assert grown.splits.tolist() == [0, 2, -1], "old records keep their split"


def test_the_test_split_equals_that_of_hash_split() -> None:
    table = table_of(*({"prompt": f"message {n}", "group": f"user {n % 70}" if n % 3 else None} for n in range(500)))
    for group in (True, False):
        config = FrozenSplits(test=0.3, seed=5, group=group)
        held_out = assign_splits(split_keys(table, config), config).splits == 2
        assert table.filter(pa.array(held_out)).equals(hash_split(table, 0.3, 5, group)[1])


def test_shares_hold_on_average_and_exactly_within_strata() -> None:
    sizes = {"often": 2000, "seldom": 40, "once": 1}
    table = table_of(
        *({"prompt": f"{label} {n}", "completion": label} for label, size in sizes.items() for n in range(size))
    )
    labels = np.array(table["completion"].to_pylist())
    plain = FrozenSplits(validation=0.2, test=0.1)
    assert np.bincount(assign_splits(split_keys(table, plain), plain).splits) / 2041 == pytest.approx(
        [0.7, 0.2, 0.1], abs=0.04
    )
    config = plain.model_copy(update={"stratify": "label"})
    keys = split_keys(table, config)
    config = freeze_settings(keys, config)
    splits = assign_splits(keys, config).splits
    for label, size in sizes.items():
        counts = np.bincount(splits[labels == label], minlength=3)
        assert np.abs(counts - np.array([0.7, 0.2, 0.1]) * size).max() <= 1
    for below_test, below_validation in (config.thresholds or {}).values():
        assert 0 <= below_test <= below_validation <= 1
    assert (config.thresholds or {})["often"] == pytest.approx((0.1, 0.3), abs=0.03)
    assert freeze_settings(keys.slice(0, 100), config) == config, "frozen settings do not change"
    reloaded = FrozenSplits.model_validate_json(config.model_dump_json())
    assert (assign_splits(keys, reloaded).splits == splits).all(), "the recipe holds the thresholds"


def test_a_split_by_time_keeps_the_boundaries_of_the_first_version() -> None:
    days = [f"2026-01-{day:02}" for day in range(1, 11)]
    config = FrozenSplits(by="time", time="at", validation=0.2, test=0.2)
    first_version = split_keys(with_times(*days), config)
    config = freeze_settings(first_version, config)
    assert config.since == {"validation": "2026-01-07T00:00:00+00:00", "test": "2026-01-09T00:00:00+00:00"}
    assert assign_splits(first_version, config).splits.tolist() == [0] * 6 + [1] * 2 + [2] * 2
    grown_version = split_keys(with_times(*days, "2026-02-01T00:00:00+02:00", 1767225600, 1767225600000), config)
    assert assign_splits(grown_version, config).splits.tolist() == [0] * 6 + [1] * 2 + [2] * 2 + [2, 0, 0]


def test_a_group_member_after_a_time_boundary_is_rejected() -> None:
    config = FrozenSplits(by="time", time="at", since={"test": "2026-01-05"})
    table = with_times("2026-01-01", "2026-01-06", "2026-01-02", groups=["g", "g", "g"])
    splits, rejections = assign_splits(split_keys(table, config), config)
    assert splits.tolist() == [0, -1, 0]
    assert rejections[1].detail == "is of the time of `test` and is linked to `train` (f:1)"
    config = config.model_copy(update={"group": False})
    assert assign_splits(split_keys(table, config), config).splits.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "f:2: has no `at`, which decides its split"),
        ("soon", "f:2: `at`: `soon` is not a timestamp; write it like"),
    ],
)
def test_a_record_without_a_timestamp_raises(value: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_keys(with_times("2026-01-01", value), FrozenSplits(by="time", time="at"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": 0.8, "test": 0.1}, "add up to 0.9, not to 1"),
        ({"validation": 0.6, "test": 0.6}, "add up to 1.2, not to 1"),
        ({"by": "time"}, "needs `time`"),
        ({"since": {"test": "2026-01-01"}}, "are for `by: time`"),
        ({"by": "time", "time": "t", "stratify": "label"}, "is for `by: hash`"),
        ({"by": "time", "time": "t", "since": {"test": "yesterday"}}, "`yesterday` is not a timestamp"),
        ({"by": "time", "time": "t", "since": {"validation": "2026-02-01", "test": "2026-01-01"}}, "before test"),
    ],
)
def test_invalid_shares_and_times_raise(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FrozenSplits.read(values, "posttrain.yaml")


def test_too_many_strata_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.split.split_step._STRATA", 3)
    config = FrozenSplits(stratify="label")
    keys = split_keys(table_of(*({"prompt": f"{n}", "completion": f"{n}"} for n in range(4))), config)
    with pytest.raises(UserError, match="there are 4 strata; leave `stratify` out"):
        freeze_settings(keys, config)


def test_an_empty_set_is_split() -> None:
    empty = split_keys(records([]), HALVES)
    assert assign_splits(empty, HALVES).splits.tolist() == []
    by_time = FrozenSplits(by="time", time="at")
    for config in (HALVES, HALVES.model_copy(update={"stratify": "label"}), by_time):
        assert freeze_settings(empty, config) == config
        assert assign_splits(empty, config).splits.tolist() == []
    with pytest.raises(UserError, match="1 record is too few to find where test begins"):
        freeze_settings(split_keys(with_times("2026-01-01"), by_time), by_time)


def test_previous_splits_take_precedence_in_any_order() -> None:
    rows = [("c", "g", "x"), ("a", "g", "x"), ("b", "h", "x"), ("b", "g", "x")]
    previous = np.array([-1, 0, 2, -1], dtype=np.int8)
    for seed in range(9):
        config = HALVES.model_copy(update={"seed": seed})
        splits, rejections = assign_splits(split_keys(records(rows), config), config, None, previous)
        assert splits.tolist() == [0, 0, 2, -1]
        assert rejections[3].detail == "is linked to `train` (f:2) and `test` (f:3)"


def test_linked_old_records_leave_the_training_split() -> None:
    rows = [("a", "g", "x"), ("b", "g", "x"), ("c", "h", "x"), ("d", None, "x"), ("e", None, "x")]
    previous, clusters = np.array([0, 2, 0, 0, 1], dtype=np.int8), np.array([0, 1, 2, 3, 3])
    table = split_keys(records(rows), HALVES)
    splits, rejections = assign_splits(table, HALVES, clusters, previous)
    assert splits.tolist() == [-1, 2, 0, 0, 1], "the link of the last two may be gone"
    assert rejections[0].detail == "is linked to `test` (f:2)"
    assert assign_splits(table, HALVES, clusters, previous, clusters).splits.tolist() == [-1, 2, 0, -1, 1]


def test_derived_records_are_never_held_out() -> None:
    rows = [{"text": f"text {n}", "meta": '{"augmented": {"of": "0", "method": "typos"}}'} for n in range(3)]
    table = table_of(*rows, {"text": "a"}, {"text": "b"})
    splits, _ = assign_splits(split_keys(table, HALVES), HALVES, None, np.array([2, 0, -1, 2, -1], dtype=np.int8))
    assert splits.tolist()[:4] == [0, 0, 0, 2]
