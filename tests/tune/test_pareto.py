"""Fronts and hypervolumes against definitions, Optuna's, and volumes that were counted."""

from itertools import product

import numpy as np
import pytest
from optuna._hypervolume import compute_hypervolume
from optuna.study._multi_objective import _fast_non_domination_rank

from posttrain.tune.pareto import front_mask, hypervolume, knee


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


@pytest.mark.parametrize("seed", range(5))
def test_hypervolume_is_optunas(seed: int) -> None:
    for points in clouds(seed):
        reference = np.full(points.shape[1], 2.5 if points.max() > 1 else 0.8)
        inside = points[(points < reference).all(axis=1)]
        expected = compute_hypervolume(inside, reference) if len(inside) else 0.0
        assert hypervolume(points, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_hypervolume_counts_the_cells_that_are_dominated(width: int) -> None:
    generator = np.random.default_rng(width)
    points = generator.integers(0, 5, (6, width))
    cells = product(range(5), repeat=width)
    counted = sum(any(all(p <= c for p, c in zip(point, cell, strict=True)) for point in points) for cell in cells)
    assert hypervolume(points.astype(np.float64), np.full(width, 5.0)) == counted


def test_hypervolume_of_points_beyond_the_reference_is_none() -> None:
    points = np.array([[0.0, 2.0], [1.0, 1.0]])
    assert hypervolume(points, np.array([1.0, 1.0])) == 0.0
    assert hypervolume(np.empty((0, 2)), np.ones(2)) == 0.0
    assert hypervolume(points, np.array([3.0, 3.0])) == 3 * 1 + 2 * 1


def test_the_knee() -> None:
    curve = np.array([[0.0, 1.0], [0.1, 0.2], [0.5, 0.15], [1.0, 0.0]])
    assert knee(curve) == 1
    # Units change nothing.
    assert knee(curve * [1000, 1e-3] + [5, -3]) == 1
    assert knee(np.array([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]])) == 1
    assert knee(np.array([[3.0, 4.0]])) == 0
