"""Data-OOB: the out-of-bag accuracy of each record."""

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.attribution.block_runner import Arrays, BlockRunner
from posttrain.attribution.moments import ErrorReduction, Moments, StoppingRule
from posttrain.attribution.utility import Rows, check_features, check_labels, check_positive, check_seed
from posttrain.attribution.values import Floats, Values
from posttrain.store.hashing import digest


def data_oob(
    features: npt.ArrayLike,
    labels: Sequence[Any] | npt.NDArray[Any],
    *,
    estimator: Any = None,
    bags: int = 800,
    standard_error: float | None = None,
    reduction: ErrorReduction = "max",
    seed: int = 0,
    block_size: int = 10,
    workers: int = 1,
    folder: Path | None = None,
) -> Values:
    """Computes the out-of-bag accuracy of each record: right predictions by weak learners that did not draw it.

    Kwon and Zou, "Data-OOB: out-of-bag estimate as a simple and efficient data value" (ICML 2023, arXiv:2304.07718),
    with decision trees as in its experiments. A learner is trained on N records drawn with replacement. No evaluation
    records are needed, and a value is a share in [0, 1], not a marginal contribution.

    Args:
        features: [N, D].
        labels: [N].
        estimator: a scikit-learn classifier; ``DecisionTreeClassifier()`` if None. Its ``random_state`` is set for
            each bag.
        bags: most weak learners.
        standard_error: stop after the first block at which the standard errors are at most this.
        reduction: the ``max`` or the ``mean`` of the standard errors must be small.
        seed: bag b is drawn from ``numpy.random.default_rng([seed, b])``.
        block_size: bags that a worker takes at a time.
        workers: number of processes; it changes no digit.
        folder: caches finished blocks, so that a killed run resumes, as does one with more bags.

    Returns:
        Values with standard errors over the bags; NaN for a record that all bags drew. ``evaluations`` is the number
        of bags.

    Raises:
        UserError: shapes do not fit, a feature is not finite, or a number is out of its range.
    """
    from sklearn.base import clone
    from sklearn.tree import DecisionTreeClassifier

    check_positive(bags=bags, block_size=block_size)
    check_seed(seed)
    stop = StoppingRule(standard_error, reduction)
    points = check_features("features", features)
    classes = np.unique(check_labels("labels", labels, len(points)), return_inverse=True)[1].astype(np.int64)
    learner = DecisionTreeClassifier() if estimator is None else clone(estimator)
    work = _OutOfBagAccuracy(points, classes, learner, seed)
    # The number of bags is not in the key, so that a run with more bags resumes from those that are there.
    runner = BlockRunner(workers, folder).for_method(work.key, method="data_oob", version=1, seed=seed)
    moments = Moments(len(points))
    with closing(runner.run(work, bags, block_size, "bags")) as results:
        for block, result in results:
            moments.merge(Moments.from_arrays(result))
            evaluations = block.stop
            if stop.reached(_share_errors(moments)):
                break
    values = np.where(moments.count > 0, moments.mean, np.nan)
    return Values(values, _share_errors(moments), evaluations)


def _share_errors(moments: Moments) -> Floats:
    """Returns the standard errors of shares of right predictions, float64 [N]; NaN without predictions."""
    # One right and one wrong prediction are added (A. Agresti and B. Coull, The American Statistician 52, 1998): else a
    # record that few bags left out, and all predicted alike, would have an error of 0.
    count = moments.count + 2
    share = (moments.mean * moments.count + 1) / count
    errors: Floats = np.where(moments.count > 0, np.sqrt(share * (1 - share) / count), np.nan)
    return errors


@dataclass(frozen=True)
class _OutOfBagAccuracy:
    """Moments of right predictions out of bag; work for `BlockRunner.run`."""

    features: Floats
    labels: Rows
    estimator: Any
    seed: int

    def key(self) -> str:
        hashes = [hashlib.sha256(array.data).hexdigest() for array in (self.features, self.labels)]
        name = f"{type(self.estimator).__module__}.{type(self.estimator).__qualname__}"
        return digest([list(self.features.shape), hashes, name, repr(sorted(self.estimator.get_params().items()))])

    def __call__(self, block: range) -> Arrays:
        moments = Moments(len(self.labels))
        for number in block:
            generator = np.random.default_rng([self.seed, number])
            bag = generator.integers(0, len(self.labels), len(self.labels))
            # About 37% of the records are in no bag of N draws: (1 - 1/N)^N is nearly 1/e.
            outside = np.ones(len(self.labels), dtype=bool)
            outside[bag] = False
            right = np.zeros(len(self.labels))
            if outside.any():
                predicted = self._predict(bag, outside, int(generator.integers(1 << 31)))
                right[outside] = predicted == self.labels[outside]
            moments.add(right, outside)
        return moments.arrays()

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
