"""The fast gradient sign method, decoded: a step in embedding space, and the tokens nearest to where it leads."""

from collections.abc import Iterator

import torch
from torch import Tensor

from posttrain.select.hard_cases.adversarial.problem import Candidate, Problem
from posttrain.select.hard_cases.adversarial.vocabulary import Vocabulary

_STEPS = [2 ** (power / 2) for power in range(-4, 9)]  # 0.25 to 16 times the usual size of a number of an embedding


def fgsm(problem: Problem) -> Iterator[list[Candidate]]:
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
    for step in _STEPS:
        stepped = perturbed(vocabulary.embeddings[own], gradient, step * float(usual))
        decoded = nearest_tokens(stepped, vocabulary, fit)
        gain = ((vocabulary.embeddings[decoded] - vocabulary.embeddings[own]) * gradient).sum(1)
        places = [
            place for place in gain.argsort(descending=True, stable=True).tolist() if decoded[place] != own[place]
        ]
        proposals = []
        for count in range(1, min(len(places), problem.most_swaps) + 1):
            changed = own.clone()
            changed[places[:count]] = decoded[places[:count]]
            proposals.append(tuple(changed.tolist()))
        found = problem.allowed([one for one in proposals if one not in seen])
        seen.update(proposals)
        if found:
            yield found


def perturbed(embedded: Tensor, gradient: Tensor, step: float) -> Tensor:
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
