"""Linear combinations with given coefficients: weighted averages, task arithmetic, and one model as it is."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from posttrain.merge.methods.base import FLOAT32_MAX, PerModel, merge_method
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup
from posttrain.store.errors import UserError


@merge_method("linear", accelerated=True)
def linear(group: TensorGroup, *, weight: PerModel = (1.0,), normalize: bool = True) -> BlockFunction:
    """Averages the weights: sum_i w_i theta_i / sum_i w_i (model soups, Wortsman et al. 2022).

    Args:
        weight: w, one per model.
        normalize: divide by the sum of w; without, the plain sum.

    Raises:
        UserError: the weights to be normalised add up to zero.
    """
    return combine(normalized(weight) if normalize else weight)


@merge_method("task_arithmetic", task_vectors=True)
def task_arithmetic(
    group: TensorGroup, *, weight: PerModel = (1.0,), normalize: bool = False, scale: float = 1.0
) -> BlockFunction:
    """Adds task vectors: theta_0 + scale sum_i w_i (theta_i - theta_0) (Ilharco et al. 2023).

    A negative weight forgets a task; weights 1, 1 and -1 form an analogy.

    Args:
        weight: w, one per model.
        normalize: divide the sum by the sum of w.
        scale: factor of the merged task vector.
    """
    coefficients = normalized(weight) if normalize else weight
    return combine([scale * coefficient for coefficient in coefficients])


@merge_method("passthrough", models=(1, 1))
def passthrough(group: TensorGroup, *, scale: PerModel = (1.0,)) -> BlockFunction:
    """Takes one model's weights times ``scale``; slices of several models stack their layers (depth up-scaling).

    Args:
        scale: factor of the weights; 0 of an output projection leaves out what its layer adds.
    """
    return combine(scale)


def combine(coefficients: Sequence[float]) -> BlockFunction:
    """Returns the function sum_i c_i x_i of a block, summed in float32 in the order of the models."""
    return lambda block: combine_values(block.values, coefficients, out=block.values[0])


def sparsify_and_add(sparsify: Callable[[Block], None], coefficients: Sequence[float]) -> BlockFunction:
    """Returns the function that drops elements of a block's task vectors, in place, and adds what is left.

    Args:
        sparsify: sets elements to zero, and may rescale the others.
        coefficients: one per model.
    """
    add = combine(coefficients)

    def merge(block: Block) -> Tensor:
        sparsify(block)
        return add(block)

    return merge


def combine_values(values: Tensor, coefficients: Sequence[float], out: Tensor | None = None) -> Tensor:
    """Returns sum_i c_i x_i, summed in float32 in the order of the models.

    Args:
        values: float32 [models, rows, columns].
        coefficients: c, one per model.
        out: receives the sum; may be the first model's values.

    Raises:
        UserError: a coefficient, such as a weight times a scale, is beyond float32.
    """
    if not all(abs(coefficient) <= FLOAT32_MAX for coefficient in coefficients):
        what = "a model's weight is beyond float32's numbers"
        raise UserError(what, where="the result", fix="choose smaller weights, or check the models' numbers")
    total = torch.mul(values[0], coefficients[0], out=out)
    for value, coefficient in zip(values[1:], coefficients[1:], strict=True):
        torch.add(total, value, alpha=coefficient, out=total)
    return total


def normalized(weight: Sequence[float], option: str = "weight") -> list[float]:
    """Returns the weights divided by their sum.

    Args:
        weight: one per model.
        option: the option that holds them, for the error.

    Raises:
        UserError: the sum is zero.
    """
    total = sum(weight)
    if abs(total) < 1e-8 * max(map(abs, weight), default=0.0) or total == 0:
        fix = "change them, or set normalize: false" if option == "weight" else "change them"
        raise UserError("the weights add up to zero", where=option, fix=fix)
    return [value / total for value in weight]
