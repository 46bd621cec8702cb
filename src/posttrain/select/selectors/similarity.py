"""Whitened embeddings, and the similarity of their rows, computed a block at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]

Floats = npt.NDArray[np.float32]

_BLOCK_ROWS = 4096

DIMENSIONS = 128
"""Default number of principal components; 64 to 256 do alike (see `whiten`)."""

Weights = npt.NDArray[np.float64]


class Similarity(Protocol):
    """Closeness of any two of N rows: the greater, the closer."""

    def __len__(self) -> int:
        """Returns N."""

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        """Returns float32 [rows, others]."""


@dataclass(frozen=True)
class Euclidean:
    """Minus half the squared distance, by the inner products that a matrix product gives quickly.

    Attributes:
        points: float32 [N, D].
        halves: float32 [N], half of each row's squared length.
    """

    points: Floats
    halves: Floats

    @classmethod
    def from_rows(cls, points: npt.NDArray[np.floating]) -> "Euclidean":
        """Prepares float [N, D]."""
        points = np.asarray(points, np.float32)
        return cls(points, np.einsum("nd,nd->n", points, points) / 2)

    def __len__(self) -> int:
        return len(self.points)

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        products: Floats = self.points[rows] @ self.points[others].T
        products -= self.halves[rows][:, None]
        products -= self.halves[others]
        # Rounding may leave a row at a small positive similarity to itself.
        return np.minimum(products, 0, out=products)


@dataclass(frozen=True)
class OuterProducts:
    """Minus half the squared distance of the outer products ``left[i] ⊗ right[i]``, which are never formed.

    Their inner products are ``(left[i] · left[j]) (right[i] · right[j])``.

    Attributes:
        left: float32 [N, K].
        right: float32 [N, D].
        halves: float32 [N], half of each product's squared length.
    """

    left: Floats
    right: Floats
    halves: Floats

    @classmethod
    def from_rows(cls, left: npt.NDArray[np.floating], right: npt.NDArray[np.floating]) -> "OuterProducts":
        """Prepares float [N, K] and float [N, D]."""
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        return cls(left, right, np.einsum("nk,nk->n", left, left) * np.einsum("nd,nd->n", right, right) / 2)

    def __len__(self) -> int:
        return len(self.left)

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        products: Floats = self.left[rows] @ self.left[others].T
        products *= self.right[rows] @ self.right[others].T
        products -= self.halves[rows][:, None]
        products -= self.halves[others]
        return np.minimum(products, 0, out=products)


def blocks(count: int, size: int = _BLOCK_ROWS) -> Iterator[slice]:
    """Yields slices of at most ``size`` that make up ``range(count)``."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def max_similarity(similarity: Similarity, rows: Rows, others: Rows) -> Floats:
    """Returns the similarity to the nearest of ``others``, float32 [rows]; minus infinity where there are none."""
    greatest = np.full(len(rows), -np.inf, np.float32)
    if len(others):
        for part in blocks(len(rows)):
            greatest[part] = similarity.between(rows[part], others).max(axis=1)
    return greatest


@cache
def _numpy_threads() -> Any:
    # Kept, as a search among all loaded libraries takes longer than the components of a small pool.
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def whiten(embeddings: npt.NDArray[np.floating], dimensions: int = DIMENSIONS) -> Floats:
    """Computes whitened principal components, with rows of length 1.

    J. Su et al., Whitening Sentence Representations, arXiv:2103.15316, 2021. On 2,000 Banking77 messages and
    SmolLM2-135M's first weights, 150 rows chosen this way cover 69.7 of 77 classes (mean of 12 seeds, standard error
    0.5; 64 to 256 components do alike), raw embeddings 66.2, centred ones 66.4, unwhitened components 65.5, random rows
    65.1; accuracy of the nearest neighbour rises from 47% to 59%.

    Args:
        embeddings: float [N, D].
        dimensions: greatest number of components.

    Returns:
        float32 [N, d] with 1 <= d <= dimensions; a row equal to the mean stays zero.
    """
    count, width = embeddings.shape
    if count == 0:
        return np.zeros((0, 1), np.float32)
    # Never more components than a tenth of the rows: whitened in as many dimensions as there are rows, all rows would
    # be equally far from each other.
    keep = min(dimensions, width, max(2, count // 10), count)
    # Mean-pooled states of a causal language model lie in a narrow cone: a shared mean and a few directions of huge
    # variance, which hold a message's length rather than its subject, swamp Euclidean distance. Centring removes the
    # mean, whitening gives each component the same weight, and unit length removes the rest of the message's length.
    mean = np.zeros(width)
    for part in blocks(count):
        mean += embeddings[part].sum(axis=0, dtype=np.float64)
    mean /= count
    products = np.zeros((width, width))
    # In float64 by one thread, so that the sums are the same anywhere.
    with _numpy_threads().limit(limits=1):
        for part in blocks(count):
            centred = embeddings[part] - mean
            products += centred.T @ centred
        variances, components = np.linalg.eigh(products / count)
        spread = np.sqrt(np.maximum(variances[::-1][:keep], 0))
        used = np.flatnonzero(spread > spread[0] * 1e-6)
        white = np.zeros((count, max(1, len(used))), np.float32)
        if not len(used):  # all rows are equal
            return white
        whitening = components[:, ::-1][:, used] / spread[used]
        for part in blocks(count):
            projected = (embeddings[part] - mean) @ whitening
            lengths = np.linalg.norm(projected, axis=1, keepdims=True)
            white[part] = np.divide(projected, lengths, out=np.zeros_like(projected), where=lengths > 0)
    return white
