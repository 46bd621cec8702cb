"""Compares strategies by their learning curves, with a paired test over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from posttrain.jobs.map import open_engine
from posttrain.jobs.process import available_cores
from posttrain.select.learning_curve import CurvePlan, full_accuracy, hold_out, learning_curve
from posttrain.select.selectors.registry import SELECTORS, select
from posttrain.select.strategy import AUTO, batch_strategy
from posttrain.store.errors import UserError, suggest
from posttrain.store.progress import progress_bar as progress

BASELINE = "random"
TARGET = 0.8  # of the accuracy with all labels

Curves = npt.NDArray[np.float64]

_MAX_EXACT_PAIRS = 12  # 2^12 signs are fewer than the draws beyond
_DRAWS = 10_000
_SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class StrategySummary:
    """Mean results of a strategy's curves.

    Attributes:
        strategy: its name.
        accuracy: mean over seeds after each count of labels.
        area: mean accuracy under the curve, over counts and seeds, from 0 to 1.
        labels: mean over seeds of the labels after which the target is reached; None if one seed does not reach it.
        gain: mean over seeds of the area minus the baseline's.
        p_value: two-sided, of no gain, by a sign-flip test over seeds; None for the baseline.
    """

    strategy: str
    accuracy: list[float]
    area: float
    labels: float | None
    gain: float
    p_value: float | None


@dataclass(frozen=True)
class StrategyComparison:
    """The results of all strategies on the same records.

    Attributes:
        counts: labels at which accuracy was measured.
        summaries: the strategies' summaries, that of the largest area first.
        full_accuracy: mean over seeds of the accuracy of a head fitted to every record that is not held out.
        target: the share of it that ``StrategySummary.labels`` is about.
    """

    counts: list[int]
    summaries: list[StrategySummary]
    full_accuracy: float
    target: float = TARGET


def compare_strategies(
    features: npt.NDArray[np.floating],
    labels: Sequence[str],
    strategies: Sequence[str],
    *,
    seeds: int = 6,
    batch: int = 50,
    most: int = 500,
    workers: int | None = None,
) -> StrategyComparison:
    """Computes learning curves of the strategies and of random draws, with a logistic regression on the features.

    For each seed 30% of each class are held out to measure on; of the rest each strategy chooses ``batch`` records at
    a time. The paired test is over seeds.

    Args:
        features: float [N, D] embeddings.
        labels: [N].
        strategies: names in ``SELECTORS``, or ``auto``.
        seeds: number of curves of each strategy, with the seeds 0, 1 and so on.
        batch: number of records chosen at a time.
        most: number of labels in the end, or of all records that are not held out if these are fewer.
        workers: number of processes; as many as there are cores if None.

    Raises:
        UserError: an unknown strategy, one that cannot work from embeddings and probabilities, or too few records.
    """
    check_strategies(strategies)
    if len(features) != len(labels):
        raise UserError(f"{len(features):,} embeddings are not of {len(labels):,} labels")
    names = list(dict.fromkeys([BASELINE, *strategies]))
    tasks = [hold_out(features, labels, seed) for seed in range(seeds)]
    most = min(most, min(len(task.labels) for task in tasks))
    counts = tuple(range(batch, most + 1, batch))
    if not counts:
        raise UserError(f"{most:,} records to choose from make no batch of {batch}", fix="give a smaller --batch")
    plans = {name: CurvePlan(name, counts) for name in names}
    _dry_run(plans, tasks[0].features)
    work = [(name, plans[name], seed) for seed in range(seeds) for name in names]
    workers = available_cores() if workers is None else workers
    with (
        open_engine("inline" if workers == 1 else "processes", workers) as engine,
        progress("learning curves", len(work), "curve") as advance,
    ):
        curve_rows: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in names}
        for (name, *_), curve in zip(work, engine.map(partial(_curve, features, labels), work), strict=True):
            curve_rows[name].append(curve)
            advance(1)
    full = [full_accuracy(task) for task in tasks]
    curves = {name: np.stack(rows) for name, rows in curve_rows.items()}
    summaries = summarise(counts, curves, [TARGET * accuracy for accuracy in full], BASELINE)
    return StrategyComparison(list(counts), summaries, float(np.mean(full)))


def check_strategies(names: Sequence[str]) -> None:
    """Raises a UserError for an unknown strategy."""
    for name in names:
        if name not in (*SELECTORS, AUTO):
            raise UserError(f"no strategy `{name}`", where="--strategies", fix=suggest(name, [*SELECTORS, AUTO]))


def _curve(
    features: npt.NDArray[np.floating], labels: Sequence[str], work: tuple[str, CurvePlan, int]
) -> npt.NDArray[np.float64]:
    # Split again by the seed, as sending the task to the process would copy the features for each curve.
    _, plan, seed = work
    return learning_curve(hold_out(features, labels, seed), plan, seed)


def _dry_run(plans: Mapping[str, CurvePlan], features: npt.NDArray[np.float32]) -> None:
    """Lets each strategy choose one of a few rows, so that one that needs other scores is reported before any work."""
    few = features[:8]
    scores = {"embeddings": few, "probabilities": np.full((len(few), 2), 0.5)}
    for plan in plans.values():
        strategy = batch_strategy(plan.strategy, plan.options, cold=False)
        select(strategy.name, scores, 1, **strategy.options)


def summarise(
    counts: Sequence[int], curves: Mapping[str, Curves], targets: Sequence[float], baseline: str
) -> list[StrategySummary]:
    """Summarises each strategy, the largest area first.

    Args:
        counts: labels, ascending.
        curves: float64 [seeds, counts] by strategy; the same seed has the same held-out records.
        targets: the accuracy to reach, by seed.
        baseline: the strategy that gains are over.
    """
    areas = {name: area_under_curve(counts, values) for name, values in curves.items()}
    summaries = []
    for name, values in curves.items():
        needed = [labels_to_target(counts, curve, target) for curve, target in zip(values, targets, strict=True)]
        reached = [count for count in needed if count is not None]
        gains = areas[name] - areas[baseline]
        summaries.append(
            StrategySummary(
                name,
                values.mean(axis=0).tolist(),
                float(areas[name].mean()),
                float(np.mean(reached)) if len(reached) == len(needed) else None,
                float(gains.mean()),
                None if name == baseline else sign_flip_test(gains),
            )
        )
    return sorted(summaries, key=lambda summary: -summary.area)


def area_under_curve(counts: Sequence[int], curves: Curves) -> npt.NDArray[np.float64]:
    """Computes the mean accuracy between the first count and the last, by trapezoids: float64 [seeds]."""
    if len(counts) == 1:
        return curves[:, 0]
    return np.asarray(np.trapezoid(curves, counts, axis=1)) / (counts[-1] - counts[0])


def labels_to_target(counts: Sequence[int], curve: npt.NDArray[np.float64], target: float) -> float | None:
    """Returns the labels after which a curve first reaches the target, along straight lines; None if it never does."""
    above = np.flatnonzero(curve >= target)
    if not len(above):
        return None
    at = int(above[0])
    if at == 0:
        return float(counts[0])
    share = (target - curve[at - 1]) / (curve[at] - curve[at - 1])
    return float(counts[at - 1] + share * (counts[at] - counts[at - 1]))


def sign_flip_test(differences: npt.NDArray[np.float64]) -> float:
    """Computes the two-sided p-value of paired differences whose signs are random under the null hypothesis.

    R. Fisher, The Design of Experiments (1935), section 21: exact over all signs for up to 12 pairs, by 10,000 draws
    beyond, to which the observed signs are added.
    """
    observed = abs(differences.sum())
    if len(differences) <= _MAX_EXACT_PAIRS:
        signs = np.array(list(product((1, -1), repeat=len(differences))))
        # 1 - 1e-12: sums in another order differ in the last digit, and the observed signs must count themselves.
        return float((np.abs(signs @ differences) >= observed * (1 - 1e-12)).mean())
    # The observed signs count as one draw, so that p is never 0.
    signs = np.random.default_rng(0).choice((1, -1), (_DRAWS, len(differences)))
    return float((1 + (np.abs(signs @ differences) >= observed * (1 - 1e-12)).sum()) / (1 + _DRAWS))


def recommendation(summaries: Sequence[StrategySummary], baseline: str) -> str:
    """Returns one line of advice: the strategy to use."""
    best = summaries[0]
    if best.strategy == baseline or best.p_value is None:
        return f"no strategy beats {baseline} here: keep it, or try more seeds"
    if best.p_value > _SIGNIFICANCE:
        return (
            f"use {best.strategy}: {best.gain:+.3f} of area over {baseline}, which may be chance "
            f"(p = {best.p_value:.2f}): try more seeds"
        )
    base = next(summary for summary in summaries if summary.strategy == baseline)
    saving = ""
    if best.labels is not None and base.labels is not None:
        saving = f", and {best.labels / base.labels:.0%} of its labels to the target"
    return f"use {best.strategy}: {best.gain:+.3f} of area over {baseline} (p = {best.p_value:.3f}){saving}"
