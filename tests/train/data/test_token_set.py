"""Shards of a tokenised set: complete records up to a number of tokens, each usable alone, read in any order."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.chat import TokenizedExample
from posttrain.train.data.token_set import TokenSet, concat_ranges, gather, segment_sums

MakeUnits = Callable[..., list[list[TokenizedExample]]]
MakeSet = Callable[..., TokenSet]
LENGTHS = [5, 30, 1, 9, 9, 70, 2, 3, 44, 8]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard_tokens", "records"),
    [(1, [1] * 10), (40, [3, 2, 1, 2, 1, 1]), (45, [4, 1, 1, 2, 1, 1]), (54, [5, 1, 3, 1]), (1000, [10])],
)
def test_a_shard_holds_as_many_records_as_fit(
    make_units: MakeUnits, make_set: MakeSet, shard_tokens: int, records: list[int]
) -> None:
    units = make_units(LENGTHS)
    result = make_set(units, shard_tokens)
    assert [len(shard) for shard in result.shards] == records
    assert all(len(shard.ids) <= shard_tokens or len(shard) == 1 for shard in result.shards)
    assert list(result) == units
    assert result[-3:] == units[-3:]
    assert result.record_ids == [str(row) for row in range(10)]
    assert result.targets.tolist() == [unit[0].ids[0] for unit in units]
    assert result.longest.tolist() == result.sequence_lengths.tolist() == result.unit_lengths.tolist() == LENGTHS
    for block in (1, 3, 7):
        other_blocks = make_set(units, shard_tokens, block)
        assert (other_blocks.id, contents(other_blocks.folder)) == (result.id, contents(result.folder))


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("shard_tokens", [60, 1000])
def test_take_returns_units_in_any_order(
    make_units: MakeUnits, make_set: MakeSet, sequences: int, shard_tokens: int
) -> None:
    units = make_units(LENGTHS, 0, sequences)
    result = make_set(units, shard_tokens)
    draws = np.random.default_rng(0)
    for rows in ([], [4], [9, 0, 0], [8, 9], *(draws.integers(0, 10, 25).tolist() for _ in range(5))):
        tokens = result.take(rows)
        as_lists = [
            [TokenizedExample(list(sequence.ids), list(sequence.supervised)) for sequence in unit]
            for unit in tokens.views()
        ]
        assert as_lists == [units[row] for row in rows]
        assert tokens.ids.dtype == np.int32
        assert tokens.unit_lengths.tolist() == [sequences * LENGTHS[row] for row in rows]
    for row in (-1, 10):
        with pytest.raises(IndexError):
            result.take([row])


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 50)), max_size=40),
    dtype=st.sampled_from([np.int32, np.bool_]),
)
def test_gather_equals_slicing(sizes: list[int], parts: list[tuple[int, int, int]], dtype: type[np.generic]) -> None:
    draws = np.random.default_rng(0)
    sources = [draws.integers(-(2**31), 2**31, size).astype(dtype) for size in sizes]
    numbers, spans = [part[0] % len(sizes) for part in parts], [slice(*sorted(part[1:])) for part in parts]
    actual = gather(sources, numbers, spans)
    expected = [sources[number][span] for number, span in zip(numbers, spans, strict=True)]
    assert actual.tolist() == [value for part in expected for value in part.tolist()]
    assert actual.dtype == dtype
    assert not any(np.shares_memory(actual, source) for source in sources)


@given(counts=st.lists(st.integers(1, 4), max_size=20), seed=st.integers(0, 9))
def test_concat_ranges_equals_a_plain_loop(counts: list[int], seed: int) -> None:
    starts = np.random.default_rng(seed).integers(0, 100, len(counts))
    expected = [number for start, count in zip(starts, counts, strict=True) for number in range(start, start + count)]
    assert concat_ranges(starts, np.array(counts, np.int64)).tolist() == expected


def test_segment_sums() -> None:
    assert segment_sums(np.array([1, 2, 3, 4, 5, 6]), np.array([3, 1, 2])).tolist() == [6, 4, 11]
    assert segment_sums(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
