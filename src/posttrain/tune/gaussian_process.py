"""Gaussian processes over the points of a space, with Matérn's kernel."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from posttrain.tune.parameters import Choice
from posttrain.tune.space import Settings, Space

_LEAST_VARIANCE = 1e-12  # of values that are all the same

_LEAST_NOISE, _MOST_NOISE = 1e-6, 1.0

_LENGTHS = (0.05, 20.0)  # bounds of the length scales

_MEDIAN_LENGTH, _LENGTH_SPREAD = 0.33, 0.6  # of the prior: in one dimension, and the deviation of the logarithm

_NOISE_PRIOR = (-8.0, 2.0)  # mean and deviation of the logarithm: little noise, unless the values show it

_SHORT = 0.3  # where a second search begins: from long lengths the likelihood takes waves for noise


@dataclass(frozen=True)
class MaternKernel:
    """Matérn's kernel with ν = 5/2: (1 + √5 r + 5 r² / 3) exp(-√5 r), r² the sum of ((x - x') / l)².

    Args:
        lengths: float64 [d], l.
    """

    lengths: np.ndarray

    def between(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the correlations of the values at points, float64 [n, d], and at others, [m, d], as [n, m]."""
        distance = math.sqrt(5) * np.sqrt((((first[:, None] - second[None]) / self.lengths) ** 2).sum(-1))
        correlation: np.ndarray = (1 + distance + distance**2 / 3) * np.exp(-distance)
        return correlation


