"""The k-th largest magnitude against a sort."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.merge import order_statistics
from posttrain.merge.order_statistics import Magnitudes, of_ranks, rank_of_share

SHARES = [0.0, 1e-7, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0]


def magnitudes_of(values: np.ndarray, block: int) -> Magnitudes:
    """Returns the blocks of float32 values [models, elements]; a block may be changed once the next is drawn."""

    def magnitudes(stride: int) -> Iterator[list[np.ndarray]]:
        buffer = np.empty((len(values), block), np.float32)
        for start in range(0, values.shape[1], block):
            part = values[:, start : start + block : stride]
            buffer[:, : part.shape[1]] = part
            yield list(buffer[:, : part.shape[1]])

    return magnitudes


def kth_largest(magnitudes: Magnitudes, elements: int, shares: list[float]) -> list[float]:
    return of_ranks(magnitudes, [rank_of_share(share, elements) for share in shares], elements)


def kth_by_sorting(values: np.ndarray, share: float) -> float:
    """Returns the same from a sorted copy."""
    if share <= 0 or not len(values):
        return float("inf")
    return float(np.sort(values)[len(values) - max(1, int(share * len(values)))])


def assert_exact(values: np.ndarray, block: int, shares: list[float]) -> None:
    models = np.repeat(values[None], len(shares), axis=0)
    result = kth_largest(magnitudes_of(models, block), models.shape[1], shares)
    assert result == [kth_by_sorting(values, share) for share in shares]


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets brackets be needed for tensors of a few hundred elements, and miss often."""
    monkeypatch.setattr(order_statistics, "_SAMPLE", 64)
    monkeypatch.setattr(order_statistics, "_DEVIATIONS", 1.0)


@given(
    seed=st.integers(0, 2**32 - 1),
    elements=st.integers(0, 3000),
    block=st.integers(1, 700),
    distinct=st.sampled_from([1, 2, 3, 10, 10**6]),
    order=st.sampled_from(["random", "ascending", "descending", "first rows apart", "strided"]),
    share=st.one_of(st.sampled_from(SHARES), st.floats(0, 1)),
)
@settings(max_examples=40)
@pytest.mark.usefixtures("small_sample")
def test_is_that_of_a_sort(seed: int, elements: int, block: int, distinct: int, order: str, share: float) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.integers(0, distinct, elements) / np.float32(7)).astype(np.float32)
    if order == "ascending":
        values.sort()
    elif order == "descending":
        values = -np.sort(-values)
    elif order == "first rows apart":
        values[: elements // 3] += 10
    elif order == "strided":
        # Every element that the sample takes is above all others.
        values[:: 1 + seed % 40] += 1e3
    assert_exact(values, block, [share, 0.3])


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sampled", [0.0, 1.0, 3.0])
def test_sample_is_one_value_that_the_others_do_not_have(sampled: float, share: float) -> None:
    # Both ends of the bracket are that value, and the result is not.
    values = np.random.default_rng(0).choice(np.float32([0.5, 1.0, 2.0]), 1000)
    values[::15] = sampled
    assert_exact(values, 1000, [share])


@pytest.mark.parametrize("case", ["normal", "ties", "zeros", "first rows apart", "outliers", "sampled columns apart"])
def test_tensors_that_are_larger_than_the_sample(case: str) -> None:
    elements, columns = 5 * (1 << 18) + 3, 1024
    generator = np.random.default_rng(1)
    values = np.abs(generator.normal(size=elements)).astype(np.float32)
    if case == "ties":
        values = values.round(1)
    elif case == "zeros":
        values[generator.random(elements) < 0.97] = 0
    elif case == "first rows apart":
        values[: 300 * columns] = 50
    elif case == "outliers":
        values[::columns] *= 1e6
    elif case == "sampled columns apart":
        for start in range(0, elements, 1 << 16):
            values[start : start + (1 << 16) : 5] = 7
    assert_exact(values, 1 << 16, [0.0, 1e-6, 0.01, 0.2, 0.21, 0.5, 0.95, 1.0])


def test_each_model_has_its_own_share() -> None:
    values = np.abs(np.random.default_rng(2).normal(size=(3, 1000))).astype(np.float32)
    shares = [0.1, 0.0, 1.0]
    result = kth_largest(magnitudes_of(values, 64), 1000, shares)
    assert result == [kth_by_sorting(row, share) for row, share in zip(values, shares, strict=True)]


def test_reads_what_is_near_the_result_only() -> None:
    # One pass for the sample and one to select, as long as the sample is like the whole.
    passes: list[int] = []
    values = np.abs(np.random.default_rng(3).normal(size=(2, 1 << 20))).astype(np.float32)

    def magnitudes(stride: int) -> Iterator[list[np.ndarray]]:
        passes.append(stride)
        return magnitudes_of(values, 1 << 16)(stride)

    kth_largest(magnitudes, 1 << 20, [0.2, 0.5])
    assert passes == [5, 1]
