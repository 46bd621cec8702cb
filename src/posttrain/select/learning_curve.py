"""Simulates a strategy on labelled records: accuracy of a linear head after each batch of labels."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.registry import select
from posttrain.select.selectors.similarity import Floats
from posttrain.select.strategy import (
    MAX_AGREEMENT_RECORDS,
    BatchStrategy,
    batch_strategy,
    confidence_predicts_errors,
    depends_on_neighbours,
    needs_trained_champion,
    neighbour_agreement,
)
from posttrain.store.errors import UserError

_INVERSE_PENALTY = 30.0  # for rows of length 1: the best of 1, 10 and 30 on 154, 500 and 1,500 messages of Banking77
_MIN_PROBABILITY = 1e-6

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CurveTask:
    """Labelled records, of which some are held out to measure on.

    Attributes:
        features: float32 [N, D].
        labels: int64 [N] in 0..K-1.
        test_features: float32 [M, D].
        test_labels: int64 [M].
        classes: K.
    """

    features: Floats
    labels: Labels
    test_features: Floats
    test_labels: Labels
    classes: int


@dataclass(frozen=True)
class CurvePlan:
    """The labels at which a strategy is measured, and its settings.

    Attributes:
        strategy: a name in ``SELECTORS``, or ``auto``.
        counts: labels at which the head is measured, ascending; the strategy chooses the labels in between.
        options: the strategy's own; of ``auto`` those of coverage.
        start: the strategy for the first labels where ``strategy`` uses a model's predictions; None as in the loop.
        start_options: the options of ``start``.
    """

    strategy: str
    counts: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    start_options: Mapping[str, Any] = field(default_factory=dict)


def hold_out(features: Floats, labels: Sequence[str], seed: int, held_out: float = 0.3) -> CurveTask:
    """Holds out records drawn from each class by the seed.

    Args:
        features: float [N, D].
        labels: [N].
        seed: seed of the draws.
        held_out: share of each class that is measured on, rounded down, at least one record of those with two or more.

    Raises:
        UserError: there are fewer than two classes with two records.
    """
    names, numbers = np.unique(np.asarray(labels), return_inverse=True)
    generator = np.random.default_rng([seed, 1])
    test = np.zeros(len(numbers), bool)
    for label in range(len(names)):
        rows = generator.permutation(np.flatnonzero(numbers == label))
        # Of two records or more at least one on each side, or a class would never be learned or never measured.
        test[rows[: max(int(held_out * len(rows)), min(1, len(rows) - 1))]] = True
    if len(np.unique(numbers[test])) < 2:
        raise UserError("strategies are compared on two classes or more, with two records each")
    # Length 1: the head's penalty was chosen for such rows, and a long message must not weigh more.
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = (features / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return CurveTask(unit[~test], numbers[~test], unit[test], numbers[test], len(names))


def learning_curve(task: CurveTask, plan: CurvePlan, seed: int) -> npt.NDArray[np.float64]:
    """Computes the accuracy on the held-out records after each count of labels, float64 [counts]."""
    share = not depends_on_neighbours(plan.strategy, cold=True) or _neighbours_share_labels(task)
    labelled = np.zeros(len(task.labels), bool)
    head: LinearHead | None = None
    accuracies = []
    for step, count in enumerate(plan.counts):
        # `auto` learns from the held-out records whether confidence predicts errors, as the loop does from its test
        # records.
        predicts = head is None or confidence_predicts_errors(head.confidence, head.right)
        strategy = batch_strategy(
            plan.strategy, plan.options, cold=head is None, predicts_errors=predicts, neighbours_share_labels=share
        )
        if plan.start is not None and needs_trained_champion(plan.strategy, cold=head is None):
            strategy = BatchStrategy(plan.start, plan.start_options, cold=True)
        scores = {"embeddings": task.features}
        if head is not None:
            scores["probabilities"] = head.probabilities
        draw = int(np.random.default_rng([seed, step]).integers(2**31))
        missing = count - int(labelled.sum())
        labelled[select(strategy.name, scores, missing, draw, labelled, **strategy.options)] = True
        head = fit_linear_head(task, labelled)
        accuracies.append(head.accuracy)
    return np.array(accuracies)


def full_accuracy(task: CurveTask) -> float:
    """Computes the accuracy of a head that is fitted to every label."""
    return fit_linear_head(task, np.ones(len(task.labels), bool)).accuracy


def _neighbours_share_labels(task: CurveTask) -> bool:
    rows = np.random.default_rng(0).permutation(len(task.test_labels))[:MAX_AGREEMENT_RECORDS]
    return neighbour_agreement(task.test_features[rows], task.test_labels[rows], task.features).neighbours_share_labels


class LinearHead(NamedTuple):
    """The predictions of a fitted logistic regression.

    Attributes:
        probabilities: float32 [N, K].
        confidence: float [M] in its answers to the held-out records.
        right: bool [M], whether those are right.
    """

    probabilities: Floats
    confidence: npt.NDArray[np.floating]
    right: npt.NDArray[np.bool_]

    @property
    def accuracy(self) -> float:
        """The share of the held-out records that are predicted right."""
        return float(self.right.mean())


def fit_linear_head(task: CurveTask, labelled: npt.NDArray[np.bool_]) -> LinearHead:
    """Fits a logistic regression to the labelled rows."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    classes = np.unique(task.labels[labelled])
    # Not 0 for a class without a label yet: entropies take its logarithm.
    probabilities = np.full((len(task.labels), task.classes), _MIN_PROBABILITY, np.float32)
    # scikit-learn refuses to fit one class.
    if len(classes) == 1:
        probabilities[:, classes] = 1
        return LinearHead(probabilities, np.ones(len(task.test_labels)), task.test_labels == classes[0])
    # One thread: the curves run in a process per core, and the same bits come out on any number of them.
    with warnings.catch_warnings(), threadpool_limits(limits=1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # 200 steps are near enough for a comparison
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)  # few labels of many classes
        head = LogisticRegression(C=_INVERSE_PENALTY, max_iter=200, tol=1e-3)
        head.fit(task.features[labelled], task.labels[labelled])
    probabilities[:, head.classes_] = np.maximum(head.predict_proba(task.features), _MIN_PROBABILITY)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    held_out = head.predict_proba(task.test_features)
    right = head.classes_[held_out.argmax(axis=1)] == task.test_labels
    return LinearHead(probabilities, held_out.max(axis=1), right)
