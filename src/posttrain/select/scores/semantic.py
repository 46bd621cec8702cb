"""Entropy over meanings: answers that say the same are one outcome.

L. Kuhn, Y. Gal and S. Farquhar, Semantic Uncertainty, ICLR 2023 (arXiv:2302.09664); S. Farquhar et al., Detecting
hallucinations in large language models using semantic entropy, Nature 630, 2024.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp


def group_answers(count: int, same: Callable[[int, int], bool]) -> list[int]:
    """The group of each of ``count`` answers, numbered as they appear.

    An answer joins the first group whose first answer means the same (Kuhn et al., algorithm 1).

    Args:
        same: whether two answers, by their places, mean the same.
    """
    first: list[int] = []
    groups: list[int] = []
    for answer in range(count):
        found = next((group for group, other in enumerate(first) if same(other, answer)), len(first))
        if found == len(first):
            first.append(answer)
        groups.append(found)
    return groups


def semantic_entropy(groups: Sequence[int], log_probabilities: npt.ArrayLike) -> float:
    """Entropy over groups weighed by the answers' probabilities, in nats.

    A group has the sum of its answers' probabilities, and the groups' probabilities are normalised to sum to one
    (Farquhar et al., equations 4 and 5). Log-probabilities are per token, so that long answers are not held to be
    improbable (Kuhn et al., section 3.3).

    Args:
        groups: of S answers.
        log_probabilities: float [S], mean over each answer's tokens, in nats.

    Returns:
        Between 0, for one group, and the logarithm of the number of groups.
    """
    members, values = np.asarray(groups), np.asarray(log_probabilities, np.float64)
    sums = np.array([logsumexp(values[members == group]) for group in np.unique(members)])
    logs = sums - logsumexp(sums)
    return float(abs((np.exp(logs) * logs).sum()))


def discrete_semantic_entropy(groups: Sequence[int]) -> float:
    """Entropy of the groups' shares of the answers, in nats, which needs no probabilities (Farquhar et al. 2024).

    Args:
        groups: of S answers.
    """
    shares = np.unique(np.asarray(groups), return_counts=True)[1] / len(groups)
    return float(abs((shares * np.log(shares)).sum()))
