"""The metric of a search of trainings, its scorer and its direction."""

from typing import Any

import pytest
from tune_records import tune_config

from posttrain.tune.trainings.config import TuneJobConfig


@pytest.mark.parametrize(
    ("metric", "labels", "scorer", "maximized"),
    [
        ("loss", True, "label_likelihood", False),
        ("loss", False, "perplexity", False),
        ("accuracy", True, "label_likelihood", True),
        ("accuracy", False, "exact_match", True),
        ("perplexity", False, "perplexity", False),
        ("preference_accuracy", False, "preference", True),
        ("ece", True, "label_likelihood", False),
    ],
)
def test_the_metric_names_scorer_and_direction(metric: str, labels: bool, scorer: str, maximized: bool) -> None:
    tune = tune_config(metric=metric)
    assert tune.suite(labels).scorer == scorer
    assert tune.searched.directions == (maximized,)
    other = tune_config(objectives=[{"metric": metric, "maximize": not maximized}])
    assert (other.searched.directions, other.metrics) == ((not maximized,), (metric,))


@pytest.mark.parametrize(
    ("objective", "labels", "changes", "metric"),
    [
        *((name, False, {}, "preference_accuracy") for name in ("dpo", "ipo", "hinge", "orpo", "simpo", "cpo", "kto")),
        ("sft", False, {}, "loss"),
        # Of a label set the loss is that of a label among the others.
        ("dpo", True, {}, "loss"),
        ("dpo", False, {"metric": "loss"}, "loss"),
        ("dpo", False, {"held_out": {"data": "20%", "scorer": "perplexity"}}, "loss"),
        ("sft", False, {"space": {"train.objective": ["sft", "dpo"]}}, "preference_accuracy"),
    ],
)
def test_the_default_metric_follows_the_objective(
    objective: str, labels: bool, changes: dict[str, Any], metric: str
) -> None:
    values = {"space": "auto", "held_out": "20%", "budget": 10} | changes
    job_values = {"model": "tiny", "data": "pairs.jsonl", "train": {"objective": objective}, "tune": values}
    tune = TuneJobConfig.read(job_values | ({"task": {"labels": ["card", "cash"]}} if labels else {}), "config").tune
    assert tune.metrics == (metric,)
    assert tune.searched.directions == (metric != "loss",)
    if metric != "loss":
        assert tune.suite(labels).scorer == "preference"
