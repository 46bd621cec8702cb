"""Partition by process: each sample once, about equal tokens, and repartitioned when the number changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.rank_partition import RankPartition, partition_samples


def skewed_lengths(count: int, spread: float, seed: int) -> np.ndarray:
    """int64: lengths of a log-normal distribution, up to 4096."""
    draws = np.random.default_rng(seed)
    return np.clip(draws.lognormal(4, spread, count), 1, 4096).astype(np.int64)


def check_sizes(sizes: list[int], longest: int) -> None:
    assert max(sizes) - min(sizes) <= longest
    if min(sizes) >= 20 * longest > 0:
        assert max(sizes) / min(sizes) <= 1.05


@given(
    lengths=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 5000)), max_size=120), world_size=st.integers(1, 16)
)
def test_every_sample_is_in_one_shard(lengths: list[int], world_size: int) -> None:
    shards = partition_samples(np.array(lengths, np.int64), world_size)
    assert len(shards) == world_size
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(lengths)))
    assert all((np.diff(shard) > 0).all() for shard in shards)
    check_sizes([sum(lengths[index] for index in shard) for shard in shards], max(lengths, default=0))
    repeated = partition_samples(np.array(lengths, np.int64), world_size)
    assert all((first == other).all() for first, other in zip(shards, repeated, strict=True))


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("spread", [0.1, 1.0, 2.0])
def test_shards_are_within_five_percent(world_size: int, spread: float) -> None:
    lengths = skewed_lengths(3000, spread, world_size)
    sizes = [int(lengths[shard].sum()) for shard in partition_samples(lengths, world_size)]
    assert max(sizes) <= 1.05 * min(sizes)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    stops=st.lists(st.integers(0, 999), min_size=2, max_size=2),
    batch_size=st.integers(1, 70),
)
def test_the_remaining_samples_are_repartitioned(
    seed: int, sizes: list[int], stops: list[int], batch_size: int
) -> None:
    """One epoch with a changing number of processes: nothing is lost or repeated, and each stretch is balanced."""
    lengths = skewed_lengths(1000, 1.0, seed)
    sampler = BatchSampler(1000, batch_size, seed, [PhaseConfig(epochs=1)])
    bounds = [0, *sorted(stops[: len(sizes) - 1]), 1000]
    used_rows: list[int] = []
    for size, first, last in zip(sizes, bounds, bounds[1:], strict=False):
        partition = RankPartition(sampler, lengths, size, divmod(first, batch_size))
        tokens = [0] * size
        for step in range(first // batch_size, -(-last // batch_size)):
            rows, ranks = sampler.rows(step), partition.ranks(step)
            for index, (row, rank) in enumerate(zip(rows, ranks.tolist(), strict=True)):
                sample = step * batch_size + index
                assert (rank < 0) == (sample < first)
                if first <= sample < last:
                    used_rows.append(row)
                    tokens[rank] += int(lengths[row])
        if last == 1000:
            check_sizes(tokens, int(lengths.max()))
    assert sorted(used_rows) == list(range(1000))


@pytest.mark.parametrize("since", [(0, 0), (2, 3), (13, 0)])
def test_ranks_do_not_depend_on_earlier_queries(since: tuple[int, int]) -> None:
    sampler = BatchSampler(50, 8, 0, [PhaseConfig(epochs=3)])
    lengths = skewed_lengths(50, 1.0, 0)
    first, other = RankPartition(sampler, lengths, 3, since), RankPartition(sampler, lengths, 3, since)
    forwards = [first.ranks(step).tolist() for step in range(sampler.steps)]
    assert [other.ranks(step).tolist() for step in reversed(range(sampler.steps))] == forwards[::-1]
    assert [other.ranks(step).tolist() for step in (5, 5, 6, 4)] == [forwards[step] for step in (5, 5, 6, 4)]


def test_each_epoch_is_balanced_from_its_start() -> None:
    sampler = BatchSampler(50, 8, 0, [PhaseConfig(epochs=2)])
    lengths = skewed_lengths(50, 1.0, 0)
    partition = RankPartition(sampler, lengths, 4)
    for epoch in range(2):
        tokens = np.zeros(4, np.int64)
        for step in range(7 * epoch, 7 * epoch + 7):
            np.add.at(tokens, partition.ranks(step), lengths[sampler.rows(step)])
            assert np.ptp(tokens) <= lengths.max()
