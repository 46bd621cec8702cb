"""How much several models, or passes of one with dropout, disagree on a record."""

import numpy as np
import numpy.typing as npt

from posttrain.select.uncertainty import entropy

Floats = npt.NDArray[np.float64]


def bald(probabilities: npt.ArrayLike) -> Floats:
    """Mutual information between the label and the model, in nats: H(mean_t p_t) - mean_t H(p_t).

    N. Houlsby et al., Bayesian Active Learning for Classification and Preference Learning, 2011 (arXiv:1112.5745),
    equation 2, with samples of the posterior from dropout (Y. Gal, R. Islam, Z. Ghahramani, ICML 2017).

    Args:
        probabilities: float [T, N, K] of T passes or models; each row sums to 1.

    Returns:
        float64 [N] between 0, where all agree, and ln min(T, K).
    """
    p = _checked(probabilities)
    single = np.stack([entropy(one) for one in p]).mean(axis=0)
    found: Floats = np.maximum(0.0, entropy(p.mean(axis=0)) - single)
    return found


def vote_entropy(probabilities: npt.ArrayLike) -> Floats:
    """Entropy of the members' votes, in nats; each votes for its most probable label, the first of equals.

    S. Engelson and I. Dagan, JAIR 11, 1999, equation 6, without its division by the logarithm of the number of members
    or labels, which changes no order.

    Args:
        probabilities: float [T, N, K] of T members.

    Returns:
        float64 [N] between 0, where all vote for one label, and ln min(T, K).
    """
    p = _checked(probabilities)
    votes = np.zeros(p.shape[1:])
    np.add.at(votes, (np.arange(p.shape[1])[None, :], p.argmax(axis=2)), 1.0)
    return entropy(votes / len(p))


def consensus_kl(probabilities: npt.ArrayLike) -> Floats:
    """Mean Kullback-Leibler divergence of the members from their mean, in nats: mean_t KL(p_t || mean_s p_s).

    A. McCallum and K. Nigam, Employing EM and Pool-Based Active Learning for Text Classification, ICML 1998. It is
    what `bald` is of the same probabilities, computed term by term.

    Args:
        probabilities: float [T, N, K] of T members; each row sums to 1.

    Returns:
        float64 [N] between 0, where all agree, and ln min(T, K).
    """
    p = _checked(probabilities)
    mean = np.broadcast_to(p.mean(axis=0), p.shape)
    ratio = np.divide(p, mean, out=np.ones_like(p), where=p > 0)
    found: Floats = np.maximum(0.0, (p * np.log(ratio)).sum(axis=2).mean(axis=0))
    return found


def _checked(probabilities: npt.ArrayLike) -> Floats:
    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 3 or p.shape[0] == 0 or p.shape[2] == 0:
        raise ValueError(f"probabilities must be [T, N, K] with T and K >= 1, got shape {p.shape}")
    return p
