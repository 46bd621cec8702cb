"""Passes over the records and mixes of their kinds: the counts are exact, whatever the seed."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.train.data.config import MixConfig
from posttrain.train.data.epoch_plan import EpochPlan
from posttrain.train.data.mix import MixPart, apportion, mix_parts


def epoch_batches(count: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one pass over ``count`` rows."""
    plan = EpochPlan([MixPart(np.arange(count), count)], batch_size, seed)
    return [plan.rows(epoch * plan.batches + batch).tolist() for batch in range(plan.batches)]


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 257])
@pytest.mark.parametrize("batch_size", [1, 4, 300])
def test_an_epoch_uses_every_row_once(rows: int, batch_size: int) -> None:
    for epoch in range(2):
        batches = epoch_batches(rows, batch_size, seed=5, epoch=epoch)
        assert sorted(row for batch in batches for row in batch) == list(range(rows))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert 1 <= len(batches[-1]) <= batch_size


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    orders = [epoch_batches(50, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert orders[0] == epoch_batches(50, 4, 0, 0)
    for item in range(4):
        for other in range(item):
            assert orders[item] != orders[other]
    assert epoch_batches(50, 4, 1, 0) != epoch_batches(50, 4, 0, 1)


@given(total=st.integers(0, 10_000), weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_add_up_and_are_less_than_one_off(total: int, weights: list[float]) -> None:
    result = apportion(total, np.log(weights))
    assert sum(result) == total
    for share, weight in zip(result, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-9


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.one_of(st.none(), st.integers(0, 9)))
def test_a_mix_uses_the_rows_of_a_kind_equally_often(sizes: list[int], seed: int | None) -> None:
    kinds = np.array([f"kind {kind}" for kind, size in enumerate(sizes) for _ in range(size)])
    mix = {f"kind {kind}": 1.0 + kind % 2 for kind in range(len(sizes))}
    assume(0 not in apportion(len(kinds), np.log(list(mix.values()))))
    parts = mix_parts(MixConfig(mix=mix), kinds, np.arange(len(kinds)), "here")
    plan = EpochPlan(parts, 3, seed)
    counts = np.zeros(len(kinds), np.int64)
    for number in range(1, 6):
        for batch in range((number - 1) * plan.batches, number * plan.batches):
            np.add.at(counts, plan.rows(batch), 1)
        for part in parts:
            part_counts = counts[part.rows]
            assert part_counts.sum() == number * part.share
            assert part_counts.max() - part_counts.min() <= 1


def test_without_a_seed_kinds_are_interleaved_evenly() -> None:
    kinds = np.array(["a"] * 6 + ["b"] * 2)
    plan = EpochPlan(mix_parts(MixConfig(mix={"a": 3, "b": 1}), kinds, np.arange(8), "here"), 4, None)
    for batch in range(2):
        assert sorted(kinds[plan.rows(batch)]) == ["a", "a", "a", "b"]
    assert np.concatenate([plan.rows(0), plan.rows(1)]).tolist() == [0, 1, 6, 2, 3, 4, 7, 5]


def test_a_batch_does_not_depend_on_earlier_queries() -> None:
    parts = [MixPart(np.arange(7), 4), MixPart(np.arange(7, 10), 6)]
    first, other = EpochPlan(parts, 4, 3), EpochPlan(parts, 4, 3)
    forwards = [first.rows(batch).tolist() for batch in range(9)]
    assert [other.rows(batch).tolist() for batch in reversed(range(9))] == forwards[::-1]
    assert forwards != [EpochPlan(parts, 4, 4).rows(batch).tolist() for batch in range(9)]


def test_an_impossible_mix_is_refused() -> None:
    kinds = np.array(["faq"] * 99 + ["chat"])
    with pytest.raises(UserError, match="no record is of `fax`; did you mean `faq`\\?"):
        mix_parts(MixConfig(mix={"fax": 1, "chat": 1}), kinds, np.arange(100), "here")
    with pytest.raises(UserError, match="here: the share of `chat` is less than a record"):
        mix_parts(MixConfig(mix={"faq": 1000, "chat": 1}), kinds, np.arange(100), "here")
