"""A pair of task vectors, with a choice of what to do where their signs differ."""

from typing import Literal

import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import normalized
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup


@merge_method(
    "resolve_conflicts", task_vectors=True, models=(2, 2), ranges={"weight": Range(0), "importance": Range(0)}
)
def resolve_conflicts(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0, 1.0),
    resolution: Literal["magnitude", "zero", "average", "interpolate", "importance"] = "magnitude",
    importance: PerModel = (1.0, 1.0),
    normalize: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Adds two task vectors where their signs agree, and resolves the conflicts where they do not.

    Where the signs agree or a value is 0: (w_1 t_1 + w_2 t_2) / (w_1 + w_2). Where t_1 t_2 < 0, by ``resolution``:

    - magnitude: t_i with the larger magnitude of w_i t_i, the first of equals; TIES' election does that to a pair.
    - zero: 0, so that neither task moves the weight.
    - average, or interpolate: (w_1 t_1 + w_2 t_2) / (w_1 + w_2).
    - importance: (a_1 t_1 + a_2 t_2) / (a_1 + a_2).

    Args:
        weight: w, one per model.
        resolution: what to do with a conflict.
        importance: a, one per model; by rules for layers it can differ from layer to layer.
        normalize: as above; without, w_1 t_1 + w_2 t_2 where the signs agree, and w_i t_i for the larger magnitude.
        scale: factor of the merged task vector.

    Raises:
        UserError: the weights, or the importances where they count, add up to zero.
    """
    agreed = normalized(weight) if normalize else list(weight)
    if resolution == "importance":
        resolved = normalized(importance, "importance")
    else:
        resolved = normalized(weight) if resolution in ("average", "interpolate") else [0.0, 0.0]

    def merge(block: Block) -> Tensor:
        first, second = block.values
        conflict = torch.sign(first).mul_(torch.sign(second)).neg_().clamp_min_(0)
        if resolution == "magnitude":
            larger = torch.ge(first.abs().mul_(weight[0]), second.abs().mul_(weight[1]), out=torch.empty_like(first))
            own = [1.0, 1.0] if normalize else weight
            outcome = torch.mul(first, larger).mul_(own[0])
            outcome.add_(larger.neg_().add_(1).mul_(second), alpha=own[1])
        else:
            outcome = torch.mul(first, resolved[0]).add_(second, alpha=resolved[1])
        # One of both addends is 0, so that neither loses a digit.
        outcome.mul_(conflict)
        sum_of_both = first.mul_(agreed[0]).add_(second, alpha=agreed[1])
        merged: Tensor = sum_of_both.mul_(conflict.neg_().add_(1)).add_(outcome)
        return merged.mul_(scale)

    return merge
