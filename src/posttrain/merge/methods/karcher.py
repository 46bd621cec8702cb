"""The Karcher mean: the point of the sphere that is nearest to the models' directions."""

from collections.abc import Sequence

import numpy as np

from posttrain.merge.methods.angles import Scope, cosines, gram_matrix, vector_norms
from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine, normalized
from posttrain.merge.tensor_group import BlockFunction, TensorGroup

# Below this squared norm the directions cancel, as far as float32 can tell.
_CANCELLED = 1e-6
_SMALLEST_SINE = 1e-9


@merge_method("karcher", ranges={"weight": Range(0), "max_iter": Range(1), "tol": Range(0, 1)})
def karcher(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    scope: Scope = "tensor",
    max_iter: int = 100,
    tol: float = 1e-10,
) -> BlockFunction:
    """Averages directions on the sphere and norms apart (Karcher 1977; Grove and Karcher 1973).

    The direction is argmin_m sum_i w_i angle(m, theta_i)^2 over unit vectors, by the fixed-point iteration
    m <- exp_m(sum_i w_i log_m(theta_i / |theta_i|)); the norm is sum_i w_i |theta_i|. The mean lies in the span of the
    models, so that their inner products determine its coefficients, in float64, and the weights are combined once.

    Of two models of one norm it is their `slerp`. A zero vector has no direction and counts for the norm alone. Where
    the directions cancel, as those of opposite models, no point is nearest: the result is the weighted average. The
    mean of mergekit's ``karcher``, whose models all weigh the same.

    Args:
        weight: w, one a model, divided by their sum.
        scope: the directions are those of the tensor, or of the whole model.
        max_iter: iterations at most.
        tol: length of a step, in radians, after which the iteration ends.

    Raises:
        UserError: the weights add up to zero.
    """
    return combine(karcher_coefficients(gram_matrix(group, scope), weight, max_iter, tol))


def karcher_coefficients(
    gram: np.ndarray, weight: Sequence[float], max_iter: int = 100, tol: float = 1e-10
) -> list[float]:
    """Returns the coefficients of the vectors in their mean.

    Args:
        gram: inner products, float64 [vectors, vectors].
        weight: one a vector.
        max_iter: iterations at most.
        tol: radians.
    """
    shares = normalized(weight)
    norms, cosine = vector_norms(gram), cosines(gram)
    directed = np.where(norms > 0, shares, 0.0)
    if directed.sum() == 0:
        return shares
    directed /= directed.sum()
    # The mean as coefficients of the unit vectors; it begins as their average.
    mean, square = directed, directed @ cosine @ directed
    if square < _CANCELLED:
        return shares
    mean = mean / np.sqrt(square)
    for _ in range(max_iter):
        projections = (cosine @ mean).clip(-1, 1)
        angles = np.arccos(projections)
        sines = np.sin(angles)
        # log_m(u) = angle / sin(angle) (u - cos(angle) m), whose factor is 1 at m; the point opposite has no direction.
        limits = np.where(projections > 0, 1.0, 0.0)
        pulls = directed * np.divide(angles, sines, out=limits, where=sines > _SMALLEST_SINE)
        step = pulls - (pulls @ projections) * mean
        length = np.sqrt(max(step @ cosine @ step, 0.0))
        # exp_m(v) = cos(|v|) m + sin(|v|) / |v| v; numpy's sinc has a factor of pi.
        mean = np.cos(length) * mean + np.sinc(length / np.pi) * step
        mean = mean / np.sqrt(max(mean @ cosine @ mean, _CANCELLED))
        if length <= tol:
            break
    norm = float(np.dot(shares, norms))
    return [norm * value / own if own > 0 else 0.0 for value, own in zip(mean.tolist(), norms.tolist(), strict=True)]
