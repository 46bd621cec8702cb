"""What evaluation found weakest steers the next selection."""

from collections.abc import Iterable

import numpy as np


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
