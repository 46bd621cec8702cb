"""How often successive models forget a record."""

import numpy as np
import numpy.typing as npt


def forgetting_events(correct: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Times that a record is right in one look and wrong in the next; infinite for one that was never right.

    M. Toneva et al., An Empirical Study of Example Forgetting, ICLR 2019 (arXiv:1812.05159), section 3 and, for the
    records that are never learnt, algorithm 1. Here a look is a model of the loop and not a step of a training.

    Args:
        correct: bool [R, N], whether each of R successive models answers each of N records rightly.

    Returns:
        float64 [N].
    """
    right = np.asarray(correct, dtype=bool)
    if right.ndim != 2:
        raise ValueError(f"correct must be [R, N], got shape {right.shape}")
    events = (right[:-1] & ~right[1:]).sum(axis=0).astype(np.float64)
    found: npt.NDArray[np.float64] = np.where(right.any(axis=0), events, np.inf)
    return found
