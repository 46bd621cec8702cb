"""Decides what a batch is chosen by, from what the champion's confidence and the embeddings predict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.registry import selector_spec
from posttrain.select.selectors.similarity import Floats, whiten

AUTO = "auto"

_COVERAGE = "facility_location"  # the best on Banking77, by MiniLM's embeddings and by SmolLM2's own: BENCHMARKS.md
_UNCERTAINTY = "margin"  # the best on GSM8K's classes, which MiniLM's embeddings hardly predict: BENCHMARKS.md

_Z_ONE_SIDED = 1.645  # 95% of a normal distribution lie above -1.645

MAX_AGREEMENT_RECORDS = 500
"""Labelled records that agreement is computed from: no more are needed, and each has to be embedded."""

_MIN_RECORDS = 150  # of fewer, the nearest is too far away to share a label that has several topics

_SLIGHT_KAPPA = 0.2  # up to here agreement is "slight": J. R. Landis and G. G. Koch, Biometrics 33, 1977


@dataclass(frozen=True)
class BatchStrategy:
    """What a batch is chosen by.

    Attributes:
        name: name of the selector.
        options: its options.
        cold: the champion's uncertainty says nothing, and is not used.
    """

    name: str
    options: Mapping[str, Any]
    cold: bool


def batch_strategy(
    strategy: str,
    options: Mapping[str, Any],
    *,
    cold: bool,
    has_labels: bool = True,
    predicts_errors: bool = True,
    neighbours_share_labels: bool = True,
) -> BatchStrategy:
    """Decides what a batch is chosen by.

    Args:
        strategy: ``select.strategy``.
        options: ``select.options``; of ``auto`` they are those of facility location.
        cold: no champion has been trained yet.
        has_labels: the task has a closed label set.
        predicts_errors: the champion's confidence predicts its errors; see `confidence_predicts_errors`.
        neighbours_share_labels: see `NeighbourAgreement.neighbours_share_labels`.
    """
    without_uncertainty = {name: value for name, value in options.items() if name != "by"}
    if strategy != AUTO and not needs_trained_champion(strategy, cold):
        return BatchStrategy(strategy, without_uncertainty if cold else options, cold)
    # From here on as `auto`, which also stands in for a strategy that needs a trained champion.
    if strategy != AUTO:
        options = without_uncertainty = {}
    cold = cold or not predicts_errors
    if not neighbours_share_labels:  # there is nothing to cover
        return BatchStrategy("random" if cold else _UNCERTAINTY, {}, cold)
    if cold:
        return BatchStrategy(_COVERAGE, without_uncertainty, cold)
    # Of a written answer the entropy of a token: a long answer is hardly probable as a whole, however sure it is.
    return BatchStrategy(_COVERAGE, {"by": "least_confidence" if has_labels else "entropy", **options}, cold)


def needs_trained_champion(strategy: str, cold: bool) -> bool:
    """Returns whether a strategy cannot be used yet, as it chooses by uncertainty and no champion has been trained."""
    return cold and strategy != AUTO and selector_spec(strategy).needs_scores


def depends_on_neighbours(strategy: str, cold: bool) -> bool:
    """Returns whether `batch_strategy` depends on whether neighbours share labels."""
    return strategy == AUTO or needs_trained_champion(strategy, cold)


def confidence_above_chance(confidence: Floats, right: npt.NDArray[np.bool_]) -> bool | None:
    """Returns whether a model is surer of its right answers than of its wrong ones, beyond chance.

    The area under the ROC curve of confidence against being right must exceed a half by 1.645 of its standard errors
    (J. A. Hanley and B. J. McNeil, Radiology 143, 1982).

    Args:
        confidence: float [N], NaN where it is missing.
        right: bool [N].

    Returns:
        None if fewer than two right or fewer than two wrong answers have a confidence.
    """
    area, error = roc_auc(confidence, right)
    return None if np.isnan(area) else bool(area - _Z_ONE_SIDED * error > 0.5)


def confidence_predicts_errors(confidence: Floats, right: npt.NDArray[np.bool_]) -> bool:
    """Returns whether to choose by uncertainty: it has not proved useless, and more than one answer is right.

    Args:
        confidence: float [N], NaN where it is missing.
        right: bool [N].
    """
    # None, for too few answers, counts in favour: a champion without errors would otherwise stay cold for ever.
    return confidence_above_chance(confidence, right) is not False and int(np.sum(right)) >= 2


def roc_auc(confidence: Floats, right: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Computes the probability that a right answer has more confidence than a wrong one, and its standard error.

    Ties count half. Both are NaN with fewer than two answers of either kind.
    """
    from scipy.stats import rankdata

    finite = np.isfinite(confidence)
    values, right = np.asarray(confidence)[finite], np.asarray(right, bool)[finite]
    good, bad = int(right.sum()), int((~right).sum())
    if min(good, bad) < 2:
        return float("nan"), float("nan")
    # Mann and Whitney's U by ranks: pairs one by one would be quadratic.
    area = (rankdata(values)[right].sum() - good * (good + 1) / 2) / (good * bad)
    # Hanley and McNeil's error, of exponentially distributed scores: q1 and q2 are the probabilities that two right
    # answers both rank above one wrong, and that one right ranks above two wrong.
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (good - 1) * (q1 - area**2) + (bad - 1) * (q2 - area**2)
    return float(area), float(np.sqrt(max(variance, 0.0) / (good * bad)))


