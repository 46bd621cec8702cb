"""The names that metrics have in a gate's rules.

The first suite's metrics are bare (``accuracy``). Another suite ``safety`` stands for its main metric, and
``safety.NAME`` for each of its metrics. The same names stand behind ``champion.`` and ``baseline.``. The
gain over the champion with its bootstrap interval is ``gain.accuracy``, ``gain.accuracy.low`` and
``gain.accuracy.high``.
"""

from collections.abc import Mapping

from posttrain.evaluate.bootstrap import paired_scores
from posttrain.evaluate.config import BootstrapConfig, EvaluateConfig
from posttrain.evaluate.latency import PERCENTILES
from posttrain.evaluate.paired_interval import Interval, paired_interval
from posttrain.evaluate.scorers import SCORERS, scorer_name
from posttrain.evaluate.suite import SuiteResult
from posttrain.store.errors import UserError, suggest

PREFIXES = ("champion", "baseline")


def check_suites(config: EvaluateConfig, has_labels: bool) -> None:
    """Checks the suites against the scorers, which the config section itself does not know.

    Raises:
        UserError: a scorer is unknown or needs a label set that the task does not have, or a suite after the first
            has the name of a metric.
    """
    # Not every installed scorer: a broken package that this workspace does not use must not stop it.
    scorers = [SCORERS[name] for name in SCORERS.builtin]
    for name, suite in config.suites.items():
        where = f"evaluate.suites.{name}.scorer"
        if suite.scorer is not None and suite.scorer not in SCORERS:
            fix = suggest(suite.scorer, SCORERS)
            raise UserError(f"there is no scorer `{suite.scorer}`", where=where, fix=fix)
        scorer = SCORERS.load(scorer_name(suite, has_labels), where)
        if scorer.needs_labels and not has_labels:
            raise UserError(f"scorer {suite.scorer} needs a label set", where=where, fix="set `task.labels`")
        scorers.append(scorer)
    # A suite's name stands in a gate's rules where a metric's does, and a rule could mean either.
    metrics = frozenset().union(*(scorer.metrics | scorer.label_metrics for scorer in scorers))
    reserved = {*PREFIXES, "gain", *PERCENTILES} | metrics
    for name in list(config.suites)[1:]:
        if name in reserved:
            where = f"evaluate.suites.{name}"
            raise UserError(f"suite name `{name}` is also the name of a metric", where=where, fix="choose another")


def metric_names(config: EvaluateConfig, has_labels: bool) -> set[str]:
    """Returns every name that a gate may use; known before anything runs.

    Args:
        config: The config section ``evaluate``.
        has_labels: True if the task has a closed label set.
    """
    own: set[str] = set(PERCENTILES) if config.latency.prompts else set()
    gains: set[str] = set()
    for position, (name, suite) in enumerate(config.suites.items()):
        scorer = SCORERS[scorer_name(suite, has_labels)]
        metrics = scorer.metrics | (scorer.label_metrics if has_labels else frozenset())
        own |= _suite_metric_names(name, metrics, position)
        gains.add(_gain_name(name, scorer.main, scorer.paired, position))
    behind = {f"{prefix}.{name}" for prefix in PREFIXES for name in own}
    return own | behind | {f"gain.{name}{end}" for name in gains for end in ("", ".low", ".high")}


def right_or_wrong_gains(config: EvaluateConfig, has_labels: bool) -> dict[str, str]:
    """Returns the suites whose records are right or wrong, by the name of their gain, such as ``gain.accuracy``."""
    gains = {}
    for position, (name, suite) in enumerate(config.suites.items()):
        scorer = SCORERS[scorer_name(suite, has_labels)]
        if scorer.paired.endswith("accuracy"):
            gains[f"gain.{_gain_name(name, scorer.main, scorer.paired, position)}"] = name
    return gains


def flat_metrics(results: Mapping[str, SuiteResult]) -> dict[str, float]:
    """Returns a model's metrics by their names in a gate, without prefix. Suites are in the config's order."""
    flat: dict[str, float] = {}
    for position, (name, result) in enumerate(results.items()):
        if position == 0:
            flat |= result.metrics
        else:
            flat[name] = result.metrics[result.main]
            flat |= {f"{name}.{metric}": value for metric, value in result.metrics.items()}
    return flat


def paired_gains(
    candidate: Mapping[str, SuiteResult],
    champion: Mapping[str, SuiteResult],
    config: BootstrapConfig,
    seed: int,
) -> dict[str, Interval]:
    """Computes the paired intervals of candidate minus champion, by name without ``gain.``."""
    intervals = {}
    for position, (name, result) in enumerate(candidate.items()):
        if name in champion:
            candidate_scores, champion_scores = paired_scores(result.predictions, champion[name].predictions)
            intervals[_gain_name(name, result.main, result.paired, position)] = paired_interval(
                candidate_scores, champion_scores, seed=seed, resamples=config.resamples, level=config.level
            )
    return intervals


def flat_gains(intervals: Mapping[str, Interval]) -> dict[str, float]:
    """Returns intervals by their names in a gate."""
    flat: dict[str, float] = {}
    for name, interval in intervals.items():
        flat |= {
            f"gain.{name}": interval.difference,
            f"gain.{name}.low": interval.low,
            f"gain.{name}.high": interval.high,
        }
    return flat


def _suite_metric_names(suite: str, metrics: frozenset[str], position: int) -> set[str]:
    return set(metrics) if position == 0 else {suite, *(f"{suite}.{metric}" for metric in metrics)}


def _gain_name(suite: str, main: str, paired: str, position: int) -> str:
    if position == 0:
        return paired
    return suite if paired == main else f"{suite}.{paired}"
