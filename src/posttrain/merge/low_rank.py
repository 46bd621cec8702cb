"""Approximates a matrix by the product of two factors, and measures what the product misses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EXACT = 1024  # smaller side up to which all singular vectors are computed; above, only the first ones

_OVERSAMPLES, _ITERATIONS = 16, 8


@dataclass(frozen=True)
class LowRank:
    """A matrix as ``up @ down``.

    Attributes:
        down: [rank, columns], LoRA's A.
        up: [rows, rank], LoRA's B.
        size: squared Frobenius norm of the matrix, in float64.
        error: squared Frobenius norm of what the product misses, as the factors are stored.
    """

    down: Tensor
    up: Tensor
    size: float
    error: float

    @property
    def rank(self) -> int:
        """Returns the number of columns of ``up``."""
        return len(self.down)


def truncated_svd(matrix: Tensor, rank: int, energy: float, seed: int, dtype: torch.dtype = torch.float32) -> LowRank:
    """Returns the best approximation of a matrix by singular vectors (Eckart and Young 1936).

    Both factors get the square roots of the singular values. Up to 1,024 rows or columns the decomposition is full;
    of larger matrices the first singular vectors come from a randomised range finder with power iterations (Halko,
    Martinsson and Tropp 2011, algorithms 4.4 and 5.1), so that the time grows with the rank and not with the width.

    Args:
        matrix: float32 [rows, columns]; it is overwritten.
        rank: the highest rank; a matrix with fewer rows or columns gets as many.
        energy: share of the squared singular values; the result has the least rank that keeps it, unless ``rank`` is
            less.
        seed: of the range finder.
        dtype: of the factors.
    """
    most = min(rank, *matrix.shape)
    left, values, right = _singular_vectors(matrix, most, seed)
    noise = values[0] * torch.finfo(values.dtype).eps
    count = max(1, min(most, int((values > noise).sum())))
    if energy < 1:
        # The share is one of all singular values, not only of the computed ones.
        kept = values.double().square().cumsum(0)
        count = min(count, 1 + int((kept < energy * _squared_norm(matrix)).sum()))
    roots = values[:count].sqrt()
    return measured(matrix, roots[:, None] * right[:count], left[:, :count] * roots, dtype)


def concatenate(factors: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float], dtype: torch.dtype) -> LowRank:
    """Returns sum_i w_i B_i A_i as one product, whose rank is the sum of the ranks: [w_1 B_1 | w_2 B_2] [A_1 ; A_2].

    Args:
        factors: A [rank, columns] and B [rows, rank] of each.
        weights: w.
        dtype: of the result.
    """
    down = torch.cat([down for down, _ in factors])
    up = torch.cat([weight * up for (_, up), weight in zip(factors, weights, strict=True)], dim=1)
    return measured(up @ down, down, up, dtype)


def measured(matrix: Tensor, down: Tensor, up: Tensor, dtype: torch.dtype) -> LowRank:
    """Rounds factors, and measures what their product misses of a matrix, which is overwritten."""
    size = _squared_norm(matrix)
    down, up = down.to(dtype).contiguous(), up.to(dtype).contiguous()
    error = _squared_norm(matrix.addmm_(up.float(), down.float(), alpha=-1))
    return LowRank(down, up, size, error)


def _singular_vectors(matrix: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    smaller = min(matrix.shape)
    if smaller <= _EXACT or 2 * (count + _OVERSAMPLES) > smaller:
        return _eigenvectors(matrix, count)
    from sklearn.utils.extmath import randomized_svd

    # Of sklearn, as torch.svd_lowrank draws from the random numbers that all threads share.
    parts = randomized_svd(
        matrix.numpy(),
        count,
        n_oversamples=_OVERSAMPLES,
        n_iter=_ITERATIONS,
        power_iteration_normalizer="QR",
        random_state=seed,
    )
    left, values, right = (torch.from_numpy(part.copy()) for part in parts)
    return left, values, right


def _eigenvectors(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the first singular vectors by the eigenvectors of the smaller Gram matrix, in float64.

    In a quarter of the time of an SVD. Singular values below 1e-8 of the largest are lost to rounding, and float32, in
    which the factors are stored, has none of them.
    """
    rows, columns = matrix.shape
    wide = (matrix if rows <= columns else matrix.T).double()
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    values, left = squares.flip(0)[:count].clamp(min=0).sqrt(), vectors.flip(1)[:, :count]
    right = (left.T @ wide) / values.clamp(min=torch.finfo(values.dtype).tiny)[:, None]
    left, values, right = left.float(), values.float(), right.float()
    return (left, values, right) if rows <= columns else (right.T, values, left.T)


def _squared_norm(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
