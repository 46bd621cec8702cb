"""Shards of a tokenised set: whole records, up to so many tokens, each of use alone, and read in any order."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.chat import Encoded
from posttrain.store.errors import DamagedArtifact
from posttrain.train.tokens.flat import Store, summed
from posttrain.train.tokens.token_set import TokenSet, open_shard

MakeUnits = Callable[..., list[list[Encoded]]]
MakeSet = Callable[..., TokenSet]
LENGTHS = [5, 30, 1, 9, 9, 70, 2, 3, 44, 8]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("shard_tokens", "records"),
    [(1, [1] * 10), (40, [3, 2, 1, 2, 1, 1]), (45, [4, 1, 1, 2, 1, 1]), (54, [5, 1, 3, 1]), (1000, [10])],
)
def test_a_shard_has_as_many_whole_records_as_fit(
    make_units: MakeUnits, make_set: MakeSet, shard_tokens: int, records: list[int]
) -> None:
    units = make_units(LENGTHS)
    found = make_set(units, shard_tokens)
    assert [len(shard) for shard in found.shards] == records
    assert all(len(shard.ids) <= shard_tokens or len(shard) == 1 for shard in found.shards)
    assert list(found) == units
    assert found[-3:] == units[-3:]
    assert found.record_ids == [str(row) for row in range(10)]
    assert found.targets.tolist() == [unit[0].ids[0] for unit in units]
    assert found.longest.tolist() == found.sequence_lengths.tolist() == found.unit_lengths.tolist() == LENGTHS
    for block in (1, 3, 7):
        again = make_set(units, shard_tokens, block)
        assert (again.id, contents(again.folder)) == (found.id, contents(found.folder))


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("shard_tokens", [60, 1000])
def test_units_are_taken_in_any_order(
    make_units: MakeUnits, make_set: MakeSet, sequences: int, shard_tokens: int
) -> None:
    units = make_units(LENGTHS, 0, sequences)
    found = make_set(units, shard_tokens)
    draws = np.random.default_rng(0)
    for rows in ([], [4], [9, 0, 0], [8, 9], *(draws.integers(0, 10, 25).tolist() for _ in range(5))):
        tokens = found.take(rows)
        as_lists = [
            [Encoded(list(sequence.ids), list(sequence.supervised)) for sequence in unit] for unit in tokens.views()
        ]
        assert as_lists == [units[row] for row in rows]
        assert tokens.ids.dtype == np.int32
        assert tokens.unit_lengths.tolist() == [sequences * LENGTHS[row] for row in rows]
    for row in (-1, 10):
        with pytest.raises(IndexError):
            found.take([row])


def test_a_shard_is_opened_alone(make_units: MakeUnits, make_set: MakeSet) -> None:
    units = make_units(LENGTHS)
    found = make_set(units, 45)
    for number in (0, 1, 2, 4, 5):
        for file in (found.folder / f"shard-{number:05d}").iterdir():
            file.unlink()
    assert list(open_shard(found.folder, 3)) == units[6:8]
    with pytest.raises(IndexError, match="the set has 6 shards"):
        open_shard(found.folder, 6)


@pytest.mark.parametrize("name", ["ids", "supervised", "offsets", "units", "records.arrow"])
def test_a_damaged_shard_is_named(make_units: MakeUnits, make_set: MakeSet, name: str) -> None:
    found = make_set(make_units(LENGTHS), 45)
    file = found.folder / "shard-00001" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert len(open_shard(found.folder, 0)) == 4
    with pytest.raises(DamagedArtifact, match=f"shard-00001/{name} differs"):
        open_shard(found.folder, 1)
    file.unlink()
    with pytest.raises(DamagedArtifact, match=f"shard-00001/{name} is missing"):
        open_shard(found.folder, 1)


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=30), seed=st.integers(0, 9), count=st.integers(0, 40))
def test_runs_are_those_that_slices_give(lengths: list[int], seed: int, count: int) -> None:
    draws = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = draws.integers(-(2**31), 2**31, offsets[-1], dtype=np.int32)
    supervised = draws.random(offsets[-1]) < 0.5
    runs = draws.integers(0, len(lengths), count)
    found = Store(ids, supervised, offsets).take(runs)
    for values, whole in zip(found, (ids, supervised), strict=True):
        parts = [whole[offsets[run] : offsets[run + 1]] for run in runs.tolist()]
        assert values.tolist() == [one for part in parts for one in part.tolist()]
        assert values.dtype == whole.dtype


def test_sums_of_runs() -> None:
    assert summed(np.array([1, 2, 3, 4, 5, 6]), np.array([3, 1, 2])).tolist() == [6, 4, 11]
    assert summed(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
