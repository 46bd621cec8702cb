"""Whether what a model is unsure of says where it errs; until then, choosing by it is choosing by noise."""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.closeness import Floats

_ONE_SIDED = 1.645  # 95% of a normal distribution lie above -1.645


def informative(confidence: Floats, right: npt.NDArray[np.bool_]) -> bool | None:
    """Whether a model is surer of its right answers than of its wrong ones, beyond chance.

    The area under the ROC curve of confidence against being right must exceed a half by 1.645 of its standard errors
    (J. A. Hanley and B. J. McNeil, Radiology 143, 1982).

    Args:
        confidence: float [N], NaN where it is not known.
        right: bool [N].

    Returns:
        None where fewer than two answers of either kind have a known confidence.
    """
    area, error = area_under_roc(confidence, right)
    return None if np.isnan(area) else bool(area - _ONE_SIDED * error > 0.5)


def tells_errors(confidence: Floats, right: npt.NDArray[np.bool_]) -> bool:
    """Whether doubts may be chosen by: they are not known to be no guide to errors, and more than one answer is right.

    Args:
        confidence: float [N], NaN where it is not known.
        right: bool [N].
    """
    return informative(confidence, right) is not False and int(np.sum(right)) >= 2


def area_under_roc(confidence: Floats, right: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Probability that a right answer has more confidence than a wrong one, and its standard error.

    Ties count half. The error is Hanley and McNeil's, of exponentially distributed scores. Both are NaN with fewer than
    two answers of either kind.
    """
    from scipy.stats import rankdata

    known = np.isfinite(confidence)
    values, right = np.asarray(confidence)[known], np.asarray(right, bool)[known]
    good, bad = int(right.sum()), int((~right).sum())
    if min(good, bad) < 2:
        return float("nan"), float("nan")
    area = (rankdata(values)[right].sum() - good * (good + 1) / 2) / (good * bad)
    ours, theirs = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area) + (good - 1) * (ours - area**2) + (bad - 1) * (theirs - area**2)
    return float(area), float(np.sqrt(max(variance, 0.0) / (good * bad)))
