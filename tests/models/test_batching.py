"""Batches of sequences of similar length."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.batching import batches_by_tokens


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 60))
def test_batches_hold_all_rows_and_as_many_tokens_as_fit(lengths: list[int], limit: int) -> None:
    batches = batches_by_tokens(lengths, limit)
    rows = [row for batch in batches for row in batch]
    assert rows == sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= limit for batch in batches)
    assert all((len(batch) + 1) * lengths[following[0]] > limit for batch, following in pairwise(batches))
