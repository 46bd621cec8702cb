"""TIES-Merging: trim task vectors, elect signs, and average what agrees."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup

# Share of the largest weight below which a sum of weights of opposite signs is rounding.
_CANCELLED = 1e-6

_MINUS_ONE = torch.tensor(-1.0)


@merge_method("ties", task_vectors=True, ranges={"density": Range(0, 1)})
def ties(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.2,),
    election: Literal["weighted", "count"] = "weighted",
    normalize: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Merges task vectors after Yadav et al. 2023.

    Trim: of each task vector the largest ``density`` of the elements stay, by magnitude; those that equal the smallest
    of them stay too. Elect: the sign of each element is that of the weighted sum. Merge: the weighted values with that
    sign are added.

    Each tensor is trimmed by itself, as in mergekit and PEFT; the paper ranks the elements of the whole model, has no
    weights and averages (``normalize``). PEFT elects without the weights, and divides by the number of the models that
    agree, not by their weights: with equal weights w its result is that of ``scale`` w.

    Args:
        weight: w, one per model.
        density: share of the elements that stay, at least one element unless it is 0; the paper's k is 20%.
        election: by the sum of the weighted values, or by the number of models with the sign (mergekit's ``sum`` and
            ``count``).
        normalize: divide by the weights of the models that agree, element by element.
        scale: factor of the merged task vector, the paper's lambda.
    """
    thresholds = group.kth_largest([min(max(value, 0.0), 1.0) for value in density])

    def trim_block(block: Block) -> None:
        for values, threshold in zip(block.values, thresholds, strict=True):
            keep_from(values, threshold)

    return sparsify_and_elect(trim_block, weight, weight, election, normalize, scale)


def sparsify_and_elect(
    sparsify: Callable[[Block], None],
    factors: Sequence[float],
    weight: Sequence[float],
    election: str,
    normalize: bool,
    scale: float,
) -> BlockFunction:
    """Returns the function that drops elements of a block's task vectors, in place, and adds by elected signs.

    Args:
        sparsify: sets elements to zero, and may rescale the others.
        factors: of the values, one per model; the weights, with a rescaling or without.
        weight: one per model, for the divisor.
        election: see `elect_and_add`.
        normalize: see `elect_and_add`.
        scale: factor of the result.
    """

    if normalize and min(weight) == max(weight) > 0 and list(factors) == list(weight):
        # Equal weights are factors of both sum and divisor, and of no sign.
        factors = weight = [1.0] * len(weight)

    def merge(block: Block) -> Tensor:
        sparsify(block)
        for values, factor in zip(block.values, factors, strict=True):
            if factor != 1:
                values.mul_(factor)
        total = elect_and_add(block.values, weight, election, normalize)
        return total if scale == 1 else total.mul_(scale)

    return merge


def keep_from(values: Tensor, threshold: float) -> Tensor:
    """Sets the values of a smaller magnitude than ``threshold`` to zero, in place."""
    # The next smaller number, as hardshrink keeps what is strictly larger; it takes a fifth of the time of a mask.
    below = float(np.nextafter(np.float32(threshold), np.float32(0)))
    torch.ops.aten.hardshrink.out(values, below, out=values)
    return values


def elect_and_add(values: Tensor, weight: Sequence[float], election: str, normalize: bool) -> Tensor:
    """Adds the values whose sign is that of most, element by element (steps 2 and 3 of TIES).

    Args:
        values: float32 [models, rows, columns], weighted, 0 where trimmed; changed.
        weight: the weights, for the divisor.
        election: ``weighted`` for the sign of the sum, ``count`` for that of most models; a draw is positive.
        normalize: divide by the sum of the weights of the models with that sign.

    Returns:
        float32 [rows, columns].
    """
    return add_agreeing(values, elect_signs(values, election), weight if normalize else None)


def elect_signs(values: Tensor, election: str) -> Tensor:
    """Returns 1 or -1 for each element: the sign of the sum, or that of most models; 1 in a draw."""
    majority = values[0].clone() if election == "weighted" else values[0].sign()
    for value in values[1:]:
        majority.add_(value if election == "weighted" else value.sign())
    return torch.add(_MINUS_ONE, torch.ge(majority, 0, out=majority), alpha=2, out=majority)


def add_agreeing(values: Tensor, signs: Tensor, weight: Sequence[float] | None) -> Tensor:
    """Adds the values that have the given sign, element by element.

    Args:
        values: float32 [models, rows, columns]; changed.
        signs: 1 or -1, float32 [rows, columns].
        weight: to divide by the sum of those of the models that agree; None to divide by nothing.

    Returns:
        float32 [rows, columns].
    """
    total = values[0].mul_(signs).clamp_min_(0)
    divisor = None if weight is None else torch.sign(total).mul_(weight[0])
    for number, value in enumerate(values[1:], 1):
        total.add_(value.mul_(signs).clamp_min_(0))
        if weight is not None and divisor is not None:
            divisor.add_(value.sign_(), alpha=weight[number])
    total.mul_(signs)
    if weight is None or divisor is None:
        return total
    return _divide(total, divisor, weight)


def _divide(total: Tensor, divisor: Tensor, weight: Sequence[float]) -> Tensor:
    """Divides a sum by that of the weights that count, in place."""
    # Where no model agrees, or weights of opposite signs cancel, the sum is not divided.
    if min(weight) > 0:
        divisor.clamp_min_(min(weight))  # the sum is 0 where this changes the divisor
    else:
        none = torch.lt(divisor.abs(), max(map(abs, weight)) * _CANCELLED, out=torch.empty_like(divisor))
        divisor.add_(none)
    return total.div_(divisor)
