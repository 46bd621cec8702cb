"""Model Stock: how far from the base to the average of the models, by the angles between their task vectors."""

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.methods.angles import RowScope, cosines, gram_matrix, row_gram_matrices
from posttrain.merge.methods.base import merge_method
from posttrain.merge.methods.linear import combine
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup


@merge_method("model_stock", task_vectors=True, models=(2, None))
def model_stock(
    group: TensorGroup, *, scope: RowScope = "tensor", clamp: bool = True, filter_wise: bool = False
) -> BlockFunction:
    """Interpolates between the base and the average of k models (Jang et al. 2024).

    theta_0 + t mean_i(theta_i - theta_0) with t = k cos(a) / (1 + (k - 1) cos(a)), the point of the plane through the
    models that is nearest to the centre of all models so trained. cos(a) is the average over the pairs of task vectors
    (the paper has one angle); with a vector that is zero it is 0.

    The paper knows angles up to 90 degrees. Beyond, t is negative and grows without bound, and ``clamp`` takes 0 in its
    place; mergekit's ``model_stock`` does not.

    Args:
        scope: t is that of the tensor, as in the paper, of each row (of the last dimension), or of the whole model.
        clamp: t is at least 0.
        filter_wise: mergekit's name for ``scope: row``.
    """
    if filter_wise or scope == "row":
        return _interpolate_rows(clamp)
    ratio = float(interpolation_ratio(gram_matrix(group, scope), clamp))
    return combine([ratio / group.models] * group.models)


def interpolation_ratio(gram: np.ndarray, clamp: bool = True) -> np.ndarray:
    """Returns t.

    Args:
        gram: inner products of the task vectors, [..., models, models].
        clamp: t is at least 0.
    """
    models = gram.shape[-1]
    pairs = np.triu_indices(models, 1)
    cosine = cosines(gram)[..., pairs[0], pairs[1]].mean(-1)
    divisor = 1 + (models - 1) * cosine
    # The divisor is the squared norm of the sum of the directions, by k: where they cancel, the base stays.
    ratio = np.divide(models * cosine, divisor, out=np.zeros_like(cosine), where=divisor > 1e-6)
    return np.asarray(ratio.clip(0) if clamp else ratio)


def _interpolate_rows(clamp: bool) -> BlockFunction:
    def merge(block: Block) -> Tensor:
        models = len(block.values)
        ratio = interpolation_ratio(row_gram_matrices(block.values), clamp) / models
        total = combine([1.0] * models)(block)
        return total.mul_(torch.from_numpy(ratio).float()[:, None])

    return merge
