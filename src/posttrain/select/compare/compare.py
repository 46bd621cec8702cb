"""Strategies side by side on labelled records: each with the same seeds, held-out records and head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.jobs.engine import cores, open_engine
from posttrain.select.auto import AUTO, informed_strategy
from posttrain.select.compare.curves import Plan, full_accuracy, learning_curve, task_of
from posttrain.select.compare.summary import Summary, summarise
from posttrain.select.selectors.registry import FIT_FOR_COLD_START, STRATEGIES
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean
from posttrain.store.progress import task as progress

BASELINE = "random"
TARGET = 0.8


@dataclass(frozen=True)
class Comparison:
    """What came out.

    Attributes:
        counts: labels at which accuracy was measured.
        summaries: by area, the best strategy first.
        full_accuracy: of a head that has learned from every record that is not held out, the mean over seeds.
        target: the share of it that ``Summary.labels`` reaches.
    """

    counts: list[int]
    summaries: list[Summary]
    full_accuracy: float
    target: float = TARGET


def compare(
    features: npt.NDArray[np.floating],
    labels: Sequence[str],
    strategies: Sequence[str],
    *,
    seeds: int = 6,
    batch: int = 50,
    most: int = 500,
    cold_start: str = AUTO,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    workers: int | None = None,
) -> Comparison:
    """Learning curves of the strategies and of drawing at random, with a logistic regression on the features.

    For each seed 30% of each class are held out to measure on; of the rest each strategy asks for ``batch`` labels at
    a time. The paired test is over seeds.

    Args:
        features: float [N, D] embeddings.
        labels: [N].
        strategies: names in ``STRATEGIES``, or ``auto``.
        seeds: curves of each strategy, seeds 0, 1 and so on.
        batch: labels asked for at a time.
        most: labels in the end, or all that are not held out where these are fewer.
        cold_start: for the first batch of strategies that go by what a model predicts; random starts at random.
        options: by strategy; of ``auto`` those of coverage.
        workers: processes; as many as there are cores when None.

    Raises:
        UserError: an unknown strategy, one that cannot work from embeddings and probabilities, or too few records.
    """
    check_names(strategies)
    check_cold_start(cold_start)
    if len(features) != len(labels):
        raise UserError(f"{len(features):,} embeddings are not of {len(labels):,} labels")
    names = list(dict.fromkeys([BASELINE, *strategies]))
    tasks = [task_of(features, labels, seed) for seed in range(seeds)]
    most = min(most, min(len(one.labels) for one in tasks))
    counts = tuple(range(batch, most + 1, batch))
    if not counts:
        raise UserError(f"{most:,} records to choose from make no batch of {batch}", fix="give a smaller --batch")
    plans = {name: Plan(name, counts, cold_start, (options or {}).get(name, {})) for name in names}
    _try(plans, tasks[0].features)
    work = [(name, plans[name], seed) for seed in range(seeds) for name in names]
    workers = cores() if workers is None else workers
    with (
        open_engine("inline" if workers == 1 else "processes", workers) as engine,
        progress("learning curves", len(work), "curve") as advance,
    ):
        found: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in names}
        for (name, *_), curve in zip(work, engine.map(partial(_curve, features, labels), work), strict=True):
            found[name].append(curve)
            advance(1)
    full = [full_accuracy(one) for one in tasks]
    curves = {name: np.stack(rows) for name, rows in found.items()}
    summaries = summarise(counts, curves, [TARGET * one for one in full], BASELINE)
    return Comparison(list(counts), summaries, float(np.mean(full)))


def check_names(names: Sequence[str]) -> None:
    """Raise a UserError if one is no strategy."""
    for name in names:
        if name not in (*STRATEGIES, AUTO):
            raise UserError(f"no strategy `{name}`", where="--strategies", fix=did_you_mean(name, [*STRATEGIES, AUTO]))


def check_cold_start(name: str) -> None:
    """Raise a UserError if a strategy is none for a cold start."""
    if name not in (*FIT_FOR_COLD_START, AUTO):
        fix = did_you_mean(name, [*FIT_FOR_COLD_START, AUTO])
        raise UserError(f"no strategy for a cold start: `{name}`", where="--cold-start", fix=fix)


def _curve(
    features: npt.NDArray[np.floating], labels: Sequence[str], work: tuple[str, Plan, int]
) -> npt.NDArray[np.float64]:
    _, plan, seed = work
    return learning_curve(task_of(features, labels, seed), plan, seed)


def _try(plans: Mapping[str, Plan], features: npt.NDArray[np.float32]) -> None:
    """Let each strategy choose one of a few rows, so that what cannot work is known before any work."""
    from posttrain.select.selection import select

    few = features[:8]
    scores = {"embeddings": few, "probabilities": np.full((len(few), 2), 0.5)}
    for plan in plans.values():
        select(informed_strategy() if plan.strategy == AUTO else plan.strategy, scores, 1, **plan.options)
