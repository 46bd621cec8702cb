"""Gradient attacks on a prompt's tokens: GCG, HotFlip and FGSM."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from posttrain.select.adversarial.problem import AttackProblem, Rewriting
from posttrain.select.adversarial.rewriting import Vocabulary

_TOP_TOKENS = 128  # tokens of greatest gain, a place

_SWAPS_PER_STEP = 128  # swaps that are drawn a step

_LOSSES_PER_STEP = 24  # of the allowed ones, those whose loss is computed

_MAX_TRIED = 512  # best swaps that are looked at, until one is allowed

_TRIED_PER_CHECK = 16

_STEP_SIZES = [
    2 ** (power / 2) for power in range(-4, 9)
]  # 0.25 to 16 times the usual size of a number of an embedding


def gcg(problem: AttackProblem) -> Iterator[list[Rewriting]]:
    """A step keeps the drawn swap with the highest exact loss, and only if that is above the loss before it.

    A. Zou et al., Universal and Transferable Adversarial Attacks on Aligned Language Models, 2023, arXiv:2307.15043,
    algorithm 1, with the loss raised instead of lowered, and without suffix: the words themselves are swapped. A
    later step may swap a token again.
    """
    own, loss = problem.start, problem.start_loss()
    gains = problem.gains(own)
    for _ in range(2 * problem.max_swaps):
        if loss is None or gains is None:
            return
        drawn = problem.allowed(_draw_swaps(problem, own, gains.cpu().numpy()))[:_LOSSES_PER_STEP]
        losses = problem.losses(drawn) if drawn else np.zeros(0)
        if losses is None:
            return
        if not drawn or losses.max() <= loss:
            continue
        best = int(losses.argmax())
        own, loss = drawn[best].own, float(losses[best])
        yield [drawn[best]]
        gains = problem.gains(own)


def _draw_swaps(problem: AttackProblem, own: tuple[int, ...], gains: np.ndarray) -> list[tuple[int, ...]]:
    """Swaps drawn evenly over places and their best tokens, as many as `_SWAPS_PER_STEP` where there are so many."""
    full = problem.swaps(own) >= problem.max_swaps
    places = [
        place
        for place in range(len(own))
        if np.isfinite(gains[place]).any() and (not full or own[place] != problem.start[place])
    ]
    swaps = []
    for place in places:
        top = np.argpartition(-gains[place], min(_TOP_TOKENS, gains.shape[1]) - 1)[:_TOP_TOKENS]
        swaps += [(place, token) for token in np.sort(top).tolist() if np.isfinite(gains[place, token])]
    chosen = problem.generator.permutation(len(swaps))[:_SWAPS_PER_STEP].tolist()
    return [swap_token(own, *swaps[index]) for index in chosen]


def hotflip(problem: AttackProblem) -> Iterator[list[Rewriting]]:
    """One swap a step, the allowed one with the greatest gain; a token that was swapped stays.

    J. Ebrahimi et al., HotFlip: White-Box Adversarial Examples for Text Classification, ACL 2018, arXiv:1712.06751,
    section 2.2, greedily (a beam of one) and on tokens.
    """
    own = problem.start
    for _ in range(problem.max_swaps):
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


def _best_allowed(problem: AttackProblem, own: tuple[int, ...], gains: np.ndarray) -> Rewriting | None:
    flat = gains.ravel()
    most = min(_MAX_TRIED, flat.size)
    order = np.argpartition(-flat, most - 1)[:most]
    ranked = [index for index in order[np.lexsort((order, -flat[order]))].tolist() if flat[index] > 0]
    for start in range(0, len(ranked), _TRIED_PER_CHECK):
        swaps = [divmod(index, gains.shape[1]) for index in ranked[start : start + _TRIED_PER_CHECK]]
        allowed = problem.allowed([swap_token(own, place, token) for place, token in swaps])
        if allowed:
            return allowed[0]
    return None


def swap_token(own: tuple[int, ...], place: int, token: int) -> tuple[int, ...]:
    """The tokens with another at one place."""
    return (*own[:place], token, *own[place + 1 :])


def fgsm(problem: AttackProblem) -> Iterator[list[Rewriting]]:
    """For ever longer steps, the tokens that they lead to, at the places of greatest first-order gain.

    The step is e sign(g) with g the loss's gradient at the embedded tokens (I. Goodfellow et al., Explaining and
    Harnessing Adversarial Examples, ICLR 2015, arXiv:1412.6572, section 4). Each e gives as many candidates as places
    changed, up to the swaps allowed: the best place alone, the best two, and so on.
    """
    gradient = problem.gradient(problem.start)
    if gradient is None:
        return
    own = torch.tensor(problem.start, device=gradient.device)
    vocabulary = problem.vocabulary
    usual = vocabulary.embeddings[vocabulary.allowed].abs().mean()
    fit = vocabulary.fits(own)
    fit[torch.arange(len(own), device=own.device), own] = True  # a short step leads nowhere else
    seen: set[tuple[int, ...]] = set()
    for step in _STEP_SIZES:
        stepped = perturb(vocabulary.embeddings[own], gradient, step * float(usual))
        decoded = nearest_tokens(stepped, vocabulary, fit)
        gain = ((vocabulary.embeddings[decoded] - vocabulary.embeddings[own]) * gradient).sum(1)
        places = [
            place for place in gain.argsort(descending=True, stable=True).tolist() if decoded[place] != own[place]
        ]
        proposals = []
        for count in range(1, min(len(places), problem.max_swaps) + 1):
            changed = own.clone()
            changed[places[:count]] = decoded[places[:count]]
            proposals.append(tuple(changed.tolist()))
        allowed = problem.allowed([one for one in proposals if one not in seen])
        seen.update(proposals)
        if allowed:
            yield allowed


def perturb(embedded: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Embeddings [T, D] moved by ``step`` along the sign of the loss's gradient [T, D]."""
    return embedded + step * gradient.sign()


def nearest_tokens(points: Tensor, vocabulary: Vocabulary, fit: Tensor) -> Tensor:
    """The token whose embedding is nearest to each point, by Euclidean distance; ties to the smaller id.

    Args:
        points: float32 [T, D].
        fit: bool [T, V], the tokens to choose from.

    Returns:
        int64 [T].
    """
    embeddings = vocabulary.embeddings
    # |e - x|^2 without |x|^2, which is the same for all tokens.
    distances = (embeddings * embeddings).sum(1)[None] - 2 * points @ embeddings.T
    return distances.masked_fill(~fit, torch.inf).argmin(1)
