"""Lazy farthest-first selection, against one that recomputes everything at each step."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.select.selectors import farthest_first as bounds
from posttrain.select.selectors.farthest_first import farthest_first
from posttrain.select.selectors.similarity import Cosine, Euclidean


def plain_farthest_first(
    similarity: np.ndarray,
    n: int,
    worth: np.ndarray,
    weight: float,
    before: Sequence[int],
    groups: np.ndarray | None = None,
    quotas: np.ndarray | None = None,
) -> list[int]:
    """`farthest_first` by its definition."""
    worth, chosen, remaining = worth.astype(np.float64).copy(), list(before), None if quotas is None else quotas.copy()
    result: list[int] = []
    while len(result) < n:
        values = worth - weight * similarity[:, chosen].max(axis=1) if chosen else worth.copy()
        values[result] = -np.inf
        if remaining is not None and groups is not None:
            values[remaining[groups] <= 0] = -np.inf
        row = int(np.argmax(values))
        if np.isneginf(values[row]):
            break
        chosen.append(row)
        result.append(row)
        if remaining is not None and groups is not None:
            remaining[groups[row]] -= 1
    return result


@pytest.fixture(autouse=True)
def small_first_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at a time, so that most rows are evaluated lazily."""
    monkeypatch.setattr(bounds, "_FIRST_SIZE", 4)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 300),
    n=st.integers(1, 60),
    labelled=st.integers(0, 5),
    weight=st.sampled_from([0.0, 0.25, 1.0]),
    seed=st.integers(0, 9),
)
def test_lazy_farthest_first_equals_its_definition(rows: int, n: int, labelled: int, weight: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    # Small whole numbers and halves of them: every value is exact, and many are the same.
    points = generator.integers(-4, 5, (rows, 3)).astype(np.float32)
    worth = generator.integers(0, 6, rows).astype(np.float32)
    before = generator.permutation(rows)[:labelled]
    worth[before] = -np.inf
    euclidean = Euclidean.from_rows(points)
    exact = euclidean.between(slice(None), slice(None)).astype(np.float64)
    result = farthest_first(euclidean, n, worth, weight, before)
    assert result.tolist() == plain_farthest_first(exact, n, worth, float(np.float32(weight)), before.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_quotas_bound_each_group(seed: int) -> None:
    generator = np.random.default_rng(seed)
    points, worth = generator.integers(-9, 10, (200, 4)).astype(np.float32), generator.integers(0, 50, 200) * 1.0
    groups, quotas = generator.integers(0, 4, 200), np.array([0, 3, 100, 5])
    euclidean = Euclidean.from_rows(points)
    result = farthest_first(euclidean, 30, worth, 0.5, np.array([], np.int64), groups, quotas)
    exact = euclidean.between(slice(None), slice(None))
    assert result.tolist() == plain_farthest_first(exact, 30, worth, 0.5, [], groups, quotas)
    assert (np.bincount(groups[result], minlength=4) <= quotas).all()
    few = farthest_first(euclidean, 500, worth, 0.5, np.array([], np.int64), groups, np.array([0, 3, 4, 5]))
    assert len(few) == 12


@pytest.mark.slow
def test_many_rows_of_real_numbers() -> None:
    generator = np.random.default_rng(1)
    points = generator.normal(size=(3000, 16)).astype(np.float32)
    cosine = Cosine.from_rows(points)
    worth = generator.random(3000).astype(np.float32)
    exact = cosine.between(slice(None), slice(None))
    result = farthest_first(cosine, 200, worth, 0.7, np.array([4]))
    assert result.tolist() == plain_farthest_first(exact, 200, worth, float(np.float32(0.7)), [4])


def test_most_similarities_are_never_computed() -> None:
    """Rows close to the chosen ones are not evaluated again."""
    sizes: list[int] = []

    class CountingEuclidean(Euclidean):
        def between(self, rows, others):  # type: ignore[no-untyped-def]
            result = super().between(rows, others)
            sizes.append(result.size)
            return result

    generator = np.random.default_rng(0)
    centres = generator.normal(size=(50, 8)) * 10
    points = (centres[generator.integers(0, 50, 20_000)] + generator.normal(size=(20_000, 8)) * 0.1).astype(np.float32)
    euclidean = CountingEuclidean(points, Euclidean.from_rows(points).halves)
    farthest_first(euclidean, 40, np.zeros(20_000), 1.0, np.array([0]))
    assert sum(sizes) < 0.5 * 20_000 * 40