@dataclass(frozen=True)
class NeighbourAgreement:
    """Agreement of records' labels with those of their nearest records.

    Attributes:
        kappa: Cohen's, 1 where all agree, 0 where they do as by chance; NaN without records.
        highest: upper bound of kappa at 95%.
        records: number of records; 0 if fewer than two labels are of two records.
    """

    kappa: float
    highest: float
    records: int

    @property
    def neighbours_share_labels(self) -> bool:
        """Whether neighbours may share labels: kappa may be 0.2 or more, or there are fewer than 150 records."""
        # The bar is the literature's. On Banking77 with noise on embeddings or labels, covering gained much above it
        # and little below; on GSM8K's classes, far below it, covering did harm (see BENCHMARKS.md).
        return self.records < _MIN_RECORDS or self.highest >= _SLIGHT_KAPPA


def neighbour_agreement(
    embeddings: npt.NDArray[np.floating],
    labels: Sequence[str] | npt.NDArray[np.generic],
    pool: npt.NDArray[np.floating],
) -> NeighbourAgreement:
    """Computes Cohen's kappa of each record's label with that of the nearest other record.

    Records whose label no other has do not count. The upper bound of kappa follows from Wilson's interval of the share
    that agrees (E. B. Wilson, JASA 22, 1927), with chance agreement fixed.

    Args:
        embeddings: float [N, D].
        labels: [N].
        pool: float [M, D], the embeddings that strategies choose from.
    """
    _, numbers, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    # Nothing could agree with a record whose label no other has.
    is_common = counts[numbers] > 1
    numbers = numbers[is_common]
    count = len(numbers)
    if len(np.unique(numbers)) < 2:
        return NeighbourAgreement(float("nan"), float("nan"), 0)
    # Whitened together with the pool, the records are near each other where they are for the strategies.
    points = whiten(np.concatenate([embeddings, pool]))[: len(embeddings)][is_common]
    cosines = points @ points.T
    np.fill_diagonal(cosines, -np.inf)
    nearest = numbers[cosines.argmax(axis=1)]
    agreed = float((numbers == nearest).mean())
    shares = [np.bincount(labels, minlength=len(counts)) / count for labels in (numbers, nearest)]
    chance = float(shares[0] @ shares[1])
    kappa, highest = ((share - chance) / (1 - chance) for share in (agreed, _wilson_upper_bound(agreed, count)))
    return NeighbourAgreement(kappa, highest, count)


def _wilson_upper_bound(share: float, count: int) -> float:
    """Returns the upper end of Wilson's interval."""
    weight = _Z_ONE_SIDED**2 / count
    spread = _Z_ONE_SIDED * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return (share + weight / 2 + spread) / (1 + weight)
