"""TALL masks: the elements of the merged task vector that a task needs; and their consensus."""

import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine_values, normalized
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup
from posttrain.store.errors import UserError

_RANGES = {"mask_lambda": Range(0), "agreement": Range(0), "task": Range(1)}


@merge_method("consensus", task_vectors=True, ranges=_RANGES)
def consensus(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    mask_lambda: PerModel = (0.4,),
    agreement: int = 2,
    normalize: bool = False,
    scale: float = 1.0,
) -> BlockFunction:
    """Adds task vectors and keeps the elements that several tasks need (Wang et al. 2024).

    With the multi-task vector T = sum_i w_i t_i, the TALL mask of task i is

        m_i = 1 where |t_i| >= lambda_i |T - t_i|, else 0,

    and the result is theta_0 + scale T where sum_i m_i >= k, and theta_0 elsewhere. With k = 2 the elements that no
    task needs (the paper's catastrophic weights) and those that only one needs (selfish weights) are dropped; k = 0 is
    task arithmetic.

    Args:
        weight: w, one a model.
        mask_lambda: lambda of each task: a larger one gives a sparser mask. The paper chooses among 0.2 to 0.6.
        agreement: k; of more than there are models, all of them.
        normalize: divide T by the sum of w, in the masks as well.
        scale: factor of the merged task vector; it does not enter the masks, as in the paper's code.
    """
    coefficients = normalized(weight) if normalize else weight
    needed = min(agreement, group.models)

    def merge(block: Block) -> Tensor:
        total = combine_values(block.values, coefficients)
        votes = torch.zeros_like(total)
        for values, strictness in zip(block.values, mask_lambda, strict=True):
            votes.add_(tall_mask(values, total, strictness))
        return total.mul_(torch.ge(votes, needed, out=votes)).mul_(scale)

    return merge


@merge_method("tall", task_vectors=True, ranges=_RANGES)
def tall(
    group: TensorGroup,
    *,
    task: int = 1,
    weight: PerModel = (1.0,),
    mask_lambda: float = 0.4,
    normalize: bool = False,
    scale: float = 1.0,
) -> BlockFunction:
    """Restores the model of one task from the merged task vector: theta_0 + scale m_i T (Wang et al. 2024).

    T and m_i are those of `consensus`. The multi-task vector and one bit an element for each task can stand for all
    models.

    Args:
        task: i, the number of the model in the recipe, the first being 1.
        weight: w, one a model.
        mask_lambda: a larger one gives a sparser mask.
        normalize: divide T by the sum of w.
        scale: factor of the result's task vector.

    Raises:
        UserError: there is no model of this number.
    """
    if task > group.models:
        raise UserError(f"is {task} and there are {group.models} models beside the base", where="task")
    coefficients = normalized(weight) if normalize else weight

    def merge(block: Block) -> Tensor:
        total = combine_values(block.values, coefficients)
        return total.mul_(tall_mask(block.values[task - 1], total, mask_lambda)).mul_(scale)

    return merge


def tall_mask(values: Tensor, total: Tensor, strictness: float) -> Tensor:
    """Returns 1 where the task's own value is at least ``strictness`` times its distance from the total, else 0.

    Args:
        values: a task vector; changed.
        total: the multi-task vector.
    """
    distance = torch.sub(total, values).abs_().mul_(strictness)
    return torch.ge(values.abs_(), distance, out=distance)