@dataclass(frozen=True)
class GaussianProcess:
    """A Gaussian process of mean 0, whose variance follows from the values.

    Args:
        points: float64 [n, d].
        kernel: the kernel.
        noise: variance of the noise, as a share of the kernel's.
    """

    points: np.ndarray
    kernel: MaternKernel
    noise: float

    def log_likelihood(self, values: np.ndarray) -> float:
        """Returns the marginal log-likelihood of float64 [n], at the variance that makes it greatest."""
        count, log_determinant = len(values), 2 * np.log(np.diag(self._factor[0])).sum()
        scale = math.log(2 * math.pi * max(self.variance(values), _LEAST_VARIANCE))
        return float(-0.5 * (count * scale + log_determinant + count))

    def variance(self, values: np.ndarray) -> float:
        """Returns the likeliest variance of the kernel, given float64 [n]."""
        return float(values @ cho_solve(self._factor, values)) / len(values)

    def mean(self, values: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Returns float64 [m], the expected values at float64 [m, d]."""
        mean: np.ndarray = self.kernel.between(self.points, points).T @ cho_solve(self._factor, values)
        return mean

    def deviation(self, points: np.ndarray) -> np.ndarray:
        """Returns float64 [m], the standard deviations at float64 [m, d], without the variance."""
        across = self.kernel.between(self.points, points)
        squares = 1 - (across * cho_solve(self._factor, across)).sum(0)
        deviation: np.ndarray = np.sqrt(np.maximum(squares, 0))
        return deviation

    @cached_property
    def _factor(self) -> tuple[np.ndarray, bool]:
        whole = self.kernel.between(self.points, self.points) + self.noise * np.eye(len(self.points))
        return cho_factor(whole, lower=True)  # type: ignore[no-any-return]


def fit_matern(points: np.ndarray, values: np.ndarray, generator: np.random.Generator) -> GaussianProcess:
    """Returns the process with Matérn's kernel whose hyperparameters are likeliest after the values.

    The length scales have a log-normal prior whose median grows with the square root of the dimensions, as that of
    Hvarfner et al. 2024 (arXiv:2402.02229), so that with few trials the process is not flat between the points. It is
    narrower and shorter than theirs, with which a search needs more trials on functions with several minima.

    Args:
        points: float64 [n, d].
        values: float64 [n], of mean 0.
        generator: draws where one of three searches begins; the others begin at the prior's mean and at short lengths.
    """
    from scipy.optimize import minimize

    dimensions = points.shape[1]
    center = np.append(np.full(dimensions, math.log(_MEDIAN_LENGTH) + math.log(dimensions) / 2), _NOISE_PRIOR[0])
    spread = np.append(np.full(dimensions, _LENGTH_SPREAD), _NOISE_PRIOR[1])
    bounds = np.log([*[_LENGTHS] * dimensions, (_LEAST_NOISE, _MOST_NOISE)])
    squares = (points[:, None] - points[None]) ** 2
    count = len(values)

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the negative log-posterior and its gradient."""
        inverse_lengths = np.exp(-2 * logs[:dimensions])
        variance = math.exp(logs[-1])
        distance = math.sqrt(5) * np.sqrt(squares @ inverse_lengths)
        decay = np.exp(-distance)
        whole = (1 + distance + distance**2 / 3) * decay + variance * np.eye(count)
        factor = cho_factor(whole, lower=True)
        inverse = cho_solve(factor, np.eye(count))
        weights = inverse @ values
        scale = max(float(values @ weights) / count, _LEAST_VARIANCE)
        # The variance is at its best value, so that only the explicit terms have a derivative.
        outer = np.outer(weights, weights) / scale - inverse
        # dk/d(log l) = 5/3 (1 + √5 r) exp(-√5 r) (x - x')² / l²
        slope = outer * (5 / 3 * (1 + distance) * decay)
        gradient = -0.5 * np.einsum("nm,nmd->d", slope, squares) * inverse_lengths
        gradient = np.append(gradient, -0.5 * np.trace(outer) * variance)
        value = 0.5 * count * math.log(scale) + np.log(np.diag(factor[0])).sum()
        deviations = (logs - center) / spread
        return float(value + 0.5 * deviations @ deviations), gradient + deviations / spread

    low, high = bounds.T
    short = center.copy()
    short[:dimensions] = math.log(_SHORT)
    starts = [center, short, center + spread * generator.normal(size=len(center))]
    results = [
        minimize(loss, np.clip(start, low, high), jac=True, method="L-BFGS-B", bounds=bounds) for start in starts
    ]
    logs = min(results, key=lambda result: float(result.fun)).x
    return GaussianProcess(points, MaternKernel(np.exp(logs[:dimensions])), math.exp(logs[-1]))


def encode(space: Space, drawn: Settings) -> np.ndarray:
    """Returns a point for the kernel, float64 [d]: shares of the ranges, and choices at a distance of 1.

    A number that does not exist is in the middle of its range, a choice that does not is nearer to all values than they
    are to each other.
    """
    point: list[float] = []
    for name, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            # Half a unit square: two of these vectors differ by 1.
            units = [0.0] * len(parameter.values)
            if name in drawn:
                units[parameter.index(drawn[name])] = math.sqrt(0.5)
            point += units
        else:
            point.append(parameter.to_unit(drawn[name]) if name in drawn else 0.5)
    return np.array(point)


def encode_all(space: Space, points: Iterable[Settings]) -> np.ndarray:
    """Returns several points as `encode` does, float64 [n, d]."""
    return np.array([encode(space, drawn) for drawn in points])


def draw_near(
    space: Space, drawn: Settings, count: int, radius: float, generator: np.random.Generator, changed: float
) -> list[dict[str, object]]:
    """Draws feasible points near one.

    Args:
        space: the space.
        drawn: the point.
        count: of points that are drawn; those that meet the constraints are returned.
        radius: standard deviation of numbers, as a share of their range.
        generator: draws them.
        changed: probability with which a choice is drawn again.
    """
    center = space.to_unit(drawn)
    choices = np.array([isinstance(parameter, Choice) for parameter in space.parameters.values()])
    shifts = generator.normal(0.0, radius, (count, len(center)))
    points = np.clip(np.nan_to_num(center, nan=0.5) + shifts * (~np.isnan(center) & ~choices), 0.0, 1.0)
    redrawn = (generator.random(points.shape) < changed) & choices
    points[redrawn] = generator.random(int(redrawn.sum()))
    candidates = [space.from_unit(point) for point in points]
    return [candidate for candidate in candidates if space.is_feasible(space.complete(candidate))]
