"""A cascade: models in the order of their cost; each answers where it is sure enough, and the last the rest.

Confidence is the probability of the most probable label. Thresholds are chosen on held-out records: all models but the
last share one, and every threshold of a fixed list is a hypothesis, tested by an exact binomial test, from the one at
which the last model answers everything down to the first that cannot be rejected. So the bound is exceeded with a
probability of at most 1 - `LEVEL`, however many thresholds there are, if the records are drawn as later ones are.

Sources: A. N. Angelopoulos et al., Learn then Test, 2021 (arXiv:2110.01052), section 2.2; L. Chen, M. Zaharia and
J. Zou, FrugalGPT, 2023 (arXiv:2305.05176), section 3 for the cascade of language models; T. Schuster et al., Confident
Adaptive Language Modeling, NeurIPS 2022, section 3.3 for a bound on the disagreement with the large model.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.models.binomial import LEVEL, THRESHOLDS, clopper_pearson, needed_answers, shows_error_below, upper_limit

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
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
        errors: records that count against the bound, at the threshold.
        bound: the share that they may have.
        upper: the limit of their share, at `LEVEL`.
        why: one sentence for people.
    """

    threshold: float
    shown: bool
    records: int
    errors: int
    bound: float
    upper: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)


def choose_cascade_threshold(
    confidence: Floats, right: Mask, *, accuracy: float | None = None, tolerance: float | None = None
) -> ThresholdChoice:
    """Chooses the lowest threshold at which held-out records show the accuracy or the tolerance.

    With ``accuracy`` the records count that the cascade gets wrong, and may have the share 1 - accuracy. With
    ``tolerance`` those count that the cascade gets wrong and the last model alone gets right: their share is at least
    what the cascade loses in accuracy, so the loss is within the tolerance, too.

    Args:
        confidence: float64 [M, N] of records that no model learned from.
        right: bool [M, N], whether each model is right.
        accuracy: between 0 and 1; one of the two is given.
        tolerance: between 0 and 1.
    """
    models, count = confidence.shape
    bound = tolerance if accuracy is None else 1 - accuracy
    assert bound is not None, "one of the two is given"
    counted = ~right if accuracy is not None else ~right & right[-1]
    event = "wrong" if accuracy is not None else "wrong where the last model is right"
    passed: ThresholdChoice | None = None
    chosen_before: Rows | None = None
    for threshold in (LAST_ALONE, *THRESHOLDS):
        chosen = choose_models(confidence, [threshold] * (models - 1))
        # Where no record changes its model, the data says nothing of the lower threshold.
        if chosen_before is not None and np.array_equal(chosen, chosen_before):
            continue
        chosen_before = chosen
        errors = int(counted[chosen, np.arange(count)].sum())
        upper = upper_limit(errors, count, 1 - LEVEL)
        shown = shows_error_below(errors, count, bound)
        at = "the last model alone" if threshold == LAST_ALONE else f"a threshold of {threshold:g}"
        why = f"of {count} held-out records {errors} are {event} by {at}: at most {upper:.1%}"
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


def cost_curve(confidence: Floats, right: Mask, flops: Floats, seconds: Floats) -> list[dict[str, Any]]:
    """Measures the cascade at every threshold of `THRESHOLDS` that changes something, the strictest first.

    Args:
        confidence: float64 [M, N].
        right: bool [M, N].
        flops: float64 [M, N], what each model would compute for each record.
        seconds: float64 [M], of each model for a record.

    Returns:
        For each threshold ``threshold`` (None: the last model alone), ``shares`` (answered by each model), ``accuracy``
        with its exact 95% interval ``low`` to ``high``, ``seconds`` and ``flops`` a record, and ``seconds_saved`` and
        ``flops_saved``, the shares of the last model's that are saved; below 0 where the cheap ones only cost more.
    """
    models = len(confidence)
    points: list[dict[str, Any]] = []
    for threshold in (LAST_ALONE, *THRESHOLDS):
        thresholds = [threshold] * (models - 1)
        point = cascade_point(choose_models(confidence, thresholds), thresholds, right, flops, seconds)
        # A first threshold at which no cheap model answers is kept: there they are only a cost.
        if len(points) > 1 and point["shares"] == points[-1]["shares"]:
            continue
        points.append({"threshold": threshold if can_answer(threshold) else None, **point})
    return points


def cascade_point(
    chosen: Rows, thresholds: Sequence[float], right: Mask, flops: Floats, seconds: Floats
) -> dict[str, Any]:
    """Measures accuracy and cost where model ``chosen[i]`` answers record i; see `cost_curve`.

    Args:
        chosen: int64 [N], by `choose_models`.
        thresholds: M - 1 numbers.
        right: bool [M, N].
        flops: float64 [M, N].
        seconds: float64 [M].
    """
    models, count = right.shape
    # A record pays for every model up to the one that answers, but for those that never do.
    used = np.array([*map(can_answer, thresholds), True], bool)
    asked = (np.arange(models)[:, None] <= chosen) & used[:, None]
    correct = int(right[chosen, np.arange(count)].sum())
    low, high = clopper_pearson(correct, count)
    spent = {"seconds": float(seconds @ asked.mean(axis=1)), "flops": float((flops * asked).sum() / count)}
    alone = {"seconds": float(seconds[-1]), "flops": float(flops[-1].mean())}
    saved = {f"{unit}_saved": 1 - spent[unit] / alone[unit] if alone[unit] else 0.0 for unit in spent}
    shares = (np.bincount(chosen, minlength=models) / count).tolist()
    return {"shares": shares, "accuracy": correct / count, "low": low, "high": high, **spent, **saved}
