"""DARE: drop elements of task vectors at random, and rescale the rest."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import normalized, sparsify_and_add
from posttrain.merge.methods.ties import sparsify_and_elect
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup

LEVELS = 1 << 16
"""Number of different random numbers: probabilities are multiples of 1/65536."""


@merge_method("dare_linear", task_vectors=True, ranges={"density": Range(0, 1)})
def dare_linear(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.5,),
    normalize: bool = False,
    rescale: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Adds task vectors of which elements were dropped at random: theta_0 + scale sum_i w_i m_i t_i / d_i.

    DARE (Yu et al. 2024) with task arithmetic: the elements of m_i are independent, 1 with the probability d_i and else
    0, so that the mean over all masks is task arithmetic's result. The paper drops with the probability p = 1 - d.

    The density is rounded to a multiple of 1/65536, at least 1/65536 unless it is 0, and the rescaling divides by the
    rounded one, so that rounding adds no bias. At density 1 everything stays, at 0 nothing. mergekit rescales by the
    factor that restores the L1 norm, not by 1 / d, and its default density is 1. PEFT's dare_linear is this one with
    other random numbers; its dare_ties elects and divides as its TIES does.

    Args:
        weight: w, one per model.
        density: d, probability to stay.
        normalize: divide the sum by the sum of w.
        rescale: divide by the density.
        scale: factor of the merged task vector.
    """
    coefficients = normalized(weight) if normalize else weight
    factors = rescaled([scale * coefficient for coefficient in coefficients], density, rescale)
    return sparsify_and_add(lambda block: drop_randomly(group, block, density), factors)


@merge_method("dare_ties", task_vectors=True, ranges={"density": Range(0, 1)})
def dare_ties(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.5,),
    election: Literal["weighted", "count"] = "weighted",
    normalize: bool = False,
    rescale: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Merges task vectors, of which elements were dropped at random, by elected signs.

    Drops and rescales as `dare_linear` does; then elects the sign of each element and adds the weighted values with
    that sign, as TIES does. TIES' trimming is left out, as in mergekit; the paper's code trims what DARE left. PEFT
    divides by the number of the models that agree.

    Args:
        weight: w, one per model.
        density: probability to stay.
        election: by the sum of the values, or by the number of models with the sign (mergekit's ``sum`` and ``count``).
        normalize: divide by the weights of the models that agree, element by element; the paper does.
        rescale: divide by the density.
        scale: factor of the merged task vector.
    """
    factors = rescaled(weight, density, rescale)
    return sparsify_and_elect(
        lambda block: drop_randomly(group, block, density), factors, weight, election, normalize, scale
    )


def drop_randomly(group: TensorGroup, block: Block, density: Sequence[float]) -> None:
    """Sets elements of each model to zero, in place; each stays with the model's density as probability."""
    for model, (values, share) in enumerate(zip(block.values, density, strict=True)):
        kept = kept_levels(share)
        if kept == 0:
            values.zero_()
        elif kept < LEVELS:
            # By a product with numpy's mask, in a tenth of the time of a mask from torch.
            np.multiply(values.numpy(), group.random_levels(model, block) < kept, out=values.numpy())


def kept_levels(density: float) -> int:
    """Returns the number of the 65536 random numbers with which an element stays."""
    return max(1, round(density * LEVELS)) if density > 0 else 0


def rescaled(weight: Sequence[float], density: Sequence[float], rescale: bool) -> list[float]:
    """Returns the weights divided by the rounded densities."""
    if not rescale:
        return list(weight)
    return [factor * LEVELS / max(1, kept_levels(share)) for factor, share in zip(weight, density, strict=True)]
