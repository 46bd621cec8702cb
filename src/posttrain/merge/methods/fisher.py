"""Fisher-weighted averaging: each weight counts by how much its model's likelihood depends on it."""

import torch
from torch import Tensor

from posttrain.merge.methods.base import PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine_values, normalized
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup

_SMALLEST = torch.finfo(torch.float32).tiny


@merge_method("fisher", ranges={"weight": Range(0), "floor": Range(0)}, statistic="fisher")
def fisher(
    group: TensorGroup, *, weight: PerModel = (1.0,), floor: float = 0.0, normalize: bool = False
) -> BlockFunction:
    """Averages weights by their Fisher information: sum_i w_i F_i theta_i / sum_i w_i F_i (Matena and Raffel 2022).

    F_i is the diagonal of model i's Fisher information on its own data (`posttrain.merge.statistics`), element by
    element (arXiv:2111.09832, equation 4). This is the mode of the product of the models' posteriors, each approximated
    by a Gaussian with that precision. Where no model has information, it is the weighted mean, also of tensors that are
    no parameters of the model.

    As the equation has it, a model whose answers are longer or less likely has larger gradients, and counts more: it
    may be all that is left of a merge. ``normalize`` divides F_i by its trace, the model's Fisher norm. The paper's
    program divides by the L2 norm, which a few large elements decide.

    Args:
        weight: w, one per model.
        floor: least F of an element, so that a model without information on an element still counts there. Squared
            gradients of one of a language model's weights are far below 1.
        normalize: whether all models count alike over all their tensors.

    Raises:
        UserError: the weights add up to zero.
    """
    shares = normalized(weight)
    factors = shares
    if normalize and group.fisher_norms:
        # Relative to the least norm: information over its trace may be too small for float32.
        least = min((norm for norm in group.fisher_norms if norm > 0), default=1.0)
        factors = [share * least / max(norm, least) for share, norm in zip(shares, group.fisher_norms, strict=True)]

    def merge(block: Block) -> Tensor:
        if block.fisher is None:
            return combine_values(block.values, shares, out=block.values[0])
        information = block.fisher.clamp_(min=floor)
        for values, factor in zip(information, factors, strict=True):
            values.mul_(factor)
        total = information.sum(0)
        mean = combine_values(block.values, shares)
        # Divided first: the products of small information and small weights would be zero.
        difference = torch.zeros_like(mean)
        for values, part in zip(block.values, information, strict=True):
            difference.addcmul_(values.sub_(mean), part.div_(total))
        # Numbers below are rounded so much that their ratio means nothing.
        return torch.where(total < _SMALLEST, mean, difference.add_(mean))

    return merge
