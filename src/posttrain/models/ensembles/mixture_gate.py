"""A gate over whole models: multinomial logistic regression that gives each model's weight for a record.

The ensemble's probability is the mixture sum_m g_m(x) p_m(k | x), as R. A. Jacobs, M. I. Jordan, S. J. Nowlan and
G. E. Hinton, Adaptive Mixtures of Local Experts, Neural Computation 1991, with experts that do not learn. The gate is
trained on the log-loss of the mixture directly. EM (M. I. Jordan and R. A. Jacobs, Hierarchical Mixtures of Experts and
the EM Algorithm, 1994) has the same stationary points.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from posttrain.models.ensembles.pooling import MIN_LOG_PROBABILITY

Floats = npt.NDArray[np.float64]

_PENALTIES = (1.0, 0.1, 0.01, 0.001)
"""Factors of half the squared weights beside the mean loss of a record; an unlimited one would leave a linear pool."""

_FOLDS = 5


@dataclass(frozen=True)
class MixtureGate:
    """Weights of M models, linear in D features that are standardised first.

    Attributes:
        mean: [D].
        scale: [D], above 0.
        weights: [M, D].
        bias: [M].
        penalty: that of the training.
    """

    mean: list[float]
    scale: list[float]
    weights: list[list[float]]
    bias: list[float]
    penalty: float

    def __call__(self, features: npt.ArrayLike) -> Floats:
        """Returns the weight of each model for each record, float64 [N, M], of features [N, D]."""
        from scipy.special import softmax

        values = (np.asarray(features, np.float64) - self.mean) / self.scale
        weights: Floats = softmax(values @ np.asarray(self.weights).T + self.bias, axis=1)
        return weights

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Returns the gate that `to_json` described."""
        return cls(**values)


def fit_gate(features: npt.ArrayLike, log_probabilities: npt.ArrayLike) -> MixtureGate:
    """Trains a gate; its L2 penalty is that of the least log-loss out of fold.

    Args:
        features: float [N, D], N >= 2.
        log_probabilities: float [M, N], ln p_m of each record's right label.
    """
    values = np.asarray(features, np.float64)
    logs = np.maximum(np.asarray(log_probabilities, np.float64), MIN_LOG_PROBABILITY)
    mean, scale = values.mean(axis=0), values.std(axis=0)
    # By the square root of D, so that one penalty means as much for 4 features as for 384.
    scale = np.where(scale > 0, scale, 1.0) * np.sqrt(max(1, values.shape[1]))
    standard = (values - mean) / scale
    # Dealt in turn, as the records come: no draw, so no seed.
    fold = np.arange(len(values)) % min(_FOLDS, len(values))

    def out_of_fold(penalty: float) -> float:
        total = 0.0
        for number in np.unique(fold):
            kept = fold != number
            weights, bias = _minimise(standard[kept], logs[:, kept], penalty)
            total += float(_losses(standard[~kept], logs[:, ~kept], weights, bias).sum())
        return total

    penalty = min(_PENALTIES, key=out_of_fold)
    weights, bias = _minimise(standard, logs, penalty)
    return MixtureGate(mean.tolist(), scale.tolist(), weights.tolist(), bias.tolist(), penalty)


def _losses(values: Floats, logs: Floats, weights: Floats, bias: Floats) -> Floats:
    """Returns -ln sum_m g_m p_m of each record, float64 [N]."""
    from scipy.special import log_softmax, logsumexp

    losses: Floats = -logsumexp(log_softmax(values @ weights.T + bias, axis=1) + logs.T, axis=1)
    return losses


def _minimise(values: Floats, logs: Floats, penalty: float) -> tuple[Floats, Floats]:
    """Returns weights [M, D] and bias [M], from a gate that gives all models the same weight."""
    from scipy.optimize import minimize
    from scipy.special import log_softmax, softmax

    models, (count, width) = len(logs), values.shape

    def loss(flat: Floats) -> tuple[float, Floats]:
        weights, bias = flat[: models * width].reshape(models, width), flat[models * width :]
        scores = log_softmax(values @ weights.T + bias, axis=1)
        # The gradient by the gate's logits is its own weight minus the posterior of the model, EM's responsibility.
        surplus = (np.exp(scores) - softmax(scores + logs.T, axis=1)) / count
        value = float(_losses(values, logs, weights, bias).mean()) + penalty / 2 * float((weights**2).sum())
        gradient = np.concatenate([(surplus.T @ values + penalty * weights).ravel(), surplus.sum(axis=0)])
        return value, gradient

    start = np.zeros(models * (width + 1))
    result = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-12, "gtol": 1e-8})
    return result.x[: models * width].reshape(models, width), result.x[models * width :]
