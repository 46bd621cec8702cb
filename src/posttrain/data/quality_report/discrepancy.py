"""The maximum mean discrepancy: whether two sets of embeddings come from one distribution."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_PERMUTATIONS_AT_ONCE = 256


@dataclass(frozen=True)
class Discrepancy:
    """The outcome of the test.

    Attributes:
        squared: the unbiased estimate of MMD², which may be below zero.
        p_value: ``(b + 1) / (permutations + 1)``, b being how many permutations reach it.
        bandwidth: of the kernel, in the embeddings' unit.
        rows: how many embeddings of each side were compared.
        permuted: MMD² under each permutation.
        embedder: what made the embeddings, in words.
    """

    squared: float
    p_value: float
    bandwidth: float
    rows: tuple[int, int]
    permuted: tuple[float, ...]
    embedder: str = ""

    @property
    def shifted(self) -> bool:
        """Whether chance explains it with less than 1% probability."""
        return self.p_value < 0.01

    def to_json(self) -> dict[str, Any]:
        return {
            "mmd_squared": self.squared,
            "p_value": self.p_value,
            "shifted": self.shifted,
            "bandwidth": self.bandwidth,
            "rows": list(self.rows),
            "embedder": self.embedder,
            "permuted": list(self.permuted),
        }


def discrepancy(
    old: npt.NDArray[np.float32],
    new: npt.NDArray[np.float32],
    *,
    permutations: int = 999,
    seed: int = 0,
    embedder: str = "",
) -> Discrepancy:
    """MMD² between embeddings [N, D] and [M, D], with N and M at least 2, and its permutation test.

    The unbiased estimate (Gretton et al., "A kernel two-sample test", JMLR 2012, equation 3) with the kernel
    ``exp(-|x - y|² / (2 b²))``, b being the median distance between any two of all N + M. The p-value counts what
    was measured as one of the permutations, so that it is never 0 (Phipson and Smyth 2010). Takes 8 (N + M)² bytes
    a few times over: sample before.

    Raises:
        ValueError: fewer than two rows, or rows of different length.
    """
    if min(len(old), len(new)) < 2 or old.shape[1] != new.shape[1]:
        raise ValueError(f"embeddings of the shapes {old.shape} and {new.shape} cannot be compared")
    kernel, bandwidth = _kernel(np.concatenate([old, new]).astype(np.float64))
    count, total = len(old), len(kernel)
    rng = np.random.default_rng(seed)
    first = np.arange(total) < count
    squared = float(_squared(kernel, first[:, None], count)[0])
    permuted: list[float] = []
    for start in range(0, permutations, _PERMUTATIONS_AT_ONCE):
        columns = min(_PERMUTATIONS_AT_ONCE, permutations - start)
        sides = rng.permuted(np.repeat(first[:, None], columns, axis=1), axis=0)
        permuted += _squared(kernel, sides, count).tolist()
    rounding = 1e-12  # a permutation that only swaps equal rows reaches it
    reached = sum(one >= squared - rounding for one in permuted)
    p_value = (reached + 1) / (permutations + 1)
    return Discrepancy(squared, p_value, bandwidth, (count, total - count), tuple(permuted), embedder)


def _kernel(points: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """The kernel between all points [T, D], with zeros on its diagonal, and its bandwidth."""
    points = points - points.mean(axis=0)  # far from 0, differences of squares lose digits
    lengths = (points**2).sum(axis=1)
    squares = lengths[:, None] + lengths - 2 * points @ points.T
    squares[squares < 1e-12 * lengths.mean()] = 0.0  # equal points, but for rounding
    distances = np.sqrt(squares[np.triu_indices(len(points), 1)])
    bandwidth = float(np.median(distances)) or float(distances.mean()) or 1.0
    kernel = np.exp(squares / (-2 * bandwidth**2))
    np.fill_diagonal(kernel, 0.0)
    return kernel, bandwidth


def _squared(kernel: npt.NDArray[np.float64], first: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.float64]:
    """MMD² of each column [P] of ``first`` [N + M, P], which marks the ``count`` rows of the first side.

    Args:
        kernel: [N + M, N + M] with zeros on its diagonal, which the unbiased estimate leaves out.
    """
    sides = first.astype(np.float64)
    reached = kernel @ sides
    within = (sides * reached).sum(axis=0)
    across = ((1 - sides) * reached).sum(axis=0)
    others = kernel.sum() - within - 2 * across
    rest = len(kernel) - count
    return np.asarray(
        within / (count * (count - 1)) + others / (rest * (rest - 1)) - 2 * across / (count * rest), dtype=np.float64
    )
