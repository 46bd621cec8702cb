"""The utility of any scikit-learn classifier, trained from scratch for each set."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from posttrain.attribution.utility import Rows, learning_task
from posttrain.attribution.values import Floats
from posttrain.store.errors import UserError

ClassifierScore = Literal["accuracy", "log likelihood"]

PROBABILITY_FLOOR = 1e-6  # a class without rows has probability 0, whose logarithm no mean survives


def empty_score(score: str, classes: int) -> float:
    """Returns the score of no rows: that of a guess, which gives each of K classes the probability 1/K."""
    return -float(np.log(classes)) if score == "log likelihood" else 1 / classes


def mean_log_likelihood(probabilities: Floats) -> float:
    """Returns the mean log of the true classes' probabilities, float64 [M], each at least `PROBABILITY_FLOOR`."""
    return float(np.log(np.maximum(probabilities, PROBABILITY_FLOOR)).mean())


class ClassifierUtility:
    """Scores a classifier, trained on the rows, on the evaluation records.

    A set of no rows scores ``empty``. A set with rows of one class predicts that class with probability 1. A class
    without rows in the set has probability 0.

    Args:
        estimator: scikit-learn's; a copy of it is trained each time. A ``random_state`` of None is taken for 0.
        features: [N, D].
        labels: [N].
        evaluation_features: [M, D].
        evaluation_labels: [M].
        score: ``accuracy`` is the share that is predicted right. ``log likelihood`` is the mean natural logarithm of
            the true class's probability, minus the log-loss, where no probability counts as less than 1e-6.
        empty: the score of no rows; a guess's, 1/K or -ln K for K classes, if None.

    Raises:
        UserError: as `learning_task`, or the classifier gives no probabilities where they are needed.
    """

    def __init__(
        self,
        estimator: Any,
        features: npt.ArrayLike,
        labels: Sequence[Any] | npt.NDArray[Any],
        evaluation_features: npt.ArrayLike,
        evaluation_labels: Sequence[Any] | npt.NDArray[Any],
        *,
        score: ClassifierScore = "accuracy",
        empty: float | None = None,
    ) -> None:
        from sklearn.base import clone

        if score not in ("accuracy", "log likelihood"):
            raise UserError(f"no score `{score}`", fix="accuracy or log likelihood")
        if score == "log likelihood" and not hasattr(estimator, "predict_proba"):
            raise UserError(f"{type(estimator).__name__} gives no probabilities", fix="score by accuracy")
        self._task = task = learning_task(features, labels, evaluation_features, evaluation_labels)
        self.players = len(task.labels)
        self._estimator = clone(estimator)
        settings = self._estimator.get_params()
        # One set must always score the same.
        if settings.get("random_state", 0) is None:
            self._estimator.set_params(random_state=0)
        self._score = score
        self._empty = empty_score(score, task.classes) if empty is None else empty
        name = f"{type(estimator).__module__}.{type(estimator).__qualname__}"
        self.key = task.key("classifier", name, repr(sorted(settings.items())), score, self._empty)

    def __call__(self, rows: Rows) -> float:
        from sklearn.base import clone

        if not len(rows):
            return self._empty
        task = self._task
        labels = task.labels[rows]
        # Many classifiers refuse to be fitted to one class.
        if (labels == labels[0]).all():
            probabilities = (task.evaluation_labels == labels[0]).astype(np.float64)
            return float(probabilities.mean()) if self._score == "accuracy" else mean_log_likelihood(probabilities)
        model = clone(self._estimator).fit(task.features[rows], labels)
        if self._score == "accuracy":
            return float((model.predict(task.evaluation_features) == task.evaluation_labels).mean())
        probabilities = np.zeros((len(task.evaluation_labels), task.classes))
        probabilities[:, model.classes_] = model.predict_proba(task.evaluation_features)
        return mean_log_likelihood(probabilities[np.arange(len(probabilities)), task.evaluation_labels])
