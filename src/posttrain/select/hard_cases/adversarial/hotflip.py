"""HotFlip: the swap with the greatest first-order gain, again and again."""

from collections.abc import Iterator

import numpy as np

from posttrain.select.hard_cases.adversarial.problem import Candidate, Problem

_TRIED = 512  # best swaps that are looked at, until one is allowed
_AT_A_TIME = 16


def hotflip(problem: Problem) -> Iterator[list[Candidate]]:
    """One swap a step, the allowed one with the greatest gain; a token that was swapped stays.

    J. Ebrahimi et al., HotFlip: White-Box Adversarial Examples for Text Classification, ACL 2018, arXiv:1712.06751,
    section 2.2, greedily (a beam of one) and on tokens.
    """
    own = problem.start
    for _ in range(problem.most_swaps):
        gains = problem.gains(own)
        if gains is None:
            return
        for place, token in enumerate(own):
            if token != problem.start[place]:
                gains[place] = -np.inf
        best = _best_allowed(problem, own, gains.cpu().numpy())
        if best is None:
            return
        yield [best]
        own = best.own


def _best_allowed(problem: Problem, own: tuple[int, ...], gains: np.ndarray) -> Candidate | None:
    flat = gains.ravel()
    most = min(_TRIED, flat.size)
    order = np.argpartition(-flat, most - 1)[:most]
    ranked = [index for index in order[np.lexsort((order, -flat[order]))].tolist() if flat[index] > 0]
    for start in range(0, len(ranked), _AT_A_TIME):
        swaps = [divmod(index, gains.shape[1]) for index in ranked[start : start + _AT_A_TIME]]
        found = problem.allowed([swapped(own, place, token) for place, token in swaps])
        if found:
            return found[0]
    return None


def swapped(own: tuple[int, ...], place: int, token: int) -> tuple[int, ...]:
    """The tokens with another at one place."""
    return (*own[:place], token, *own[place + 1 :])
