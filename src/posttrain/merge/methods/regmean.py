"""RegMean: linear layers that give what each model's layer gives on its inputs, by least squares."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine, combine_values, normalized
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup
from posttrain.store.errors import UserError

# Off-diagonals are scaled by no more: it keeps the sum of the Gram matrices, which files hold in float32, invertible.
_MOST_ALPHA = 1 - 1e-6


@merge_method("regmean", ranges={"weight": Range(0), "alpha": Range(0, 1)}, statistic="gram", accelerated=True)
def regmean(group: TensorGroup, *, weight: PerModel = (1.0,), alpha: float = 0.9) -> BlockFunction:
    """Minimises sum_i w_i |X_i W - X_i W_i|^2 for each linear layer (RegMean, Jin et al. 2023).

    In closed form W = (sum_i w_i G_i)^-1 sum_i w_i G_i W_i with G_i = X_i^T X_i of the layer's inputs X_i on model i's
    data (arXiv:2212.09849, equation 2), whose off-diagonal elements are first scaled by ``alpha`` (section 4.2). What
    is no linear layer, as norms, biases and embeddings, becomes the weighted mean, as in the paper; so does what an
    input that is always zero is multiplied by. A model with more tokens of data counts more.

    An expert of a mixture is a layer whose inputs are the tokens that are routed to it, also where all experts are one
    tensor. Of a matrix [inputs, outputs], as GPT-2's, the merged tensor is held as a whole.

    It is computed as M + sum_i (W_i - M) G_i (sum_j G_j)^-1, M being the weighted mean: identical models give
    themselves, to the last bit. A layer with n inputs takes 4 n^2 bytes for each model and 32 n^2 more while it is
    merged, in each thread, beside ``--memory``.

    Args:
        weight: w, one a model.
        alpha: factor of the off-diagonal elements; with 0 inputs count as uncorrelated, and 1 counts as 1 - 1e-6.

    Raises:
        UserError: the weights add up to zero, or an ``alpha`` of about 1 leaves no unique solution.
    """
    shares = normalized(weight)
    if not group.experts:
        return combine(shares)

    # Blocks come in the order of the rows, so that the transforms of one expert are held.
    @lru_cache(maxsize=1)
    def transforms(expert: int) -> list[Tensor]:
        return _transforms(group, shares, min(alpha, _MOST_ALPHA), expert)

    if group.inputs_first:
        whole = _inputs_first(group, shares, transforms)
        return lambda block: whole[block.start : block.start + block.values.shape[1]]

    def merge(block: Block) -> Tensor:
        mean = combine_values(block.values, shares)
        block.values.sub_(mean)
        result = mean.clone()
        for expert, _, rows in _expert_rows(group, block):
            for values, transform in zip(block.values, transforms(expert), strict=True):
                result[rows].addmm_(values[rows], transform)
        return result

    return merge


def _inputs_first(group: TensorGroup, shares: list[float], transforms: Callable[[int], list[Tensor]]) -> Tensor:
    """Returns the merged tensor, float32 [rows, columns]: its rows are inputs, so that each depends on all of them."""
    whole = torch.zeros(group.rows, group.columns, device=group.device)
    height = group.rows // group.experts
    group.hold()
    for block in group.blocks():
        mean = combine_values(block.values, shares)
        whole[block.start : block.start + len(mean)].add_(mean)
        block.values.sub_(mean)
        for expert, inputs, rows in _expert_rows(group, block):
            result = whole[expert * height : (expert + 1) * height]
            for values, transform in zip(block.values, transforms(expert), strict=True):
                result.addmm_(transform[inputs].T, values[rows])
    return whole


def _expert_rows(group: TensorGroup, block: Block) -> Iterator[tuple[int, slice, slice]]:
    """Yields the experts of whose matrices a block has rows, with the rows' numbers in the matrix and in the block."""
    height = group.rows // group.experts
    row, stop = block.start, block.start + block.values.shape[1]
    while row < stop:
        expert = row // height
        end = min((expert + 1) * height, stop)
        first = expert * height
        yield expert, slice(row - first, end - first), slice(row - block.start, end - block.start)
        row = end


def _transforms(group: TensorGroup, shares: list[float], alpha: float, expert: int) -> list[Tensor]:
    """Returns w_i G_i (sum_j w_j G_j)^-1 of each model, float32 [inputs, inputs]."""
    total: Tensor | None = None
    for gram, share in zip(group.input_grams(expert), shares, strict=True):
        part = _shrunk(gram, alpha).mul_(share)
        total = part if total is None else total.add_(part)
    assert total is not None, "there is a model"
    # An input that is always zero has a row of zeros: any number on the diagonal gives it the transform 0.
    diagonal = total.diagonal()
    rest = torch.diag((diagonal != 0).double())
    diagonal[diagonal == 0] = 1
    factor, failed = torch.linalg.cholesky_ex(total)
    if failed:
        raise UserError(
            f"the inputs of {group.name} depend on each other too much to be told apart", where="alpha", fix="lower it"
        )
    transforms = []
    for share, gram in zip(shares[:-1], group.input_grams(expert), strict=False):
        # Transposed, as both matrices are symmetric: (A^-1 G)^T = G A^-1.
        part = torch.cholesky_solve(_shrunk(gram, alpha).mul_(share), factor).T
        rest.sub_(part)
        transforms.append(part.float().contiguous())
    # They add up to the identity, so that the last one costs no solution.
    return [*transforms, rest.float()]


def _shrunk(gram: Tensor, alpha: float) -> Tensor:
    diagonal = gram.diagonal().clone()
    gram.mul_(alpha).diagonal().copy_(diagonal)
    return gram
