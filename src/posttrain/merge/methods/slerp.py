"""Spherical interpolation of two models."""

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine, normalized
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup

# Float32 tells no smaller angle than this from 0 or from 180 degrees.
_COLLINEAR = 1 - 1e-6


@merge_method("slerp", models=(2, 2), ranges={"t": Range(0, 1), "linear_above": Range(0, 1)})
def slerp(group: TensorGroup, *, t: float = 0.5, linear_above: float = 0.9995) -> BlockFunction:
    """Interpolates two models along the arc between their directions (Shoemake 1985).

    (sin((1 - t) a) theta_1 + sin(t a) theta_2) / sin(a), a being the angle between the two. The coefficients are those
    of the directions, and the weights themselves are combined, as mergekit does: models of different norms meet on no
    circle. Where |cos(a)| is above ``linear_above`` the interpolation is linear, for identical and for opposite models
    too. A zero vector has no direction and counts as orthogonal.

    The angle is that of the whole tensor, as in mergekit's ``slerp``, whose result this is with the defaults.

    Args:
        t: 0 for the first model (or the base, if the recipe names one) to 1 for the second.
        linear_above: cosine above which the interpolation is linear; with 1, of collinear models only.
    """
    return _interpolate(group, t, linear_above)


@merge_method("nuslerp", models=(2, 2), ranges={"weight": Range(0)})
def nuslerp(group: TensorGroup, *, weight: PerModel = (1.0,), nuslerp_flatten: bool = True) -> BlockFunction:
    """Interpolates as `slerp` with t = w_2 / (w_1 + w_2), linearly only between collinear models.

    The method of this name in mergekit, of recipes without a base and without ``nuslerp_row_wise``.

    Args:
        weight: w, one per model.
        nuslerp_flatten: the angle is that of the whole tensor; without, of each row of the last dimension.

    Raises:
        UserError: the weights add up to zero.
    """
    t = normalized(weight)[1]
    return _interpolate(group, t, 1.0) if nuslerp_flatten else _interpolate_rows(t)


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


def _cosine(first: np.ndarray, product: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the cosine between two vectors from their squared norms and their product; 0 with a zero vector."""
    lengths = np.sqrt(first.clip(0)) * np.sqrt(second.clip(0))
    return np.asarray(np.divide(product, lengths, out=np.zeros_like(lengths), where=lengths > 0).clip(-1, 1))


def _interpolate(group: TensorGroup, t: float, linear_above: float) -> BlockFunction:
    products = group.gram()
    cosine = _cosine(products[0, :1], products[0, 1:], products[1, 1:])
    first, second = slerp_coefficients(cosine, t, linear_above)
    return combine([float(first[0]), float(second[0])])


def _interpolate_rows(t: float) -> BlockFunction:
    def merge(block: Block) -> Tensor:
        one, two = block.values
        products = (torch.linalg.vecdot(*pair).double().numpy() for pair in ((one, one), (one, two), (two, two)))
        coefficients = slerp_coefficients(_cosine(*products), t)
        first, second = (torch.from_numpy(values).float()[:, None] for values in coefficients)
        return torch.addcmul(one.mul_(first), two, second, out=one)

    return merge
