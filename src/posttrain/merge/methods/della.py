"""DELLA: drop elements of task vectors at random, small ones more often than large ones."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.dare import LEVELS, kept_levels
from posttrain.merge.methods.linear import normalized, sparsify_and_add
from posttrain.merge.methods.ties import sparsify_and_elect
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup

_RANGES = {"density": Range(0, 1), "epsilon": Range(0, 1)}


@merge_method("della_linear", task_vectors=True, ranges=_RANGES)
def della_linear(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.5,),
    epsilon: PerModel = (0.15,),
    normalize: bool = False,
    rescale: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Adds task vectors of which small elements were dropped more often: theta_0 + scale sum_i w_i m_i t_i / d_i.

    MAGPRUNE (Deep et al. 2024) with task arithmetic. The n elements of a row are ranked by magnitude, r = 0 for the
    smallest, and equals by their column; an element stays (m = 1) with the probability

        d(r) = density + epsilon (2 r + 1 - n) / n

    and is divided by it, so that the mean over all masks is task arithmetic's result. d rises from density - epsilon to
    density + epsilon, has the mean density exactly, and is rounded to multiples of 1/65536 before the division. Where
    these bounds leave 0 to 1, epsilon is narrowed until they do not: at density 1 everything stays, at 0 nothing.

    The paper's epsilon is the whole width of that window, twice mergekit's and this one, and its ranks begin at the
    window's end, so that its mean is half a step from the density. mergekit does not divide by the probabilities: one
    factor for all elements restores the L1 norm, which favours the large ones.

    Args:
        weight: w, one per model.
        density: mean probability to stay.
        epsilon: half the width of the window of probabilities.
        normalize: divide the sum by the sum of w.
        rescale: divide by the probability to stay.
        scale: factor of the merged task vector.
    """
    coefficients = normalized(weight) if normalize else weight
    drop = magnitude_dropper(group, density, epsilon, rescale)
    return sparsify_and_add(drop, [scale * coefficient for coefficient in coefficients])


@merge_method("della", task_vectors=True, ranges=_RANGES)
def della(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    density: PerModel = (0.5,),
    epsilon: PerModel = (0.15,),
    election: Literal["weighted", "count"] = "weighted",
    normalize: bool = True,
    rescale: bool = True,
    scale: float = 1.0,
) -> BlockFunction:
    """Merges task vectors, of which small elements were dropped more often, by elected signs (Deep et al. 2024).

    Drop: as `della_linear`. Elect: the sign of each element is that of the weighted sum. Fuse: the weighted values with
    that sign are averaged.

    Args:
        weight: w, one per model.
        density: mean probability to stay.
        epsilon: half the width of the window of probabilities.
        election: by the sum of the values, or by the number of models with the sign (mergekit's ``sum`` and ``count``).
        normalize: divide by the weights of the models that agree, element by element.
        rescale: divide by the probability to stay.
        scale: factor of the merged task vector, the paper's lambda.
    """
    drop = magnitude_dropper(group, density, epsilon, rescale)
    return sparsify_and_elect(drop, weight, weight, election, normalize, scale)


def magnitude_dropper(
    group: TensorGroup, density: Sequence[float], epsilon: Sequence[float], rescale: bool
) -> Callable[[Block], None]:
    """Returns the function that drops and rescales elements of each model's rows, in place (MAGPRUNE)."""
    levels = [rank_levels(group.columns, share, width) for share, width in zip(density, epsilon, strict=True)]
    factors = [
        np.where(kept > 0, LEVELS / np.maximum(kept, 1) if rescale else 1.0, 0.0).astype(np.float32) for kept in levels
    ]
    # An element stays where the random number is not above this.
    limits = [np.maximum(kept - 1, 0).astype(np.uint16) for kept in levels]

    def drop(block: Block) -> None:
        for model, values in enumerate(block.values):
            if levels[model].min() == LEVELS:
                continue
            order = magnitude_order(values)
            # Random numbers are drawn for the ranks, where the probabilities are those of the columns of one row.
            stays = group.random_levels(model, block) <= limits[model]
            by_rank = torch.from_numpy(stays * factors[model])
            values.mul_(torch.empty_like(values).scatter_(1, order, by_rank))

    return drop


def rank_levels(columns: int, density: float, epsilon: float) -> np.ndarray:
    """Returns how many of the 65536 random numbers keep the element of each rank, int64, from the smallest on."""
    width = min(epsilon, density, 1 - density)
    share = density + width * (2 * np.arange(columns) + 1 - columns) / max(columns, 1)
    if width == 0:
        return np.full(columns, kept_levels(density))
    return np.clip(np.rint(share * LEVELS).astype(np.int64), 1, LEVELS)


def magnitude_order(values: Tensor) -> Tensor:
    """Returns the columns of each row from the smallest magnitude to the largest, equals in their order.

    Args:
        values: float32 [rows, columns].

    Returns:
        int64 [rows, columns].
    """
    # A float64 of these bits, the magnitude above and the column below, sorts as the magnitude does and equals by their
    # column: a plain sort takes half the time of argsort, and gives the same order on every machine.
    keys = np.empty(values.shape, dtype=np.uint64)
    halves = keys.view(np.uint32).reshape(*values.shape, 2)
    halves[..., 1] = values.abs().numpy().view(np.uint32)
    halves[..., 0] = np.arange(values.shape[1], dtype=np.uint32)
    keys.view(np.float64).sort(axis=1)
    keys &= np.uint64(0xFFFFFFFF)
    return torch.from_numpy(keys.view(np.int64))
