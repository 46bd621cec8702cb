"""Spherical interpolation of two models."""

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.methods.angles import RowScope, cosines, gram_matrix, row_gram_matrices
from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine, normalized
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup

# Float32 tells no smaller angle than this from 0 or from 180 degrees.
_COLLINEAR = 1 - 1e-6


@merge_method("slerp", models=(2, 2), ranges={"t": Range(0, 1), "linear_above": Range(0, 1)})
def slerp(
    group: TensorGroup, *, t: float = 0.5, scope: RowScope = "tensor", linear_above: float = 0.9995
) -> BlockFunction:
    """Interpolates two models along the arc between their directions (Shoemake 1985).

    (sin((1 - t) a) theta_1 + sin(t a) theta_2) / sin(a), a being the angle between the two. The coefficients are those
    of the directions, and the weights themselves are combined, as mergekit does: models of different norms meet on no
    circle. Where |cos(a)| is above ``linear_above`` the interpolation is linear, for identical and for opposite models
    too. A zero vector has no direction and counts as orthogonal.

    With the defaults the result is that of mergekit's ``slerp``, which knows the angle of the tensor alone.

    Args:
        t: 0 for the first model (or the base, if the recipe names one) to 1 for the second.
        scope: the angle is that of the whole tensor, of each row (of the last dimension), or of the whole model.
        linear_above: cosine above which the interpolation is linear; with 1, of collinear models only.
    """
    return _interpolate(group, t, scope, linear_above)


@merge_method("nuslerp", models=(2, 2), ranges={"weight": Range(0)})
def nuslerp(group: TensorGroup, *, weight: PerModel = (1.0,), nuslerp_flatten: bool = True) -> BlockFunction:
    """Interpolates as `slerp` with t = w_2 / (w_1 + w_2), linearly only between collinear models.

    The method of this name in mergekit, of recipes without a base and without ``nuslerp_row_wise``.

    Args:
        weight: w, one a model.
        nuslerp_flatten: the angle is that of the whole tensor; without, of each row of the last dimension.

    Raises:
        UserError: the weights add up to zero.
    """
    return _interpolate(group, normalized(weight)[1], "tensor" if nuslerp_flatten else "row", 1.0)


def slerp_coefficients(cosine: np.ndarray, t: float, linear_above: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients of the first and the second vector.

    Args:
        cosine: of the angles between the two, of any shape.
        t: from 0 to 1.
        linear_above: absolute cosine above which they are 1 - t and t.
    """
    angle = np.arccos(np.clip(cosine, -_COLLINEAR, _COLLINEAR))
    linear = np.abs(cosine) > min(linear_above, _COLLINEAR)
    first, second = np.sin((1 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)
    return np.where(linear, 1 - t, first), np.where(linear, t, second)


def _interpolate(group: TensorGroup, t: float, scope: str, linear_above: float) -> BlockFunction:
    if scope == "row":
        return _interpolate_rows(t, linear_above)
    cosine = cosines(gram_matrix(group, scope))[0, 1]
    first, second = slerp_coefficients(cosine, t, linear_above)
    return combine([float(first), float(second)])


def _interpolate_rows(t: float, linear_above: float) -> BlockFunction:
    def merge(block: Block) -> Tensor:
        cosine = cosines(row_gram_matrices(block.values))[:, 0, 1]
        first, second = (
            torch.from_numpy(coefficients).float()[:, None]
            for coefficients in slerp_coefficients(cosine, t, linear_above)
        )
        return torch.addcmul(block.values[0].mul_(first), block.values[1], second, out=block.values[0])

    return merge
