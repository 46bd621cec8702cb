"""Measures the latency of single requests, candidate and champion side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import scorer_name
from posttrain.models.task import Turns
from posttrain.store.progress import progress_bar

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

Model = TypeVar("Model")

PERCENTILES = {"latency_p50": 50, "latency_p90": 90, "latency_p99": 99}
_TOLERANCE = 0.02
_FULL_REPEATS = 1
_STABLE_REPEATS = 4
_SLOWEST = 4  # slowest prompts of each model that are repeated further


def generate_answer(lm: LanguageModel, prompt: Turns) -> None:
    """Answers a request by generating text."""
    from posttrain.models.generate import generate

    generate(lm, [prompt])


def predict_label(lm: LanguageModel, prompt: Turns) -> None:
    """Answers a request with the most probable label of the task's closed set.

    Every label is scored, so that the time tells of the model's size and not of how sure it is of this prompt.
    """
    from posttrain.models.likelihood import label_scores

    label_scores(lm, [prompt], lm.task.label_set, tolerance=0)


def answer_function(suite: SuiteConfig, has_labels: bool) -> Callable[[LanguageModel, Turns], None]:
    """Returns the function that answers a request under a suite's scorer, for ``measure_latency``."""
    return predict_label if scorer_name(suite, has_labels) == "label_likelihood" else generate_answer


def measure_latency(
    models: Mapping[str, Model],
    prompts: Sequence[Turns],
    repeats: int,
    *,
    answer: Callable[[Model, Turns], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Latency percentiles of single requests.

    Each repeat asks a prompt of the models there and back (A B B A), so that a machine that drifts warmer
    or busier costs both the same. A prompt's latency is the minimum over its repeats: noise only ever adds
    time, so the minimum is what the model itself needs, and the percentiles over the prompts are of the
    work and not of the machine.

    All prompts are asked in the first repeat. The 99th percentile hangs on the few slowest, so these alone
    are repeated further, until four repeats on end have moved neither any model's 99th percentile nor the
    ratio of any two by 2%, and at most ``repeats`` times. In simulation, with 10% exponential noise on
    every request and stalls on one in fifty, equal models come out with a ratio of 1 and a standard
    deviation of 2%.

    Args:
        models: by name, such as ``{"candidate": ..., "champion": ...}``.
        prompts: P conversations.
        repeats: greatest number of A B B A repeats of a prompt.
        answer: asks one model one prompt, as `answer_function` says.
        clock: seconds, monotonic.

    Returns:
        For each model ``latency_p50``, ``latency_p90``, ``latency_p99`` (seconds, linear interpolation over
        the prompts) and ``n``, the number of prompts. Empty without prompts.
    """
    if not prompts or not models:
        return {}
    best = {name: np.full(len(prompts), np.inf) for name in models}
    for model in models.values():
        answer(model, prompts[0])  # the first call pays for what later ones find ready
    tails: list[np.ndarray] = []
    with progress_bar("timing answers", repeats * len(prompts), "prompts") as advance:
        for repeat in range(repeats):
            rows = range(len(prompts)) if repeat < _FULL_REPEATS else _slowest(best)
            for row in rows:
                for name in _counterbalanced(list(models), repeat + row):
                    start = clock()
                    answer(models[name], prompts[row])
                    best[name][row] = min(best[name][row], clock() - start)
            advance(len(prompts))
            tails.append(np.array([np.percentile(times, 99) for times in best.values()]))
            if repeat >= _FULL_REPEATS and _has_converged(tails):
                break
    return {
        name: {
            **{metric: float(np.percentile(times, at)) for metric, at in PERCENTILES.items()},
            "n": float(len(prompts)),
        }
        for name, times in best.items()
    }


def _counterbalanced(names: list[str], turn: int) -> Iterator[str]:
    """A B B A, and B A A B on every other turn, so that neither is always first."""
    order = names if turn % 2 == 0 else names[::-1]
    yield from order
    yield from order[::-1]


def _slowest(best: Mapping[str, np.ndarray]) -> list[int]:
    """The prompts that decide any model's 99th percentile, in their order."""
    return sorted({int(row) for times in best.values() for row in np.argsort(-times, kind="stable")[:_SLOWEST]})


def _has_converged(tails: list[np.ndarray]) -> bool:
    """Returns whether the last repeats moved every tail, and every ratio of two tails, by less than 2%."""
    if len(tails) <= _STABLE_REPEATS:
        return False
    before, after = tails[-1 - _STABLE_REPEATS], tails[-1]
    change = after / np.where(before > 0, before, 1.0)
    ratio_change = change[:, None] / np.where(change > 0, change, 1.0)[None, :]
    return bool((np.abs(change - 1) < _TOLERANCE).all() and (np.abs(ratio_change - 1) < _TOLERANCE).all())
