"""Extrapolates learning curves: the distribution of a training's last value, given its first ones.

A curve is c + a φ(t) plus noise, where φ falls from 1 as a power of the step or exponentially, the two families that
fit learning curves best in Domhan et al. (2015) and Viering and Loog (2021, arXiv:2103.10948). The asymptote c and the
amplitude a have normal priors, and φ and the deviation of the noise are from a small grid. So the posterior is a finite
mixture of normal distributions in closed form: no sampling, no optimiser.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_POWERS = (0.25, 0.5, 1.0, 2.0)

_RATES = (1.0, 3.0, 10.0)  # of exponential decay, over the whole training

_NOISES = (0.003, 0.01, 0.03, 0.1, 0.3)  # standard deviations

_ASYMPTOTE, _AMPLITUDE = 1.5, 3.0  # prior standard deviations


@dataclass(frozen=True)
class Forecast:
    """A mixture of normal distributions.

    Attributes:
        weights: float64 of shape (n,), adding up to 1.
        means, deviations: float64 of shape (n,).
    """

    weights: np.ndarray
    means: np.ndarray
    deviations: np.ndarray

    @property
    def mean(self) -> float:
        """The expected value."""
        return float(self.weights @ self.means)

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return float(np.sqrt(self.weights @ (self.deviations**2 + (self.means - self.mean) ** 2)))

    def widened(self, factor: float) -> "Forecast":
        """Returns the forecast with the same mean and ``factor`` times the deviation."""
        means = self.mean + factor * (self.means - self.mean)
        return Forecast(self.weights, means, factor * self.deviations)

    def probability_below(self, value: float) -> float:
        """Returns the probability of less than a value."""
        from scipy.special import ndtr

        return float(self.weights @ ndtr((value - self.means) / self.deviations))


def basis(steps: np.ndarray, last: int) -> np.ndarray:
    """Returns the shapes φ at steps, float64 of shape (shapes, steps); each is 1 at step 1.

    Args:
        steps: int or float of shape (steps,), from 1.
        last: the step of the end.
    """
    powers = [steps**-power for power in _POWERS]
    decays = [np.exp(-rate * (steps - 1) / max(1, last - 1)) for rate in _RATES]
    return np.array([*powers, *decays])


def extrapolate(
    steps: Sequence[int], values: Sequence[float], last: int, centre: float = 0.0, scale: float = 1.0
) -> Forecast:
    """Returns the distribution of the value at the last step, as it would be observed.

    Args:
        steps: at which values are known, from 1.
        values: the values there.
        last: the step that is asked for.
        centre: where the asymptote lies before anything is known, such as the mean last value of other trainings.
        scale: the unit of the priors: the asymptote deviates by 1.5, the amplitude by 3, noise by 0.003 to 0.3 of them.

    Returns:
        A mixture with a component for each shape and each deviation of the noise, equally likely beforehand.
    """
    at, observed = np.asarray(steps, dtype=float), (np.asarray(values, dtype=float) - centre) / scale
    shapes, ends = basis(at, last), basis(np.array([float(last)]), last)
    # Of weights with unit variance: (shapes, steps, 2) and (shapes, 2).
    design = np.stack([np.full_like(shapes, _ASYMPTOTE), _AMPLITUDE * shapes], axis=2)
    asked = np.stack([np.full(len(shapes), _ASYMPTOTE), _AMPLITUDE * ends[:, 0]], axis=1)
    # Two weights: 2 x 2 systems in place of steps x steps ones (Bishop 2006, equations 3.53, 3.54 and 3.86), for each
    # shape and each noise: (shapes, noises, ...).
    noise = np.array(_NOISES)
    inverse = 1 / noise**2
    precision = np.eye(2) + inverse[:, None, None] * (design.transpose(0, 2, 1) @ design)[:, None]
    target = inverse[:, None] * (observed @ design)[:, None]
    weights = np.linalg.solve(precision, target[..., None])[..., 0]
    residual = observed - np.einsum("std,snd->snt", design, weights)
    energy = inverse * (residual**2).sum(axis=2) + (weights**2).sum(axis=2)
    logs = -0.5 * (energy + np.linalg.slogdet(precision)[1]) - len(at) * np.log(noise)
    spread = np.linalg.solve(precision, np.broadcast_to(asked[:, None, :, None], (*logs.shape, 2, 1)))[..., 0]
    variances = noise**2 + np.einsum("sd,snd->sn", asked, spread)
    means = np.einsum("sd,snd->sn", asked, weights)
    mixture = np.exp(logs - logs.max()).ravel()
    return Forecast(mixture / mixture.sum(), centre + scale * means.ravel(), scale * np.sqrt(variances.ravel()))
