"""Finds records that the champion gets wrong or finds hard, and the pool records near them.

Evaluations are tables with a row per record: ``id``, ``expected`` and ``predicted`` (texts), ``score`` (1 is right) and
``log_likelihood`` (ln P(expected | prompt) in nats, or null). Ids come hardest first, ties by id."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.select.selectors.similarity import DIMENSIONS, whiten

MAX_HARD_CASES = 50  # of a kind
NEIGHBOURS = 10  # pool records that one hard case marks

HIGH_LOSS_PERCENTILE = 90.0

POOL_KINDS = ("high_entropy", "boundary")
"""Kinds of pool records that are hard themselves: of high entropy, and between two labels that are confused."""

TRAINING_KIND = "training_loss"
"""The kind of training records whose loss is high."""


@dataclass(frozen=True)
class HardCase:
    """A test record, or a training record of the kind `TRAINING_KIND`, that the model finds hard.

    Attributes:
        kinds: names of the kinds that it belongs to.
        expected: the right answer; None where the record has none.
        predicted: the model's.
    """

    id: str
    kinds: tuple[str, ...]
    expected: str | None
    predicted: str | None


@dataclass(frozen=True)
class FocusTargets:
    """The champion's weak points, by its evaluation.

    Attributes:
        classes: labels on which the champion is weakest.
        embeddings: float [H, D], by the scoring model, of records that it finds hard; None for none.
        cases: those records, in the same order; empty where they have no names.
        records: pool records that are hard themselves, each with a sentence that says why, by id.
    """

    classes: Sequence[str] = ()
    embeddings: np.ndarray | None = None
    cases: Sequence[HardCase] = ()
    records: Mapping[str, str] = field(default_factory=dict)


NO_FOCUS = FocusTargets()


@dataclass(frozen=True)
class Evaluations:
    """Evaluations of the same records by several models.

    Attributes:
        champion: the evaluation of the model in service.
        previous: the evaluation of the champion before it; None where there was none.
        other: the evaluation of the model that it was last compared with, which may be a refused candidate; None where
            there was none.
    """

    champion: pa.Table
    previous: pa.Table | None = None
    other: pa.Table | None = None


def losses(predictions: pa.Table) -> npt.NDArray[np.float64]:
    """Returns the loss of each record, float64 [N]: -ln P(expected | prompt) in nats if it is there, else 1 - score."""
    score = predictions["score"].to_numpy()
    log_likelihood = predictions["log_likelihood"].to_numpy(zero_copy_only=False).astype(np.float64)
    loss: npt.NDArray[np.float64] = np.where(np.isnan(log_likelihood), 1.0 - score, -log_likelihood)
    return loss


def wrongly_answered(predictions: pa.Table) -> npt.NDArray[np.bool_]:
    """Marks, bool [N], scores below 1, or below the median where scores are log-likelihoods."""
    score = predictions["score"].to_numpy()
    if len(score) == 0:
        return np.zeros(0, bool)
    # A log-likelihood is at most 0 and has no natural bar for "right".
    bar = 1.0 if score.min() >= 0 else float(np.median(score))
    below: npt.NDArray[np.bool_] = score < bar
    return below


def wrong(predictions: pa.Table, n: int = MAX_HARD_CASES) -> list[str]:
    """Returns at most ``n`` records that were answered wrongly, those with the highest loss."""
    return _hardest(predictions, wrongly_answered(predictions), losses(predictions), n)


def above_percentile(values: npt.NDArray[np.floating], percentile: float) -> npt.NDArray[np.int64]:
    """Returns the rows whose value is above the percentile of the finite ones, the highest first, ties by row.

    Raises:
        ValueError: the percentile is not from 0 to 100.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return np.empty(0, np.int64)
    rows = np.flatnonzero(np.isfinite(values) & (values > np.percentile(finite, percentile)))
    return rows[np.argsort(-values[rows], kind="stable")]


def high_loss(predictions: pa.Table, percentile: float = HIGH_LOSS_PERCENTILE, n: int = MAX_HARD_CASES) -> list[str]:
    """Returns at most ``n`` records whose loss is above the percentile, rightly answered or not.

    Raises:
        ValueError: the percentile is not from 0 to 100.
    """
    loss = losses(predictions)
    high = np.zeros(len(loss), bool)
    high[above_percentile(loss, percentile)] = True
    return _hardest(predictions, high, loss, n)


def regressions(predictions: pa.Table, previous: pa.Table, n: int = MAX_HARD_CASES) -> list[str]:
    """Returns at most ``n`` records that this model answers wrongly and the previous one rightly, by loss."""
    before = _rows_in(previous, predictions)
    was_wrong = wrongly_answered(previous)
    was_right = np.array([row is not None and not was_wrong[row] for row in before], bool)
    return _hardest(predictions, was_right & wrongly_answered(predictions), losses(predictions), n)


