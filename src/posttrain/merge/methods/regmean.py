"""RegMean: linear layers that give what each model's layer gives on its inputs, by least squares."""

from functools import cache

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
    is not a linear layer, as norms, biases and embeddings, becomes the weighted mean, as in the paper; so does what an
    input that is always zero is multiplied by. A model with more tokens of data counts more.

    It is computed as M + sum_i (W_i - M) G_i (sum_j G_j)^-1, M being the weighted mean: identical models give
    themselves, to the last bit. A layer with n inputs takes 4 n^2 bytes for each model and 32 n^2 more while it is
    merged, in each thread, beside ``--memory``.

    Args:
        weight: w, one per model.
        alpha: factor of the off-diagonal elements; with 0 inputs count as uncorrelated, and 1 counts as 1 - 1e-6.

    Raises:
        UserError: the weights add up to zero, or an ``alpha`` of about 1 leaves no unique solution.
    """
    shares = normalized(weight)
    if not group.has_input_grams:
        return combine(shares)
    transforms = cache(lambda: _transforms(group, shares, min(alpha, _MOST_ALPHA)))

    def merge(block: Block) -> Tensor:
        mean = combine_values(block.values, shares)
        block.values.sub_(mean)
        result = mean.clone()
        for values, transform in zip(block.values, transforms(), strict=True):
            result.addmm_(values, transform)
        return result

    return merge


def _transforms(group: TensorGroup, shares: list[float], alpha: float) -> list[Tensor]:
    """Returns w_i G_i (sum_j w_j G_j)^-1 of each model, float32 [inputs, inputs]."""
    total: Tensor | None = None
    for gram, share in zip(group.input_grams(), shares, strict=True):
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
    for share, gram in zip(shares[:-1], group.input_grams(), strict=False):
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
