"""Greedy coordinate gradient: many swaps drawn among those of great gain, their losses compared."""

from collections.abc import Iterator

import numpy as np

from posttrain.select.hard_cases.adversarial.hotflip import swapped
from posttrain.select.hard_cases.adversarial.problem import Candidate, Problem

_TOP = 128  # tokens of greatest gain, a place
_DRAWN = 128  # swaps that are drawn a step
_COMPARED = 24  # of the allowed ones, those whose loss is computed


def gcg(problem: Problem) -> Iterator[list[Candidate]]:
    """A step keeps the drawn swap with the highest exact loss, and only if that is above the loss before it.

    A. Zou et al., Universal and Transferable Adversarial Attacks on Aligned Language Models, 2023, arXiv:2307.15043,
    algorithm 1, with the loss raised instead of lowered, and without suffix: the words themselves are swapped. A
    later step may swap a token again.
    """
    own, loss = problem.start, problem.start_loss()
    gains = problem.gains(own)
    for _ in range(2 * problem.most_swaps):
        if loss is None or gains is None:
            return
        drawn = problem.allowed(_draw(problem, own, gains.cpu().numpy()))[:_COMPARED]
        losses = problem.losses(drawn) if drawn else np.zeros(0)
        if losses is None:
            return
        if not drawn or losses.max() <= loss:
            continue
        best = int(losses.argmax())
        own, loss = drawn[best].own, float(losses[best])
        yield [drawn[best]]
        gains = problem.gains(own)


def _draw(problem: Problem, own: tuple[int, ...], gains: np.ndarray) -> list[tuple[int, ...]]:
    """Swaps drawn evenly over places and their best tokens, as many as `_DRAWN` where there are so many."""
    full = problem.swaps(own) >= problem.most_swaps
    places = [
        place
        for place in range(len(own))
        if np.isfinite(gains[place]).any() and (not full or own[place] != problem.start[place])
    ]
    swaps = []
    for place in places:
        top = np.argpartition(-gains[place], min(_TOP, gains.shape[1]) - 1)[:_TOP]
        swaps += [(place, token) for token in np.sort(top).tolist() if np.isfinite(gains[place, token])]
    chosen = problem.generator.permutation(len(swaps))[:_DRAWN].tolist()
    return [swapped(own, *swaps[index]) for index in chosen]
