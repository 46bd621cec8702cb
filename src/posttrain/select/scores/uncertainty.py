"""Uncertainty measures over label probabilities, of one model or of a committee.

Sources: C. E. Shannon, A Mathematical Theory of Communication (1948), for entropy; B. Settles, Active
Learning Literature Survey (2009), section 3.1, for entropy, least confidence and margin as query strategies."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Computes the entropy H = -sum_k p_k ln p_k, in nats; 0 ln 0 counts as 0.

    Args:
        probabilities: float [N, K], every row sums to 1.

    Returns:
        float64 [N] between 0 (sure) and ln K (all labels alike). ``[0.4, 0.35, 0.25]`` gives 1.0805.
    """
    p = _check_probabilities(probabilities)
    logarithms = np.log(p, out=np.zeros_like(p), where=p > 0)
    nats: np.ndarray = np.abs((p * logarithms).sum(axis=1))  # a negation would give a sure row -0.0
    return nats


def least_confidence(probabilities: np.ndarray) -> np.ndarray:
    """Computes one minus the greatest probability.

    Args:
        probabilities: float [N, K], every row sums to 1.

    Returns:
        float64 [N] between 0 (sure) and 1 - 1/K. ``[0.4, 0.35, 0.25]`` gives 0.6.
    """
    missing: np.ndarray = 1.0 - _check_probabilities(probabilities).max(axis=1)
    return missing


def margin(probabilities: np.ndarray) -> np.ndarray:
    """Computes the greatest probability minus the second greatest: small where two labels compete.

    Args:
        probabilities: float [N, K], every row sums to 1.

    Returns:
        float64 [N] between 0 (a tie) and 1 (sure, and always 1 for K = 1). ``[0.4, 0.35, 0.25]`` gives 0.05.
    """
    p = _check_probabilities(probabilities)
    if p.shape[1] == 1:
        return p[:, 0].copy()
    # A partition, not a sort: only the two greatest of possibly thousands of labels are needed.
    top = np.partition(p, p.shape[1] - 2, axis=1)
    return top[:, -1] - top[:, -2]


def _check_probabilities(probabilities: np.ndarray) -> np.ndarray:
    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 2 or p.shape[1] == 0:
        raise ValueError(f"probabilities must be [N, K] with K >= 1, got shape {p.shape}")
    return p


def bald(probabilities: npt.ArrayLike) -> Floats:
    """Computes the mutual information between label and model, in nats: H(mean_t p_t) - mean_t H(p_t).

    N. Houlsby et al., Bayesian Active Learning for Classification and Preference Learning, 2011 (arXiv:1112.5745),
    equation 2, with samples of the posterior from dropout (Y. Gal, R. Islam, Z. Ghahramani, ICML 2017).

    Args:
        probabilities: float [T, N, K] of T passes or models; each row sums to 1.

    Returns:
        float64 [N] between 0, where all agree, and ln min(T, K).
    """
    p = _check_committee(probabilities)
    single = np.stack([entropy(member) for member in p]).mean(axis=0)
    # By Jensen's inequality it is at least 0; rounding can put it a little below.
    information: Floats = np.maximum(0.0, entropy(p.mean(axis=0)) - single)
    return information


def vote_entropy(probabilities: npt.ArrayLike) -> Floats:
    """Computes the entropy of the members' votes, in nats; each votes for its most probable label, the first of equals.

    S. Engelson and I. Dagan, JAIR 11, 1999, equation 6, without its division by the logarithm of the number of members
    or labels, which changes no order.

    Args:
        probabilities: float [T, N, K] of T members.

    Returns:
        float64 [N] between 0, where all vote for one label, and ln min(T, K).
    """
    p = _check_committee(probabilities)
    votes = np.zeros(p.shape[1:])
    np.add.at(votes, (np.arange(p.shape[1])[None, :], p.argmax(axis=2)), 1.0)
    return entropy(votes / len(p))


def consensus_kl(probabilities: npt.ArrayLike) -> Floats:
    """Computes the members' mean Kullback-Leibler divergence from their mean, in nats: mean_t KL(p_t || mean_s p_s).

    A. McCallum and K. Nigam, Employing EM and Pool-Based Active Learning for Text Classification, ICML 1998. It equals
    `bald` of the same probabilities, computed term by term.

    Args:
        probabilities: float [T, N, K] of T members; each row sums to 1.

    Returns:
        float64 [N] between 0, where all agree, and ln min(T, K).
    """
    p = _check_committee(probabilities)
    mean = np.broadcast_to(p.mean(axis=0), p.shape)
    ratio = np.divide(p, mean, out=np.ones_like(p), where=p > 0)
    divergence: Floats = np.maximum(0.0, (p * np.log(ratio)).sum(axis=2).mean(axis=0))
    return divergence


def _check_committee(probabilities: npt.ArrayLike) -> Floats:
    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 3 or p.shape[0] == 0 or p.shape[2] == 0:
        raise ValueError(f"probabilities must be [T, N, K] with T and K >= 1, got shape {p.shape}")
    return p
