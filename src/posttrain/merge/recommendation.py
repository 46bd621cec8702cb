"""Recommends a merge method by the conflicts between models, with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.merge.conflicts import ConflictReport

OPPOSED_COSINE = -0.5
"""Task vectors with a smaller cosine pull in opposite directions: merging cancels what they learned."""

MANY_CONFLICTS = 0.3
"""Share of the opposed weight from which trimming and electing signs is worth its cost."""

FOREIGN_RATIO = 1.0
"""A task vector as long as the base's weights: the base is hardly its ancestor."""

FOREIGN_COSINE = 0.5
"""Weights with a smaller cosine to the base's have another initialisation; fine-tuning stays above 0.99."""

HIGH_BARRIER = 0.1
"""Nats a token above the line between two models: their average is a tenth more perplexed than either."""

ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class LossBarrier:
    """The loss along the line between two models.

    Attributes:
        models: names of both.
        shares: of the second model, from 0 to 1.
        losses: at these points, in nats a token.
        height: most that the loss rises above the line between the ends' losses; 0 if it stays below.
        low, high: interval of the height.
        records: number of records.
    """

    models: tuple[str, str]
    shares: Sequence[float]
    losses: Sequence[float]
    height: float
    low: float
    high: float
    records: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON has them."""
        points = [list(point) for point in zip(self.shares, self.losses, strict=True)]
        interval = [self.height, self.low, self.high]
        return {"models": list(self.models), "points": points, "barrier": interval, "records": self.records}


def warnings_of(report: ConflictReport, barriers: Sequence[LossBarrier] = ()) -> list[str]:
    """Returns a sentence for each reason not to merge."""
    lines = []
    overall = report.overall
    for model, name in enumerate(report.models):
        ratio, cosine = overall.norm_ratio(model), round(overall.weight_cosine(model), 2) + 0.0  # no minus before 0
        if cosine < FOREIGN_COSINE:
            state = "are still unlike" if report.aligned else "have other initialisations"
            lines.append(
                f"The weights of {name} and {report.base} {state} (cosine {cosine:.2f}): averaging them gives noise. "
                + ("Let" if report.aligned else "Align them first with --align weights, or let")
                + " them answer together, as an ensemble."
            )
        elif ratio >= FOREIGN_RATIO:
            lines.append(
                f"{name} is {ratio:.1f} times the base's length away from it: they hardly share an ancestor. "
                "Averaging their weights gives noise; let them answer together, as an ensemble."
            )
    for first, second in report.pairs:
        if (cosine := overall.cosine(first, second)) < OPPOSED_COSINE:
            lines.append(
                f"{report.models[first]} and {report.models[second]} pull in opposite directions (cosine "
                f"{cosine:.2f}): what one learned, the other undoes."
            )
    for barrier in barriers:
        if _is_high(barrier):
            lines.append(
                f"Between {barrier.models[0]} and {barrier.models[1]} the loss rises {barrier.height:.2f} nats a token "
                f"above the line ({barrier.low:.2f} to {barrier.high:.2f}): their average is worse than either."
            )
    return lines


def recommend(report: ConflictReport, barriers: Sequence[LossBarrier] = ()) -> tuple[str, str]:
    """Returns a merge method, or ``ensemble``, and the reason in one sentence."""
    overall, models = report.overall, range(len(report.models))
    cosine, ratio = min(map(overall.weight_cosine, models)), max(map(overall.norm_ratio, models))
    if cosine < FOREIGN_COSINE and not report.aligned:
        return ENSEMBLE, "a model has another initialisation than the base; --align weights may bring them together"
    if cosine < FOREIGN_COSINE:
        return ENSEMBLE, "the aligned models are still unlike"
    if ratio >= FOREIGN_RATIO:
        return ENSEMBLE, f"a task vector is {ratio:.1f} times as long as the base"
    if high := [barrier for barrier in barriers if _is_high(barrier)]:
        height = max(barrier.height for barrier in high)
        return ENSEMBLE, f"the loss rises {height:.2f} nats a token between the models"
    if not report.pairs:
        return "task_arithmetic", "one model has nothing to conflict with"
    worst = max(overall.opposed_weight_share(*pair) for pair in report.pairs)
    if worst >= MANY_CONFLICTS:
        reason = f"the signs oppose in {worst:.0%} of the weight, from {MANY_CONFLICTS:.0%} on it elects them"
        return "ties", reason
    reason = f"the signs oppose in {worst:.0%} of the weight only, so that little cancels"
    return "task_arithmetic", reason


def describe_conflicts(report: ConflictReport, barriers: Sequence[LossBarrier] = ()) -> dict[str, Any]:
    """Returns the conflicts, the loss barriers, the warnings and the recommendation as JSON has them."""
    return report.to_dict() | {
        "barriers": [barrier.to_dict() for barrier in barriers],
        "warnings": warnings_of(report, barriers),
        "recommendation": dict(zip(("method", "reason"), recommend(report, barriers), strict=True)),
    }


def _is_high(barrier: LossBarrier) -> bool:
    return barrier.height >= HIGH_BARRIER and barrier.low > 0
