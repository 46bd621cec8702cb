"""How close rows are to each other, a block of them at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_BLOCK = 4096


class Closeness(Protocol):
    """Closeness of any two of N rows: the greater, the closer."""

    def __len__(self) -> int:
        """N."""

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        """Float32 [rows, others]."""

    def of(self, rows: Rows) -> "Closeness":
        """Of these rows alone, copied so that they lie beside each other."""


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
    def between_rows_of(cls, points: npt.NDArray[np.floating]) -> "Euclidean":
        """Of float [N, D]."""
        points = np.asarray(points, np.float32)
        return cls(points, np.einsum("nd,nd->n", points, points) / 2)

    def __len__(self) -> int:
        return len(self.points)

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        found: Floats = self.points[rows] @ self.points[others].T
        found -= self.halves[rows][:, None]
        found -= self.halves[others]
        return np.minimum(found, 0, out=found)

    def of(self, rows: Rows) -> "Euclidean":
        return Euclidean(self.points[rows], self.halves[rows])


@dataclass(frozen=True)
class Cosine:
    """The cosine of the angle between two rows; 0 with a row of zeros.

    Attributes:
        points: float32 [N, D].
        scales: float32 [N], one over each row's length.
    """

    points: Floats
    scales: Floats

    @classmethod
    def between_rows_of(cls, points: npt.NDArray[np.floating]) -> "Cosine":
        """Of float [N, D]."""
        points = np.asarray(points, np.float32)
        lengths = np.sqrt(np.einsum("nd,nd->n", points, points))
        return cls(points, np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0))

    def __len__(self) -> int:
        return len(self.points)

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        found: Floats = self.points[rows] @ self.points[others].T
        found *= self.scales[rows][:, None]
        found *= self.scales[others]
        return found

    def of(self, rows: Rows) -> "Cosine":
        return Cosine(self.points[rows], self.scales[rows])


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
    def between_rows_of(cls, left: npt.NDArray[np.floating], right: npt.NDArray[np.floating]) -> "OuterProducts":
        """Of float [N, K] and float [N, D]."""
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        return cls(left, right, np.einsum("nk,nk->n", left, left) * np.einsum("nd,nd->n", right, right) / 2)

    def __len__(self) -> int:
        return len(self.left)

    def between(self, rows: Rows | slice, others: Rows | slice) -> Floats:
        found: Floats = self.left[rows] @ self.left[others].T
        found *= self.right[rows] @ self.right[others].T
        found -= self.halves[rows][:, None]
        found -= self.halves[others]
        return np.minimum(found, 0, out=found)

    def of(self, rows: Rows) -> "OuterProducts":
        return OuterProducts(self.left[rows], self.right[rows], self.halves[rows])


def blocks(count: int, size: int = _BLOCK) -> Iterator[slice]:
    """Slices of at most ``size`` that make up ``range(count)``."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def closest(closeness: Closeness, rows: Rows, others: Rows) -> Floats:
    """Float32 [rows], the closeness to the nearest of ``others``; minus infinity where there are none."""
    found = np.full(len(rows), -np.inf, np.float32)
    if len(others):
        for part in blocks(len(rows)):
            found[part] = closeness.between(rows[part], others).max(axis=1)
    return found
