"""Low-rank approximation, against singular values in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posttrain.merge import low_rank
from posttrain.merge.low_rank import concatenate, truncated_svd

Draw = Callable[..., torch.Tensor]


@pytest.fixture
def draw() -> Draw:
    """Returns a function that draws a matrix with given singular values."""

    def matrix(rows: int, columns: int, values: np.ndarray) -> torch.Tensor:
        generator = np.random.default_rng(3)
        left, _ = np.linalg.qr(generator.normal(size=(rows, len(values))))
        right, _ = np.linalg.qr(generator.normal(size=(columns, len(values))))
        return torch.from_numpy((left * values) @ right.T).float()

    return matrix


def _best(matrix: torch.Tensor, rank: int) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return np.asarray((left[:, :rank] * values[:rank]) @ right[:rank])


@pytest.mark.parametrize("shape", [(40, 70), (70, 40), (33, 33), (1, 9), (9, 1)])
@pytest.mark.parametrize("rank", [1, 5, 1000])
def test_the_product_is_the_best_of_its_rank(shape: tuple[int, int], rank: int) -> None:
    matrix = torch.from_numpy(np.random.default_rng(1).normal(size=shape)).float()
    result = truncated_svd(matrix.clone(), rank, 1.0, 0)
    most = min(rank, *shape)
    assert result.rank <= most
    np.testing.assert_allclose((result.up.double() @ result.down.double()).numpy(), _best(matrix, most), atol=1e-6)
    values = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    assert result.size == pytest.approx(float((values**2).sum()), rel=1e-6)
    assert result.error == pytest.approx(float((values[most:] ** 2).sum()), rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("energy", [0.3, 0.8, 0.99])
def test_energy_takes_the_least_rank_that_keeps_it(energy: float, draw: Draw) -> None:
    values = 0.9 ** np.arange(30)
    shares = np.cumsum(values**2) / np.sum(values**2)
    least = 1 + int((shares < energy).sum())
    matrix = draw(50, 80, values)
    result = truncated_svd(matrix.clone(), 1000, energy, 0)
    assert result.rank == least
    assert 1 - result.error / result.size == pytest.approx(shares[least - 1], abs=1e-5)
    capped = truncated_svd(matrix.clone(), least - 1, energy, 0)
    assert capped.rank == least - 1
    assert 1 - capped.error / capped.size < energy


def test_a_matrix_of_low_rank_comes_back_at_that_rank(draw: Draw) -> None:
    matrix = draw(60, 90, np.array([5.0, 2.0, 1.0, 0.5]))
    result = truncated_svd(matrix.clone(), 32, 0.999999, 0)
    assert result.rank == 4
    assert torch.allclose(result.up @ result.down, matrix, atol=1e-6)
    # Balanced, so that training can continue with either factor.
    assert torch.allclose(result.up.norm(dim=0), result.down.norm(dim=1), rtol=1e-4)


def test_a_matrix_of_zeros_gives_zeros() -> None:
    result = truncated_svd(torch.zeros(5, 3), 4, 0.9, 0)
    assert (result.rank, result.size, result.error) == (1, 0, 0)
    assert not result.up.any()
    assert not result.down.any()


@pytest.mark.slow
def test_large_matrices_are_approximated_nearly_as_well(draw: Draw, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = draw(300, 400, 0.97 ** np.arange(300))
    exact = truncated_svd(matrix.clone(), 20, 1.0, 0)
    monkeypatch.setattr(low_rank, "_EXACT", 64)
    one, same, other = (truncated_svd(matrix.clone(), 20, 1.0, seed) for seed in (0, 0, 1))
    assert one.rank == 20
    assert exact.error <= one.error <= exact.error * (1 + 1e-4)
    assert torch.equal(one.up, same.up)
    assert not torch.equal(one.up, other.up)
    # Of most of a matrix's rank, all singular vectors are computed after all.
    assert torch.equal(truncated_svd(matrix.clone(), 200, 1.0, 0).up, truncated_svd(matrix.clone(), 200, 1.0, 1).up)


def test_the_error_is_that_of_the_rounded_factors(draw: Draw) -> None:
    matrix = draw(40, 40, np.array([3.0, 1.0]))
    result = truncated_svd(matrix.clone(), 2, 1.0, 0, torch.bfloat16)
    assert result.up.dtype == torch.bfloat16
    missed = matrix.double() - result.up.double() @ result.down.double()
    assert result.error == pytest.approx(float(missed.square().sum()), rel=1e-3)
    assert 1e-4 < (result.error / result.size) ** 0.5 < 1e-2


def test_concatenation_is_the_weighted_sum_of_products() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(rank, 30, generator=generator), torch.randn(20, rank, generator=generator)) for rank in (2, 5)
    ]
    result = concatenate(pairs, [0.5, -2.0], torch.float32)
    expected = 0.5 * pairs[0][1].double() @ pairs[0][0].double() - 2 * pairs[1][1].double() @ pairs[1][0].double()
    assert result.rank == 7
    assert torch.allclose(result.up.double() @ result.down.double(), expected, atol=1e-5)
    assert result.error == pytest.approx(0, abs=1e-9)
