"""Recommends a merge method by the conflicts between models, with its reason."""

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

ENSEMBLE = "ensemble"


def warnings_of(report: ConflictReport) -> list[str]:
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
    return lines


def recommend(report: ConflictReport) -> tuple[str, str]:
    """Returns a merge method, or ``ensemble``, and the reason in one sentence."""
    overall, models = report.overall, range(len(report.models))
    cosine, ratio = min(map(overall.weight_cosine, models)), max(map(overall.norm_ratio, models))
    if cosine < FOREIGN_COSINE and not report.aligned:
        return ENSEMBLE, "a model has another initialisation than the base; --align weights may bring them together"
    if cosine < FOREIGN_COSINE:
        return ENSEMBLE, "the aligned models are still unlike"
    if ratio >= FOREIGN_RATIO:
        return ENSEMBLE, f"a task vector is {ratio:.1f} times as long as the base"
    if not report.pairs:
        return "task_arithmetic", "one model has nothing to conflict with"
    worst = max(overall.opposed_weight_share(*pair) for pair in report.pairs)
    if worst >= MANY_CONFLICTS:
        reason = f"the signs oppose in {worst:.0%} of the weight, from {MANY_CONFLICTS:.0%} on it elects them"
        return "ties", reason
    reason = f"the signs oppose in {worst:.0%} of the weight only, so that little cancels"
    return "task_arithmetic", reason


def describe_conflicts(report: ConflictReport) -> dict[str, Any]:
    """Returns the conflicts, the warnings and the recommendation as JSON has them."""
    return report.to_dict() | {
        "warnings": warnings_of(report),
        "recommendation": dict(zip(("method", "reason"), recommend(report), strict=True)),
    }
