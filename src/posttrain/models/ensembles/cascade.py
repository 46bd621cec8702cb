"""A cascade: models in the order of their cost; each answers where it is sure enough, and the last the rest.

Confidence is the probability of the most probable label, in free text the geometric mean of the probabilities of the
answer's tokens. Thresholds are chosen on held-out records: all models but the last share one, and every threshold of a
fixed list is a hypothesis, from the one at which the last model answers everything down to the first that cannot be
rejected. The test is an exact binomial one, or Hoeffding-Bentkus for scores between 0 and 1. So the bound is exceeded
with a probability of at most 1 - `LEVEL`, however many thresholds there are, if the records are drawn as later ones.

Sources: A. N. Angelopoulos et al., Learn then Test, 2021 (arXiv:2110.01052), section 2.2; L. Chen, M. Zaharia and
J. Zou, FrugalGPT, 2023 (arXiv:2305.05176), section 3 for the cascade of language models; T. Schuster et al., Confident
Adaptive Language Modeling, NeurIPS 2022, section 3.3 for a bound on the disagreement with the large model.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.models.binomial import LEVEL, THRESHOLDS, needed_answers
from posttrain.models.bounded_mean import is_binary, mean_interval, mean_upper_limit, shows_mean_below

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

LAST_ALONE = 1.5
"""A threshold that no confidence reaches."""


def can_answer(threshold: float) -> bool:
    """Returns whether a model of this threshold ever answers; one that does not need not be asked."""
    return threshold <= 1


def choose_models(confidence: Floats, thresholds: Sequence[float]) -> Rows:
    """Returns the number of the model that answers each record, int64 [N].

    Args:
        confidence: float64 [M, N], in [0, 1].
        thresholds: M - 1 numbers; 0 is always reached, a number above 1 never.
    """
    models, count = confidence.shape
    chosen = np.full(count, models - 1, np.int64)
    for model in reversed(range(models - 1)):
        chosen[confidence[model] >= thresholds[model]] = model
    return chosen


@dataclass(frozen=True)
class ThresholdChoice:
    """The threshold of a cascade, and what it rests on.

    Attributes:
        threshold: of all models but the last; `LAST_ALONE` where nothing cheaper could be shown.
        shown: whether the records show the bound.
        records: held-out records.
        errors: records that count against the bound, at the threshold; of scores between 0 and 1 the sum of the losses.
        bound: the share that they may have.
        upper: the limit of their share, at `LEVEL`.
        why: one sentence for people.
    """

    threshold: float
    shown: bool
    records: int
    errors: float
    bound: float
    upper: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)


def choose_cascade_threshold(
    confidence: Floats, scores: npt.ArrayLike, *, accuracy: float | None = None, tolerance: float | None = None
) -> ThresholdChoice:
    """Chooses the lowest threshold at which held-out records show the accuracy or the tolerance.

    With ``accuracy`` a record's loss is what the cascade lacks of a score of 1, and the mean may be 1 - accuracy. With
    ``tolerance`` it is what the cascade scores less than the last model alone, 0 where it scores more: the mean is at
    least what the cascade loses in accuracy, so the loss is within the tolerance, too.

    Args:
        confidence: float64 [M, N] of records that no model learned from; that of the last model is not used.
        scores: [M, N], bool for whether each model is right, or the scores of the answers, in [0, 1].
        accuracy: between 0 and 1; one of the two is given.
        tolerance: between 0 and 1.
    """
    models, count = confidence.shape
    values, rows = np.asarray(scores, np.float64), np.arange(count)
    bound = tolerance if accuracy is None else 1 - accuracy
    assert bound is not None, "one of the two is given"
    best = np.ones(count) if accuracy is not None else values[-1]
    passed: ThresholdChoice | None = None
    chosen_before: Rows | None = None
    for threshold in (LAST_ALONE, *THRESHOLDS):
        chosen = choose_models(confidence, [threshold] * (models - 1))
        # Where no record changes its model, the data says nothing of the lower threshold.
        if chosen_before is not None and np.array_equal(chosen, chosen_before):
            continue
        chosen_before = chosen
        losses = np.maximum(best - values[chosen, rows], 0.0)
        errors, upper = float(losses.sum()), mean_upper_limit(losses, 1 - LEVEL)
        shown = shows_mean_below(losses, bound)
        why = _why(losses, threshold, upper, against_last=accuracy is None)
        if not shown:
            if passed is None:
                why += f", and {bound:.1%} is allowed"
                if not errors:
                    why += f"; {needed_answers(bound)} records would show it"
                return ThresholdChoice(LAST_ALONE, False, count, errors, bound, upper, why)
            break
        passed = ThresholdChoice(threshold, True, count, errors, bound, upper, why)
    assert passed is not None, "the first threshold passes or fails"
    return passed


def _why(losses: Floats, threshold: float, upper: float, against_last: bool) -> str:
    count, total = len(losses), float(losses.sum())
    at = "the last model alone" if threshold == LAST_ALONE else f"a threshold of {threshold:g}"
    if is_binary(losses):
        event = "wrong where the last model is right" if against_last else "wrong"
        return f"of {count} held-out records {total:.0f} are {event} by {at}: at most {upper:.1%}"
    event = "lost against the last model" if against_last else "missing"
    return f"on {count} held-out records {total / count:.1%} of the full score is {event} by {at}: at most {upper:.1%}"


def cost_curve(confidence: Floats, scores: npt.ArrayLike, flops: Floats, seconds: Floats) -> list[dict[str, Any]]:
    """Measures the cascade at every threshold of `THRESHOLDS` that changes something, the strictest first.

    Args:
        confidence: float64 [M, N].
        scores: [M, N], bool for whether each model is right, or the scores of the answers.
        flops: float64 [M, N], what each model would compute for each record.
        seconds: float64 [M], of each model for a record.

    Returns:
        For each threshold ``threshold`` (None: the last model alone), and the fields of `cascade_point`.
    """
    models = len(confidence)
    points: list[dict[str, Any]] = []
    for threshold in (LAST_ALONE, *THRESHOLDS):
        thresholds = [threshold] * (models - 1)
        point = cascade_point(choose_models(confidence, thresholds), thresholds, scores, flops, seconds)
        # A first threshold at which no cheap model answers is kept: there they are only a cost.
        if len(points) > 1 and point["shares"] == points[-1]["shares"]:
            continue
        points.append({"threshold": threshold if can_answer(threshold) else None, **point})
    return points


def cascade_point(
    chosen: Rows, thresholds: Sequence[float], scores: npt.ArrayLike, flops: Floats, seconds: Floats
) -> dict[str, Any]:
    """Measures accuracy and cost where model ``chosen[i]`` answers record i.

    Args:
        chosen: int64 [N], by `choose_models`.
        thresholds: M - 1 numbers.
        scores: as in `cost_curve`.
        flops: float64 [M, N].
        seconds: float64 [M].

    Returns:
        The fields of `routing_point`, and ``seconds_saved`` and ``flops_saved``, the shares of the last model's that
        are saved; below 0 where the cheap ones only cost more.
    """
    # A record pays for every model up to the one that answers, but for those that never do.
    used = np.array([*map(can_answer, thresholds), True], bool)
    asked = (np.arange(len(flops))[:, None] <= chosen) & used[:, None]
    point = routing_point(chosen, asked, scores, flops, seconds)
    alone = {"seconds": float(seconds[-1]), "flops": float(flops[-1].mean())}
    return point | {f"{unit}_saved": 1 - point[unit] / alone[unit] if alone[unit] else 0.0 for unit in alone}


def routing_point(
    chosen: Rows, asked: npt.NDArray[np.bool_], scores: npt.ArrayLike, flops: Floats, seconds: Floats
) -> dict[str, Any]:
    """Measures accuracy and cost where model ``chosen[i]`` answers record i, and all models of ``asked`` are asked.

    Args:
        chosen: int64 [N].
        asked: bool [M, N].
        scores: as in `cost_curve`.
        flops: float64 [M, N].
        seconds: float64 [M].

    Returns:
        ``shares`` (answered by each model), ``accuracy``, the mean score, with its 95% interval ``low`` to ``high``
        (None for scores outside of 0 to 1), and ``seconds`` and ``flops`` a record.
    """
    models, count = asked.shape
    own = np.asarray(scores, np.float64)[chosen, np.arange(count)]
    low, high = mean_interval(own) if is_bounded(own) else (None, None)
    return {
        "shares": (np.bincount(chosen, minlength=models) / count).tolist(),
        "accuracy": float(own.mean()),
        "low": low,
        "high": high,
        "seconds": float(seconds @ asked.mean(axis=1)),
        "flops": float((flops * asked).sum() / count),
    }


def is_bounded(scores: Floats) -> bool:
    """Returns whether all scores are in [0, 1]."""
    return bool(((scores >= 0) & (scores <= 1)).all())
