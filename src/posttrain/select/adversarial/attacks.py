"""Gradient attacks on a prompt's tokens: GCG and FGSM."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from posttrain.select.adversarial.problem import AttackProblem, Rewriting
from posttrain.select.adversarial.rewriting import Vocabulary

_TOP_TOKENS = 128  # tokens of greatest gain for each position
_SWAPS_PER_STEP = 128  # swaps that are drawn for a step
_LOSSES_PER_STEP = 24  # of the allowed ones, those whose loss is computed

# 0.25 to 16 times the usual size of a number of an embedding.
_STEP_SIZES = [2 ** (power / 2) for power in range(-4, 9)]


def gcg(problem: AttackProblem) -> Iterator[list[Rewriting]]:
    """Yields swaps by GCG: a step keeps the drawn swap with the highest exact loss, if it is above the loss before.

    A. Zou et al., Universal and Transferable Adversarial Attacks on Aligned Language Models, 2023, arXiv:2307.15043,
    algorithm 1, with the loss raised instead of lowered, and without suffix: the words themselves are swapped.
    """
    own, loss = problem.start, problem.start_loss()
    gains = problem.gains(own)
    # Twice as many steps as swaps, as a later step may swap a token again.
    for _ in range(2 * problem.max_swaps):
        if loss is None or gains is None:
            return
        swaps = problem.allowed(_draw_swaps(problem, own, gains.cpu().numpy()))[:_LOSSES_PER_STEP]
        losses = problem.losses(swaps) if swaps else np.zeros(0)
        if losses is None:
            return
        # A step that gains nothing is not an end: the next one draws other swaps from the same gains.
        if not swaps or losses.max() <= loss:
            continue
        best = int(losses.argmax())
        own, loss = swaps[best].own, float(losses[best])
        yield [swaps[best]]
        gains = problem.gains(own)


def _draw_swaps(problem: AttackProblem, own: tuple[int, ...], gains: np.ndarray) -> list[tuple[int, ...]]:
    """Draws up to `_SWAPS_PER_STEP` swaps evenly over positions and their best tokens."""
    # With all swaps used up, only tokens that differ already may change again.
    full = problem.swaps(own) >= problem.max_swaps
    positions = [
        position
        for position in range(len(own))
        if np.isfinite(gains[position]).any() and (not full or own[position] != problem.start[position])
    ]
    swaps = []
    for position in positions:
        top = np.argpartition(-gains[position], min(_TOP_TOKENS, gains.shape[1]) - 1)[:_TOP_TOKENS]
        # Sorted: a partition leaves its first in any order, and the draw must not depend on it.
        swaps += [(position, token) for token in np.sort(top).tolist() if np.isfinite(gains[position, token])]
    chosen = problem.generator.permutation(len(swaps))[:_SWAPS_PER_STEP].tolist()
    return [swap_token(own, *swaps[index]) for index in chosen]


def swap_token(own: tuple[int, ...], position: int, token: int) -> tuple[int, ...]:
    """Returns the tokens with another at one position."""
    return (*own[:position], token, *own[position + 1 :])


def fgsm(problem: AttackProblem) -> Iterator[list[Rewriting]]:
    """Yields swaps by FGSM: for ever longer steps the tokens nearest to the moved embeddings.

    The step is e sign(g) with g the loss's gradient at the embedded tokens (I. Goodfellow et al., Explaining and
    Harnessing Adversarial Examples, ICLR 2015, arXiv:1412.6572, section 4). Each e gives as many candidates as
    positions changed, up to the swaps allowed: the one of greatest first-order gain, the best two, and so on.
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
        ranked = gain.argsort(descending=True, stable=True).tolist()
        positions = [position for position in ranked if decoded[position] != own[position]]
        proposals = []
        for count in range(1, min(len(positions), problem.max_swaps) + 1):
            changed = own.clone()
            changed[positions[:count]] = decoded[positions[:count]]
            proposals.append(tuple(changed.tolist()))
        # Steps of like length lead to the same tokens, which need no second similarity and judgement.
        allowed = problem.allowed([proposal for proposal in proposals if proposal not in seen])
        seen.update(proposals)
        if allowed:
            yield allowed


def perturb(embedded: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Moves embeddings [T, D] by ``step`` along the sign of the loss's gradient [T, D]."""
    return embedded + step * gradient.sign()


def nearest_tokens(points: Tensor, vocabulary: Vocabulary, fit: Tensor) -> Tensor:
    """Returns the token whose embedding is nearest to each point, by Euclidean distance; ties to the smaller id.

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