def disagreement(predictions: pa.Table, other: pa.Table, n: int = MAX_HARD_CASES) -> list[str]:
    """Returns at most ``n`` records that two models answer differently, those whose losses are furthest apart."""
    rows = _rows_in(other, predictions)
    answers, other_answers = predictions["predicted"].to_pylist(), other["predicted"].to_pylist()
    other_loss = losses(other)
    # By words: answers that differ in white space alone are the same.
    differ = np.array(
        [
            row is not None and _answer_words(other_answers[row]) != _answer_words(answer)
            for answer, row in zip(answers, rows, strict=True)
        ],
        bool,
    )
    other_rows = np.array([0 if row is None else row for row in rows], np.int64)
    apart = np.abs(losses(predictions) - other_loss[other_rows]) if len(other_loss) else np.zeros(len(rows))
    return _hardest(predictions, differ, apart, n)


def _regressions_of(evaluations: Evaluations) -> list[str]:
    return [] if evaluations.previous is None else regressions(evaluations.champion, evaluations.previous)


def _disagreements_of(evaluations: Evaluations) -> list[str]:
    return [] if evaluations.other is None else disagreement(evaluations.champion, evaluations.other)


HARD_CASE_KINDS: dict[str, Callable[[Evaluations], list[str]]] = {
    "wrong": lambda evaluations: wrong(evaluations.champion),
    "high_loss": lambda evaluations: high_loss(evaluations.champion),
    "regressions": _regressions_of,
    "disagreement": _disagreements_of,
}
"""Every kind of test records that ``select.hard_cases`` can name."""

ALL_KINDS = (*HARD_CASE_KINDS, TRAINING_KIND, *POOL_KINDS)
"""Every kind that ``select.hard_cases`` can name."""


def hard_cases(kinds: Sequence[str], evaluations: Evaluations) -> list[HardCase]:
    """Returns the test records that belong to any of the kinds, by the champion's loss, highest first; ties by id."""
    # By id: the kinds overlap, and a record that is of several counts once.
    named: dict[str, list[str]] = {}
    for kind in kinds:
        if kind not in HARD_CASE_KINDS:
            continue
        for id in HARD_CASE_KINDS[kind](evaluations):
            named.setdefault(id, []).append(kind)
    loss = losses(evaluations.champion)
    rows: list[tuple[float, str, dict[str, Any]]] = sorted(
        (-loss[at], row["id"], row)
        for at, row in enumerate(evaluations.champion.select(["id", "expected", "predicted"]).to_pylist())
        if row["id"] in named
    )
    return [HardCase(id, tuple(named[id]), row["expected"], row["predicted"]) for _, id, row in rows]


def _hardest(predictions: pa.Table, among: npt.NDArray[np.bool_], by: npt.NDArray[np.float64], n: int) -> list[str]:
    ids = predictions["id"].to_pylist()
    return [id for _, id in sorted((-by[row], ids[row]) for row in np.flatnonzero(among))[:n]]


def _rows_in(other: pa.Table, predictions: pa.Table) -> list[int | None]:
    """Returns the row of each record in another table; None where it is missing."""
    row_of = {id: row for row, id in enumerate(other["id"].to_pylist())}
    return [row_of.get(id) for id in predictions["id"].to_pylist()]


def _answer_words(answer: str | None) -> list[str]:
    return (answer or "").split()


def in_weak_classes(predicted: np.ndarray, runner_up: np.ndarray, worst_classes: Iterable[str]) -> np.ndarray:
    """Marks records whose most probable or second most probable label is one of the worst classes.

    Args:
        predicted: object [N], labels or None.
        runner_up: object [N], labels or None.
        worst_classes: names of the classes.

    Returns:
        bool [N].
    """
    worst = list(worst_classes)
    # The runner-up counts too: a class with poor recall is seldom predicted, so its records mostly show up there.
    # As texts: a missing prediction is None, which `isin` cannot sort among strings.
    return np.isin(predicted.astype(str), worst) | np.isin(runner_up.astype(str), worst)


def nearest_hard_case(
    embeddings: np.ndarray,
    hard_cases: np.ndarray,
    neighbours: int = NEIGHBOURS,
    dimensions: int = DIMENSIONS,
) -> npt.NDArray[np.int64]:
    """Returns the hard case that each record is a near neighbour of.

    They are compared by cosine, whitened (see ``whiten``).

    Args:
        embeddings: float [N, D], those of the pool.
        hard_cases: float [H, D], by the same model.
        neighbours: number of pool records for each hard case; ties by row.
        dimensions: greatest number of principal components.

    Returns:
        int64 [N]: of the hard cases among whose nearest neighbours the record is, the row of the closest; ties by
        row; -1 where it is near none.
    """
    nearest = np.full(len(embeddings), -1, np.int64)
    if len(embeddings) == 0 or len(hard_cases) == 0:
        return nearest
    # Whitened together: apart, the two sets would have other principal components and could not be compared.
    points = whiten(np.concatenate([embeddings, hard_cases]), dimensions)
    best = np.full(len(embeddings), -np.inf)
    for case, point in enumerate(points[len(embeddings) :]):
        similarity = points[: len(embeddings)] @ point
        near = np.argsort(-similarity, kind="stable")[:neighbours]
        closer = near[similarity[near] > best[near]]
        nearest[closer], best[closer] = case, similarity[closer]
    return nearest
