"""SCE: select the elements in which task vectors differ, weigh models by them, and erase minority signs."""

import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.ties import add_agreeing, elect_signs
from posttrain.merge.order_statistics import rank_of_share
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup


@merge_method("sce", task_vectors=True, ranges={"select_topk": Range(0, 1), "weight": Range(0)})
def sce(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    select_topk: float = 1.0,
    normalize: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Merges task vectors by coefficients of their own magnitude (FuseChat, Wan et al. 2024).

    Select: of each tensor the share ``select_topk`` of the elements stays whose variance across the models is largest,
    the same ones for every model; those that equal the smallest of them stay too. Calculate: a model's coefficient is

        c_i = w_i sum(s_i^2) / sum_j sum(s_j^2)

    over the selected elements s_i of its task vector; without any that differs from 0 all are alike. Erase: of each
    element the values with the sign of sum_i s_i stay, s'_i. Merge: theta_0 + scale sum_i c_i s'_i.

    Args:
        weight: w, further factors, one a model; the paper has none.
        select_topk: share of the elements that stay; the paper's tau, of which it tries 10%.
        normalize: divide by the sum of the coefficients of the models that agree, element by element, as mergekit does;
            the paper does not.
        scale: factor of the merged task vector.
    """
    threshold = 0.0
    if select_topk < 1:
        rank = rank_of_share(select_topk, group.elements)
        threshold = group.kth_largest_of(lambda values: [variance(values)], [rank])[0]
    squares = group.total(lambda block: selected_squares(block.values, threshold))
    total = float(squares.sum())
    shares = squares / total if total > 0 else [1 / group.models] * group.models
    coefficients = [factor * float(share) for factor, share in zip(weight, shares, strict=True)]

    def merge(block: Block) -> Tensor:
        values = block.values
        selected = selection(values, threshold)
        signs = elect_signs(values, "weighted")
        for value, coefficient in zip(values, coefficients, strict=True):
            value.mul_(coefficient)
        merged = add_agreeing(values, signs, coefficients if normalize else None)
        return merged.mul_(scale) if selected is None else merged.mul_(selected).mul_(scale)

    return merge


def variance(values: Tensor) -> Tensor:
    """Returns the variance of each element across the models, times their number; exactly 0 where all are equal.

    Args:
        values: float32 [models, ...].
    """
    squares, total = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for value in values[1:]:
        difference = value - values[0]
        total.add_(difference)
        squares.add_(difference.mul_(difference))
    return squares.sub_(total.mul_(total).div_(len(values)))


def selection(values: Tensor, threshold: float) -> Tensor | None:
    """Returns 1 where the variance reaches the threshold and else 0; None if every element does."""
    if threshold <= 0:
        return None
    spread = variance(values)
    return torch.ge(spread, threshold, out=spread)


def selected_squares(values: Tensor, threshold: float) -> Tensor:
    """Returns the sum of the squares of each model's selected elements, float32 [models]."""
    selected = selection(values, threshold)
    flat = [(value if selected is None else value.mul_(selected)).flatten() for value in values]
    return torch.stack([torch.dot(value, value) for value in flat])
