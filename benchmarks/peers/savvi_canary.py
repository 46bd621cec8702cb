"""Runs savvi's multinomial test on the arms of the bad outcomes of each run; prints where it stops, as JSON.

python savvi_canary.py OUTCOMES.npz SHARE ALPHA
"""

import json
import sys

import numpy as np
from savvi.multinomial import Multinomial

STEP = 10


def stop_of(treatment: np.ndarray, good: np.ndarray, share: float, alpha: float) -> int | None:
    """Returns the number of outcomes until the first rejection, or None."""
    bad = np.flatnonzero(~good)
    test = Multinomial(alpha, np.array([1 - share, share]))
    for start in range(0, len(bad) - STEP + 1, STEP):
        arms = treatment[bad[start : start + STEP]]
        test.update(np.array([(~arms).sum(), arms.sum()]))
        if test.odds >= 1 / alpha:
            return int(bad[start + STEP - 1]) + 1
    return None


if __name__ == "__main__":
    content = np.load(sys.argv[1])
    share, alpha = float(sys.argv[2]), float(sys.argv[3])
    runs = zip(content["treatment"], content["good"], strict=True)
    print(json.dumps([stop_of(treatment, good, share, alpha) for treatment, good in runs]))
