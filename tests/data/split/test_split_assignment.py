"""Splits of sets that grow: nothing moves, nothing that hangs together is torn, and the shares hold."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.split import SplitsConfig, assign_splits, hash_split, split_keys
from posttrain.data.split.split_step import freeze_settings
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

HALVES = SplitsConfig(validation=0.25, test=0.25)

drawn_rows = st.lists(
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
@settings(max_examples=150, deadline=None)
@given(rows=drawn_rows, seed=st.integers(0, 5), stratify=st.sampled_from([None, "label"]), grouped=st.booleans())
def test_no_record_moves_when_others_are_appended(
    rows: list[tuple[str, str | None, str]], seed: int, stratify: str | None, grouped: bool
) -> None:
    config = HALVES.model_copy(update={"seed": seed, "stratify": stratify, "group": grouped})
    whole = split_keys(records(rows), config)
    config = freeze_settings(whole.slice(0, len(rows) // 2), config)
    final = assign_splits(whole, config)
    for size in range(len(rows) + 1):
        part = assign_splits(whole.slice(0, size), config)
        assert part.splits.tolist() == final.splits[:size].tolist()
        assert part.rejections == {row: why for row, why in final.rejections.items() if row < size}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rows=drawn_rows, seed=st.integers(0, 5), data=st.data())
def test_clusters_grow_together_and_nothing_moves(
    rows: list[tuple[str, str | None, str]], seed: int, data: st.DataObject
) -> None:
    config = HALVES.model_copy(update={"seed": seed})
    table = split_keys(records(rows), config)
    sizes = sorted({data.draw(st.integers(0, len(rows))) for _ in range(3)} | {len(rows)})
    clusters = np.arange(len(rows))
    known = None
    for size in sizes:
        for _ in range(2):  # a newer version may find more that is alike
            first, other = (data.draw(st.integers(0, max(0, size - 1))) for _ in range(2))
            clusters[clusters == clusters[first]] = clusters[other]
        splits, rejections = assign_splits(table.slice(0, size), config, clusters[:size], known)
        if known is not None:
            assert (splits[: len(known)][known >= 0] == known[known >= 0]).all()
        new = np.arange(size) >= (0 if known is None else len(known))
        assert {row for row in np.flatnonzero(splits < 0) if new[row]} <= set(rejections)
        for labels in (table["input_id"].to_pylist(), table["group"].to_pylist(), clusters.tolist()):
            for row in np.flatnonzero(new & (splits >= 0)).tolist():
                same = [at for at in range(row) if labels[at] is not None and labels[at] == labels[row]]
                assert {splits[at] for at in same} <= {splits[row], -1}
        known = splits


def test_a_record_that_joins_two_splits_goes_alone() -> None:
    rows = [("a", "g", "x"), ("b", "h", "x"), ("b", "g", "x"), ("c", "g", "x"), ("d", "h", "x")]
    config = next(
        config
        for config in (SplitsConfig(test=0.5, seed=seed) for seed in range(50))
        if assign_splits(split_keys(records(rows), config), config).splits[:2].tolist() == [0, 2]
    )
    splits, rejections = assign_splits(split_keys(records(rows), config), config)
    assert splits.tolist() == [0, 2, -1, 0, 2]
    assert rejections[2].reason == "links two splits"
    assert rejections[2].detail == "hangs together with `train` (f:1) and `test` (f:2)"
    joined = assign_splits(split_keys(records(rows[:2]), config), config, np.array([0, 0]))
    assert joined.splits.tolist() == [0, 0], "alike from the start they are one"
    later = assign_splits(
        split_keys(records([*rows[:2], ("e", None, "x")]), config), config, np.zeros(3, np.int64), splits[:2]
    )
    assert later.splits.tolist() == [0, 2, -1], "what has a split keeps it"


def test_draws_are_those_of_the_held_out_share() -> None:
    table = table_of(*({"prompt": f"message {n}", "group": f"user {n % 70}" if n % 3 else None} for n in range(500)))
    for grouped in (True, False):
        config = SplitsConfig(test=0.3, seed=5, group=grouped)
        held_out = assign_splits(split_keys(table, config), config).splits == 2
        assert table.filter(pa.array(held_out)).equals(hash_split(table, 0.3, 5, grouped)[1])


def test_shares_hold_by_odds_and_within_strata_by_count() -> None:
    sizes = {"often": 2000, "seldom": 40, "once": 1}
    table = table_of(
        *({"prompt": f"{label} {n}", "completion": label} for label, size in sizes.items() for n in range(size))
    )
    labels = np.array(table["completion"].to_pylist())
    plain = SplitsConfig(validation=0.2, test=0.1)
    assert np.bincount(assign_splits(split_keys(table, plain), plain).splits) / 2041 == pytest.approx(
        [0.7, 0.2, 0.1], abs=0.04
    )
    config = plain.model_copy(update={"stratify": "label"})
    looked_at = split_keys(table, config)
    config = freeze_settings(looked_at, config)
    splits = assign_splits(looked_at, config).splits
    for label, size in sizes.items():
        counts = np.bincount(splits[labels == label], minlength=3)
        assert np.abs(counts - np.array([0.7, 0.2, 0.1]) * size).max() <= 1
    for below_test, below_validation in (config.thresholds or {}).values():
        assert 0 <= below_test <= below_validation <= 1
    assert (config.thresholds or {})["often"] == pytest.approx((0.1, 0.3), abs=0.03)
    assert freeze_settings(looked_at.slice(0, 100), config) == config, "what is settled stays"
    again = SplitsConfig.model_validate_json(config.model_dump_json())
    assert (assign_splits(looked_at, again).splits == splits).all(), "the recipe holds it"


def test_time_parts_by_moments_that_the_first_version_fixes() -> None:
    days = [f"2026-01-{day:02}" for day in range(1, 11)]
    config = SplitsConfig(by="time", time="at", validation=0.2, test=0.2)
    first = split_keys(with_times(*days), config)
    config = freeze_settings(first, config)
    assert config.since == {"validation": "2026-01-07T00:00:00+00:00", "test": "2026-01-09T00:00:00+00:00"}
    assert assign_splits(first, config).splits.tolist() == [0] * 6 + [1] * 2 + [2] * 2
    grown = split_keys(with_times(*days, "2026-02-01T00:00:00+02:00", 1767225600, 1767225600000), config)
    assert assign_splits(grown, config).splits.tolist() == [0] * 6 + [1] * 2 + [2] * 2 + [2, 0, 0]


def test_a_group_across_a_moment_is_not_torn() -> None:
    config = SplitsConfig(by="time", time="at", since={"test": "2026-01-05"})
    table = with_times("2026-01-01", "2026-01-06", "2026-01-02", groups=["g", "g", "g"])
    splits, rejections = assign_splits(split_keys(table, config), config)
    assert splits.tolist() == [0, -1, 0]
    assert rejections[1].detail == "is of the time of `test` and hangs together with `train` (f:1)"
    config = config.model_copy(update={"group": False})
    assert assign_splits(split_keys(table, config), config).splits.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "f:2: has no `at`, which decides its split"), ("soon", "f:2: `at`: `soon` is no timestamp; write it like")],
)
def test_a_record_without_a_moment_is_named(value: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_keys(with_times("2026-01-01", value), SplitsConfig(by="time", time="at"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": 0.8, "test": 0.1}, "add up to 0.9, not to 1"),
        ({"validation": 0.6, "test": 0.6}, "add up to 1.2, not to 1"),
        ({"by": "time"}, "needs `time`"),
        ({"since": {"test": "2026-01-01"}}, "are for `by: time`"),
        ({"by": "time", "time": "t", "stratify": "label"}, "is for `by: hash`"),
        ({"by": "time", "time": "t", "since": {"test": "yesterday"}}, "`yesterday` is no timestamp"),
        ({"by": "time", "time": "t", "since": {"validation": "2026-02-01", "test": "2026-01-01"}}, "before test"),
    ],
)
def test_shares_and_moments_that_do_not_fit_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SplitsConfig.read(values, "posttrain.yaml")


def test_answers_that_are_no_labels_are_no_strata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.data.split.split_step._STRATA", 3)
    config = SplitsConfig(stratify="label")
    looked_at = split_keys(table_of(*({"prompt": f"{n}", "completion": f"{n}"} for n in range(4))), config)
    with pytest.raises(UserError, match="there are 4 strata; leave `stratify` out"):
        freeze_settings(looked_at, config)


def test_nothing_is_split_into_nothing() -> None:
    empty = split_keys(records([]), HALVES)
    assert assign_splits(empty, HALVES).splits.tolist() == []
    timed = SplitsConfig(by="time", time="at")
    for config in (HALVES, HALVES.model_copy(update={"stratify": "label"}), timed):
        assert freeze_settings(empty, config) == config
        assert assign_splits(empty, config).splits.tolist() == []
    with pytest.raises(UserError, match="1 records are too few to find where test begins"):
        freeze_settings(split_keys(with_times("2026-01-01"), timed), timed)


def test_what_has_a_split_comes_first_wherever_it_stands() -> None:
    rows = [("c", "g", "x"), ("a", "g", "x"), ("b", "h", "x"), ("b", "g", "x")]
    known = np.array([-1, 0, 2, -1], dtype=np.int8)
    for seed in range(9):
        config = HALVES.model_copy(update={"seed": seed})
        splits, rejections = assign_splits(split_keys(records(rows), config), config, None, known)
        assert splits.tolist() == [0, 0, 2, -1]
        assert rejections[3].detail == "hangs together with `train` (f:2) and `test` (f:3)"


def test_of_old_records_that_share_something_those_learned_from_go() -> None:
    rows = [("a", "g", "x"), ("b", "g", "x"), ("c", "h", "x"), ("d", None, "x"), ("e", None, "x")]
    known, clusters = np.array([0, 2, 0, 0, 1], dtype=np.int8), np.array([0, 1, 2, 3, 3])
    table = split_keys(records(rows), HALVES)
    splits, rejections = assign_splits(table, HALVES, clusters, known)
    assert splits.tolist() == [-1, 2, 0, 0, 1], "what had held the last two together may be gone"
    assert rejections[0].detail == "hangs together with `test` (f:2)"
    assert assign_splits(table, HALVES, clusters, known, clusters).splits.tolist() == [-1, 2, 0, -1, 1]


def test_no_past_holds_out_what_was_made_of_others() -> None:
    rows = [{"text": f"text {n}", "meta": '{"augmented": {"of": "0", "method": "typos"}}'} for n in range(3)]
    table = table_of(*rows, {"text": "a"}, {"text": "b"})
    splits, _ = assign_splits(split_keys(table, HALVES), HALVES, None, np.array([2, 0, -1, 2, -1], dtype=np.int8))
    assert splits.tolist()[:4] == [0, 0, 0, 2]
