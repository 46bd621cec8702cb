"""Partition by process: each sample once, about equal tokens, and repartitioned when the number changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.train.data.batch_sampler import BatchSampler
from posttrain.train.data.config import PhaseConfig
from posttrain.train.data.rank_partition import RankPartition, assign_ranks


def skewed_lengths(count: int, spread: float, seed: int) -> np.ndarray:
    """int64: lengths of a log-normal distribution, up to 4096."""
    draws = np.random.default_rng(seed)
    return np.clip(draws.lognormal(4, spread, count), 1, 4096).astype(np.int64)


def partition_samples(lengths: np.ndarray, world_size: int) -> list[np.ndarray]:
    """The samples of each process."""
    ranks = assign_ranks(lengths, [0] * world_size)
    return [np.flatnonzero(ranks == rank) for rank in range(world_size)]


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


def test_ranks_do_not_depend_on_earlier_queries() -> None:
    sampler = BatchSampler(50, 8, 0, [PhaseConfig(epochs=3)])
    lengths = skewed_lengths(50, 1.0, 0)
    first, other = RankPartition(sampler, lengths, 3), RankPartition(sampler, lengths, 3)
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
