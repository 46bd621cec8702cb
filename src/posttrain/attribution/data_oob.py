"""Data-OOB: the out-of-bag accuracy of each record."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.attribution.blocks import Arrays, Floats, Rows, run_blocks

_BLOCK_SIZE = 10  # bags


def data_oob(
    features: Floats,
    labels: Rows,
    estimator: Any,
    *,
    bags: int = 400,
    seed: int = 0,
    workers: int = 1,
    folder: Path | None = None,
) -> tuple[Floats, Floats]:
    """Computes the out-of-bag accuracy of each record: right predictions by weak learners that did not draw it.

    Kwon and Zou, "Data-OOB: out-of-bag estimate as a simple and efficient data value" (ICML 2023, arXiv:2304.07718). A
    learner is trained on N records drawn with replacement. No evaluation records are needed, and a value is a share in
    [0, 1], not a marginal contribution.

    Args:
        features: [N, D].
        labels: [N].
        estimator: a scikit-learn classifier. Its ``random_state`` is set for each bag.
        bags: number of weak learners.
        seed: bag b is drawn from ``numpy.random.default_rng([seed, b])``.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks of these records, estimator and seed, so that a killed run resumes, as does one
            with more bags.

    Returns:
        Values [N] and their standard errors over the bags; NaN for a record that all bags drew.
    """
    work = _OutOfBagAccuracy(features, labels, estimator, seed)
    blocks = run_blocks(work, bags, _BLOCK_SIZE, "bags", workers=workers, folder=folder)
    right, count = (np.sum([block[name] for block in blocks], axis=0, dtype=np.int64) for name in ("right", "count"))
    # One right and one wrong prediction are added (A. Agresti and B. Coull, The American Statistician 52, 1998): else a
    # record that few bags left out, and all predicted alike, would have an error of 0.
    share = (right + 1) / (count + 2)
    values, errors = right / np.maximum(count, 1), np.sqrt(share * (1 - share) / (count + 2))
    return np.where(count > 0, values, np.nan), np.where(count > 0, errors, np.nan)


@dataclass(frozen=True)
class _OutOfBagAccuracy:
    """Counts predictions out of bag, and the right ones; work for `run_blocks`."""

    features: Floats
    labels: Rows
    estimator: Any
    seed: int

    def __call__(self, block: range) -> Arrays:
        right, count = np.zeros_like(self.labels), np.zeros_like(self.labels)
        for number in block:
            generator = np.random.default_rng([self.seed, number])
            bag = generator.integers(0, len(self.labels), len(self.labels))
            # About 37% of the records are in no bag of N draws: (1 - 1/N)^N is nearly 1/e.
            outside = np.ones(len(self.labels), dtype=bool)
            outside[bag] = False
            if outside.any():
                count += outside
                predicted = self._predict(bag, outside, int(generator.integers(1 << 31)))
                right[outside] += predicted == self.labels[outside]
        return {"right": right, "count": count}

    def _predict(self, bag: Rows, outside: npt.NDArray[np.bool_], random_state: int) -> npt.NDArray[Any]:
        from sklearn.base import clone

        labels = self.labels[bag]
        # Many classifiers refuse a single class.
        if (labels == labels[0]).all():
            return np.full(np.count_nonzero(outside), labels[0])
        model = clone(self.estimator)
        if "random_state" in model.get_params():
            model.set_params(random_state=random_state)
        predicted: npt.NDArray[Any] = model.fit(self.features[bag], labels).predict(self.features[outside])
        return predicted
