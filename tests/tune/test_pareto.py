"""Fronts against their definition and Optuna's, and knees."""

from itertools import product

import numpy as np
import pytest
from optuna.study._multi_objective import _fast_non_domination_rank

from posttrain.tune.pareto import front_mask, knee


def clouds(seed: int) -> list[np.ndarray]:
    """Points without ties, with many, and all equal, in one to four dimensions."""
    generator = np.random.default_rng(seed)
    return [
        cloud
        for count, width in product((1, 2, 7, 40), (1, 2, 3, 4))
        for cloud in (
            generator.random((count, width)),
            generator.integers(0, 4, (count, width)).astype(np.float64),
            np.ones((count, width)),
        )
    ]


def dominates(first: np.ndarray, second: np.ndarray) -> bool:
    return all(a <= b for a, b in zip(first, second, strict=True)) and any(
        a < b for a, b in zip(first, second, strict=True)
    )


def ranks_by_definition(points: np.ndarray) -> list[int]:
    ranks, level = [-1] * len(points), 0
    while -1 in ranks:
        left = [index for index, rank in enumerate(ranks) if rank == -1]
        front = [index for index in left if not any(dominates(points[other], points[index]) for other in left)]
        for index in front:
            ranks[index] = level
        level += 1
    return ranks


@pytest.mark.parametrize("seed", range(2))
def test_fronts_are_those_of_the_definition_and_of_optuna(seed: int) -> None:
    for points in clouds(seed):
        ranks = ranks_by_definition(points)
        assert ranks == _fast_non_domination_rank(points).tolist()
        assert front_mask(points).tolist() == [rank == 0 for rank in ranks]


def test_the_knee() -> None:
    curve = np.array([[0.0, 1.0], [0.1, 0.2], [0.5, 0.15], [1.0, 0.0]])
    assert knee(curve) == 1
    # Units change nothing.
    assert knee(curve * [1000, 1e-3] + [5, -3]) == 1
    assert knee(np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])) == 1
    assert knee(np.array([[3.0, 4.0]])) == 0
