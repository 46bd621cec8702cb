"""The accuracy of a ridge classifier that learns one record at a time."""

import numpy as np

from posttrain.attribution.blocks import Floats, Rows


class RidgeUtility:
    """Scores by accuracy least squares on targets of 1 for a row's class and -1 for the others, with an L2 penalty.

    It is scikit-learn's ``RidgeClassifier(alpha)``: the intercept is not penalised, and of equal decision values the
    first class in sorted order wins. Rows of one class predict that class, no rows score a guess's 1/K of K classes.
    One more row costs O(D^2 + M (D + K)) where a training costs O(n D^2 + D^3). The error of rounding grows with the
    rows added; a thousand rows change no decision value by more than about 1e-12 of its size if alpha is 1 and features
    are of about unit size.

    Args:
        features: [N, D].
        labels: [N], of K classes.
        evaluation_features: [M, D].
        evaluation_labels: [M].
        alpha: the penalty's weight, positive.
    """

    def __init__(
        self,
        features: Floats,
        labels: Rows,
        evaluation_features: Floats,
        evaluation_labels: Rows,
        *,
        alpha: float = 1.0,
    ) -> None:
        # Neither classifier nor accuracy depends on where the origin lies, but the error of rounding does.
        origin = features.mean(axis=0)
        self.players = len(labels)
        self.classes = np.unique(labels)
        self.features, self.records = features - origin, evaluation_features - origin
        self.targets = np.where(labels[:, None] == self.classes, 1.0, -1.0)
        self.true = evaluation_labels
        self.alpha = alpha

    def start(self) -> "_IncrementalRidge":
        """Returns a regression on no rows."""
        return _IncrementalRidge(self)


class _IncrementalRidge:
    """Means, weights and the inverse of the penalised scatter, each updated by one rank a row."""

    def __init__(self, utility: RidgeUtility) -> None:
        self._utility = utility
        width, classes = utility.features.shape[1], len(utility.classes)
        self._rows = 0
        self._mean, self._intercept = np.zeros(width), np.zeros(classes)
        self._weights = np.zeros((width, classes))
        self._inverse = np.asfortranarray(np.eye(width) / utility.alpha)  # its upper triangle counts
        self._decisions = np.zeros((classes, len(utility.true)))  # without what the means add

    def add(self, row: int) -> None:
        from scipy.linalg.blas import dsymv, dsyr

        utility, count = self._utility, self._rows
        step = utility.features[row] - self._mean
        target = utility.targets[row] - self._intercept
        # Sherman and Morrison's update of the inverse. The scatter about the mean of n + 1 rows is that of n rows plus
        # n / (n + 1) times the outer square of the new row's distance from their mean, so an intercept is harmless.
        if count:
            direction = dsymv(1.0, self._inverse, step)
            size = (count + 1) / count + step @ direction
            gain = direction / size
            residual = target - step @ self._weights
            self._weights += np.outer(gain, residual)
            self._decisions += np.outer(residual, utility.records @ gain)
            self._inverse = dsyr(-1 / size, direction, a=self._inverse, overwrite_a=True)
        self._rows += 1
        self._mean += step / self._rows
        self._intercept += target / self._rows

    def score(self) -> float:
        utility = self._utility
        if not self._rows:
            return 1 / len(utility.classes)
        decisions = self._decisions + (self._intercept - self._mean @ self._weights)[:, None]
        # A class without rows has -1 and is never the greatest: the values of P classes with rows sum to 2 - P.
        return float(np.mean(utility.classes[decisions.argmax(axis=0)] == utility.true))
