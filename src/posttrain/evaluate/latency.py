"""Measures the latency of single requests, candidate and champion side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS, scorer_name
from posttrain.models.task import Turns
from posttrain.store.progress import progress_bar

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

Model = TypeVar("Model")

Request = TypeVar("Request")

PERCENTILES = {"latency_p50": 50, "latency_p90": 90, "latency_p99": 99}
_TOLERANCE = 0.02  # relative change of a tail that counts as none
_FULL_REPEATS = 1  # repeats of all prompts; further ones are of the slowest alone
_STABLE_REPEATS = 4  # on end without a change, until timing ends
_SLOWEST = 4  # slowest prompts of each model that are repeated further


def generate_answer(lm: LanguageModel, prompt: Turns) -> None:
    """Answers a request by generating text."""
    from posttrain.models.generator import greedy_answers

    greedy_answers(lm, [prompt])


def predict_label(lm: LanguageModel, prompt: Turns) -> None:
    """Answers a request with the most probable label of the task's closed set."""
    from posttrain.models.likelihood import label_scores

    # Tolerance 0 scores every label: a pruned walk takes longer for a model that is less sure, and a gate would compare
    # that instead of the models' speed.
    label_scores(lm, [prompt], lm.task.label_set, tolerance=0)


def read_tokens(lm: LanguageModel, ids: Sequence[int]) -> None:
    """Computes the logits behind a sequence of tokens, in one forward pass."""
    import torch

    with torch.inference_mode():
        hidden = lm.decoder(input_ids=torch.tensor([ids], device=lm.device), use_cache=False).last_hidden_state
        float(lm.logits(hidden[:, -1]).sum())  # the number is there once an accelerator has done all


def answer_function(suite: SuiteConfig, has_labels: bool) -> Callable[[LanguageModel, Turns], None]:
    """Returns the function that answers a request under a suite's scorer, for ``measure_latency``."""
    return predict_label if SCORERS[scorer_name(suite, has_labels)].needs_labels else generate_answer


def measure_latency(
    models: Mapping[str, Model],
    prompts: Sequence[Request],
    repeats: int,
    *,
    answer: Callable[[Model, Request], Any],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Measures latency percentiles of single requests.

    A prompt's latency is the minimum over its repeats. The first repeat times all prompts; the slowest are repeated
    until four repeats on end have moved neither any model's 99th percentile nor the ratio of any two by 2%, and at most
    ``repeats`` times. In simulation, with 10% exponential noise on every request and stalls on one in fifty, equal
    models come out with a ratio of 1 and a standard deviation of 2%.

    Args:
        models: Models by name, such as ``{"candidate": ..., "champion": ...}``.
        prompts: P conversations, or other requests.
        repeats: Greatest number of A B B A repeats of a prompt.
        answer: Sends a prompt to a model, as `answer_function` returns it.
        clock: Returns monotonic seconds.

    Returns:
        For each model ``latency_p50``, ``latency_p90``, ``latency_p99`` (seconds, linear interpolation over
        the prompts) and ``n``, the number of prompts. Empty without prompts.
    """
    if not prompts or not models:
        return {}
    best = {name: np.full(len(prompts), np.inf) for name in models}
    for model in models.values():
        # Not timed: the first request pays for lazy initialisation and cold caches.
        answer(model, prompts[0])
    tails: list[np.ndarray] = []
    with progress_bar("timing answers", repeats * len(prompts), "prompts") as advance:
        for repeat in range(repeats):
            # The 99th percentile depends on the few slowest prompts, so these alone are worth more repeats.
            rows = range(len(prompts)) if repeat < _FULL_REPEATS else _slowest(best)
            for row in rows:
                for name in _counterbalanced(list(models), repeat + row):
                    start = clock()
                    answer(models[name], prompts[row])
                    # The minimum: noise only ever adds time, so it is what the model itself needs.
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


def _counterbalanced(names: list[str], number: int) -> Iterator[str]:
    """Yields A B B A, or B A A B for an odd number."""
    # There and back, so that a machine that grows warmer or busier costs both models the same; and neither is always
    # the first, which meets colder caches.
    order = names if number % 2 == 0 else names[::-1]
    yield from order
    yield from order[::-1]


def _slowest(best: Mapping[str, np.ndarray]) -> list[int]:
    """Returns the prompts that decide any model's 99th percentile, in their order."""
    return sorted({int(row) for times in best.values() for row in np.argsort(-times, kind="stable")[:_SLOWEST]})


def _has_converged(tails: list[np.ndarray]) -> bool:
    """Returns whether the last repeats moved every tail, and every ratio of two tails, by less than 2%."""
    if len(tails) <= _STABLE_REPEATS:
        return False
    # Across several repeats: a single one without a change may be luck.
    before, after = tails[-1 - _STABLE_REPEATS], tails[-1]
    change = after / np.where(before > 0, before, 1.0)
    ratio_change = change[:, None] / np.where(change > 0, change, 1.0)[None, :]
    return bool((np.abs(change - 1) < _TOLERANCE).all() and (np.abs(ratio_change - 1) < _TOLERANCE).all())
