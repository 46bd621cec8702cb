"""Packed rows: cut where micro-batches are, with the labels, positions and segments of each sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.chat import TokenizedExample
from posttrain.models.packing import micro_batches
from posttrain.train.data.row_loader import pack_rows, row_boundaries
from posttrain.train.data.token_set import Tokens


@given(lengths=st.lists(st.integers(1, 50), max_size=60), budget=st.integers(1, 120))
def test_row_boundaries_are_those_of_micro_batches(lengths: list[int], budget: int) -> None:
    units = [[TokenizedExample([0] * length, [True] * length)] for length in lengths]
    expected = np.cumsum([0, *(len(part) for part in micro_batches(units, budget))]).tolist()
    assert row_boundaries(np.array(lengths, np.int64), budget).tolist() == expected


@given(sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), max_size=25), budget=st.integers(1, 120))
@pytest.mark.parametrize("seed", [0])
def test_packed_rows_match_a_plain_loop(seed: int, sizes: list[list[int]], budget: int) -> None:
    draws = np.random.default_rng(seed)
    units = [
        [
            TokenizedExample(draws.integers(0, 2**31, size).tolist(), (draws.random(size) < 0.5).tolist())
            for size in unit
        ]
        for unit in sizes
    ]
    expected = []
    for part in micro_batches(units, budget):
        row: dict[str, list[int]] = {"ids": [], "labels": [], "positions": [], "segments": []}
        for number, sequence in enumerate(sequence for unit in part for sequence in unit):
            row["ids"] += sequence.ids
            row["labels"] += [id if on else -100 for id, on in zip(sequence.ids, sequence.supervised, strict=True)]
            row["positions"] += range(len(sequence.ids))
            row["segments"] += [number] * len(sequence.ids)
        expected.append(row)
    sequences = [sequence for unit in units for sequence in unit]
    tokens = Tokens(
        np.array([id for sequence in sequences for id in sequence.ids], np.int32),
        np.array([item for sequence in sequences for item in sequence.supervised], np.bool_),
        np.array([len(sequence.ids) for sequence in sequences], np.int64),
        np.array([len(unit) for unit in units], np.int64),
    )
    actual = pack_rows(tokens, budget)
    assert len(actual) == len(expected)
    assert [{name: values.tolist() for name, values in row.items()} for row in actual] == expected
    assert all(values.dtype == np.int32 for row in actual for values in row.values())
