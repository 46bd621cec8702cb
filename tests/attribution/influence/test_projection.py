import numpy as np
import pytest
import torch

from posttrain.attribution.influence.projection import Projection
from posttrain.store.errors import UserError

KINDS = ("sparse", "dense")


def vectors(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_unbiased_with_the_stated_variance(kind) -> None:
    x, y = vectors(2, 4500)
    y = y + x
    x[:50] *= 5  # some coordinates larger than others
    draws, dimension = 300, 100
    result = []
    for seed in range(draws):
        a, b = Projection(dimension, seed, kind)(torch.stack([x, y]))
        result.append(float(a @ b))
    variance = float(x @ x * (y @ y) + (x @ y) ** 2 - 2 * (x**2 * y**2).sum()) / dimension
    error = (variance / draws) ** 0.5
    assert abs(np.mean(result) - float(x @ y)) < 4 * error
    assert error < 0.03 * float(x @ y)
    # The variance of a sample variance, were the draws normal, is 2 variance^2 / draws.
    assert abs(np.var(result, ddof=1) / variance - 1) < 5 * (2 / draws) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_product_with_one_matrix_for_every_block_size(kind) -> None:
    size, projection = 9000, Projection(70, 3, kind)  # three blocks of the matrix
    matrix = projection(torch.eye(size, dtype=torch.float64))
    if kind == "sparse":
        assert (matrix.abs().sum(1) == 1).all()
        assert (matrix != 0).sum(1).max() == 1
    else:
        torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, 70**-0.5))
    assert abs(float(matrix.sum() / matrix.abs().sum())) < 0.05
    for other in (matrix[4096:8192], matrix[1:4097]):  # no block repeats another
        assert float((matrix[:4096] * other).sum(1).abs().mean()) < 0.2
    x = vectors(12, size)
    whole = projection(x)
    torch.testing.assert_close(whole, x @ matrix)
    for block in (1, 5):
        torch.testing.assert_close(torch.cat([projection(part) for part in x.split(block)]), whole)
    low = projection(x.float())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_matrix_do_not_depend_on_their_number(kind) -> None:
    x = vectors(3, 5000)
    longer = torch.cat([x, torch.zeros(3, 6000, dtype=torch.float64)], 1)
    torch.testing.assert_close(Projection(64, 1, kind)(x), Projection(64, 1, kind)(longer))


def test_a_wide_dense_matrix_does_not_depend_on_the_block_size(monkeypatch) -> None:
    from posttrain.attribution.influence import projection

    x = vectors(3, 5000)
    whole = Projection(130, 1, "dense")(x)
    monkeypatch.setattr(projection, "_MATRIX_NUMBERS", 130 * 7)
    torch.testing.assert_close(Projection(130, 1, "dense")(x), whole)


def test_seeds_kinds_and_dimensions_give_other_matrices() -> None:
    x = vectors(2, 5000)
    result = [Projection(64, seed, kind)(x) for seed in (0, 1) for kind in KINDS]
    for row, first in enumerate(result):
        for other in result[:row]:
            assert not torch.allclose(first, other)


def test_the_matrix_of_a_seed_never_changes() -> None:
    """Cached gradients would become wrong, and processes would not share them."""
    x = torch.arange(1.0, 7.0, dtype=torch.float64)[None]
    assert Projection(4, 11)(x)[0].tolist() == SPARSE
    assert (Projection(4, 11, "dense")(x)[0] * 2).tolist() == DENSE


SPARSE = [0.0, -6.0, -1.0, 6.0]
DENSE = [-1.0, 3.0, 9.0, -13.0]


def test_unusable_dimensions_seeds_and_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="at least one dimension, not 0"):
        Projection(0)
    with pytest.raises(UserError, match="0 or more, not -1"):
        Projection(4, -1)
    with pytest.raises(UserError, match="unknown projection `normal`"):
        Projection(4, 0, "normal")
