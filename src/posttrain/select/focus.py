"""What evaluation found weakest steers the next selection."""

from collections.abc import Iterable

import numpy as np

from posttrain.select.hard_cases.neighbours import NEIGHBOURS, nearest_case
from posttrain.select.selectors.whitening import DIMENSIONS


def of_worst_classes(predicted: np.ndarray, runner_up: np.ndarray, worst_classes: Iterable[str]) -> np.ndarray:
    """Records whose most probable or second most probable label is one of the worst classes.

    A class with poor recall is seldom predicted, so its records mostly show up as the runner-up.

    Args:
        predicted: object [N], labels or None.
        runner_up: object [N], labels or None.
        worst_classes: names of the classes.

    Returns:
        bool [N].
    """
    worst = list(worst_classes)
    return np.isin(predicted.astype(str), worst) | np.isin(runner_up.astype(str), worst)


def near_hard_cases(
    embeddings: np.ndarray,
    hard_cases: np.ndarray,
    neighbours: int = NEIGHBOURS,
    dimensions: int = DIMENSIONS,
) -> np.ndarray:
    """Records among the nearest neighbours of a hard case, as `nearest_case` finds them.

    Args:
        embeddings: float [N, D] of the pool.
        hard_cases: float [H, D] by the same model.
        neighbours: pool records taken for each hard case.
        dimensions: principal components that are kept.

    Returns:
        bool [N].
    """
    return nearest_case(embeddings, hard_cases, neighbours, dimensions) >= 0
