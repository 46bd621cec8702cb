"""Retention: the share of a model's score on a suite that a model merged from it has, with its interval."""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluate.bootstrap import RatioInterval, paired_scores, ratio_bootstrap
from posttrain.evaluate.suite import SuiteResult
from posttrain.report.formatting import metric_name
from posttrain.store.errors import WorkError
from posttrain.store.message import Message
from posttrain.store.text_files import finite_json


def suite_retention(merged: SuiteResult, model: SuiteResult, seed: int) -> RatioInterval | None:
    """Returns the mean score of the merged model divided by the other's, on the records that both have.

    Returns:
        None where the other scores nothing, where scores are below 0 (log-likelihoods), whose ratio means nothing, and
        where they share no record.
    """
    try:
        scores, reference = paired_scores(merged.predictions, model.predictions)
    except WorkError:
        return None
    if min(scores.min(), reference.min()) < 0 or reference.sum() == 0:
        return None
    return ratio_bootstrap(scores, reference, seed=seed)


def merge_retention(
    merged: Mapping[str, SuiteResult], models: Mapping[str, Mapping[str, SuiteResult]], seed: int
) -> list[dict[str, Any]]:
    """Returns the retention of each model on each suite, as JSON values.

    Args:
        merged: the merged model's results by suite.
        models: results by suite of each model that it is made of and that was measured.
        seed: of the resamples.

    Returns:
        ``model``, ``suite``, ``metric``, ``ratio``, ``low``, ``high`` and ``n``; infinite values are null.
    """
    return [
        finite_json({"model": model, "suite": suite, "metric": merged[suite].paired, **vars(retention)})
        for model, results in models.items()
        for suite, result in results.items()
        if suite in merged and (retention := suite_retention(merged[suite], result, seed)) is not None
    ]


def retention_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each row of `merge_retention`."""
    template = "the merged model keeps {ratio:.1%} of {model}'s {metric} on {suite}, interval {low} to {high}, n = {n}"
    return [
        Message(
            template,
            **{**row, "metric": metric_name(row["metric"]), "low": _share(row["low"]), "high": _share(row["high"])},
        )
        for row in rows
    ]


def _share(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.1%}"
