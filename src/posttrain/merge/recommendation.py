"""Recommends a merge method by the conflicts between models, with its reason."""

from typing import Any

from posttrain.merge.conflicts import RESOLUTIONS, ConflictReport
from posttrain.merge.preflight import FOREIGN_COSINE, foreign_warning

ENSEMBLE, PAIR_METHOD = "ensemble", "resolve_conflicts"

OPPOSED_COSINE = -0.5
"""Task vectors with a smaller cosine pull in opposite directions: merging cancels what they learned."""

CLEAR_GAIN = 0.05
"""What another resolution must keep more than an average does, of the model that loses most, to be worth its cost."""

METHODS_OF = {"average": "task_arithmetic", "zero": PAIR_METHOD, "magnitude": PAIR_METHOD, "ties": "ties"}
"""The merge method of each of the resolutions that `posttrain.merge.conflicts` measures."""

FOREIGN_RATIO = 1.0
"""A task vector as long as the base's weights: the base is hardly its ancestor."""


def warnings_of(report: ConflictReport) -> list[str]:
    """Returns a sentence for each reason not to merge."""
    lines = []
    overall = report.overall
    for model, name in enumerate(report.models):
        ratio, cosine = overall.norm_ratio(model), round(overall.weight_cosine(model), 2) + 0.0  # no minus before 0
        if cosine < FOREIGN_COSINE:
            lines.append(foreign_warning(name, report.base, cosine, report.aligned))
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
    if min(overall.cosine(*pair) for pair in report.pairs) < OPPOSED_COSINE:
        return ENSEMBLE, "what one model learned, another undoes, and no merge keeps both"
    kept = {
        resolution: min(overall.kept_share(resolution, model) for model in models)
        for resolution in RESOLUTIONS
        if len(report.models) == 2 or METHODS_OF[resolution] != PAIR_METHOD
    }
    best = max(kept, key=lambda resolution: kept[resolution])
    loser = "of the task vector that loses most"
    if kept[best] < kept["average"] + CLEAR_GAIN:
        return "task_arithmetic", f"an average keeps {kept['average']:.0%} {loser}, and no other way clearly more"
    option = f"with resolution={best} it" if METHODS_OF[best] == PAIR_METHOD else "it"
    others = " and ".join(f"{name} {kept[name]:.0%}" for name in ("average", "ties") if name != best)
    return METHODS_OF[best], f"{option} keeps {kept[best]:.0%} {loser}, {others}"


def describe_conflicts(report: ConflictReport) -> dict[str, Any]:
    """Returns the conflicts, the warnings and the recommendation as JSON has them."""
    return report.to_dict() | {
        "warnings": warnings_of(report),
        "recommendation": dict(zip(("method", "reason"), recommend(report), strict=True)),
    }
