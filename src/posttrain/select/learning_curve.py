"""Simulates a strategy on labelled records: accuracy of a linear head after each batch of labels."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.registry import COLD_START_SELECTORS, select
from posttrain.select.selectors.similarity import Floats
from posttrain.select.strategy import (
    AUTO,
    MAX_AGREEMENT_RECORDS,
    cold_start_strategy,
    confidence_predicts_errors,
    neighbour_agreement,
    warm_options,
    warm_strategy,
)
from posttrain.store.errors import UserError

_INVERSE_PENALTY = 30.0  # of rows of length 1: the best of 1, 10 and 30 on 154, 500 and 1,500 messages of Banking77
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
    """How a strategy is tried.

    Attributes:
        strategy: a name in ``SELECTORS``, or ``auto``.
        counts: labels at which the head is measured, ascending; the strategy asks for what lies between.
        cold_start: the strategy for the first labels where ``strategy`` goes by what a model predicts, or ``auto``.
        options: the strategy's own; of ``auto`` those of coverage.
        cold_options: those of ``cold_start``; of ``auto`` those of coverage.
    """

    strategy: str
    counts: tuple[int, ...]
    cold_start: str = "random"
    options: Mapping[str, Any] = field(default_factory=dict)
    cold_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_model(self) -> bool:
        """Whether the strategy goes by what a model predicts."""
        return self.strategy not in COLD_START_SELECTORS or "by" in self.options


def hold_out(features: Floats, labels: Sequence[str], seed: int, held_out: float = 0.3) -> CurveTask:
    """Hold out records drawn from each class by the seed.

    Args:
        features: float [N, D].
        labels: [N].
        held_out: share of each class that is measured on, rounded down, at least one record of those with two or more.

    Raises:
        UserError: there are fewer than two classes with two records.
    """
    names, numbers = np.unique(np.asarray(labels), return_inverse=True)
    generator = np.random.default_rng([seed, 1])
    test = np.zeros(len(numbers), bool)
    for one in range(len(names)):
        rows = generator.permutation(np.flatnonzero(numbers == one))
        test[rows[: max(int(held_out * len(rows)), min(1, len(rows) - 1))]] = True
    if len(np.unique(numbers[test])) < 2:
        raise UserError("strategies are compared on two classes or more, with two records each")
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = (features / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return CurveTask(unit[~test], numbers[~test], unit[test], numbers[test], len(names))


def learning_curve(task: CurveTask, plan: CurvePlan, seed: int) -> npt.NDArray[np.float64]:
    """Accuracy on the held-out records after each count of labels, float64 [counts].

    The first labels are chosen by ``plan.cold_start`` unless the strategy needs no model. What ``auto`` has to know it
    is told by the held-out records, as the loop is by its test records.
    """
    auto, plan = plan.strategy == AUTO, _resolve_auto(plan, task)
    labelled = np.zeros(len(task.labels), bool)
    head: LinearHead | None = None
    accuracies = []
    for place, count in enumerate(plan.counts):
        covers = plan.needs_model and (
            head is None or (auto and not confidence_predicts_errors(head.confidence, head.right))
        )
        strategy, options = (plan.cold_start, plan.cold_options) if covers else (plan.strategy, plan.options)
        scores = {"embeddings": task.features}
        if head is not None:
            scores["probabilities"] = head.probabilities
        draw = int(np.random.default_rng([seed, place]).integers(2**31))
        labelled[select(strategy, scores, count - int(labelled.sum()), draw, labelled, **options)] = True
        head = fit_linear_head(task, labelled)
        accuracies.append(head.accuracy)
    return np.array(accuracies)


def full_accuracy(task: CurveTask) -> float:
    """Accuracy of a head that has learned from every label."""
    return fit_linear_head(task, np.ones(len(task.labels), bool)).accuracy


def _resolve_auto(plan: CurvePlan, task: CurveTask) -> CurvePlan:
    """The plan with strategies for what ``auto`` stands for."""
    if AUTO not in (plan.strategy, plan.cold_start):
        return plan
    rows = np.random.default_rng(0).permutation(len(task.test_labels))[:MAX_AGREEMENT_RECORDS]
    shared = neighbour_agreement(task.test_features[rows], task.test_labels[rows], task.features).shared
    if plan.cold_start == AUTO:
        plan = replace(plan, cold_start=cold_start_strategy(shared), cold_options=plan.cold_options if shared else {})
    if plan.strategy != AUTO:
        return plan
    options = warm_options(has_labels=True) | dict(plan.options) if shared else {}
    return replace(plan, strategy=warm_strategy(shared), options=options)


class LinearHead(NamedTuple):
    """What a logistic regression has learned.

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
        """Share of the held-out records that it gets right."""
        return float(self.right.mean())


def fit_linear_head(task: CurveTask, labelled: npt.NDArray[np.bool_]) -> LinearHead:
    """A logistic regression on the labelled rows."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    known = np.unique(task.labels[labelled])
    probabilities = np.full((len(task.labels), task.classes), _MIN_PROBABILITY, np.float32)
    if len(known) == 1:
        probabilities[:, known] = 1
        return LinearHead(probabilities, np.ones(len(task.test_labels)), task.test_labels == known[0])
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
