"""Averages layers and attention heads by how much each model needs them, and keeps high layers of one model."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.decoder_axes import ATTENDED, KEYS, QUERIES, VALUES, attention_heads, axes_of
from posttrain.merge.methods.base import PerHead, PerModel, Range, merge_method
from posttrain.merge.methods.linear import combine
from posttrain.merge.sources import layer_of
from posttrain.merge.tensor_group import Block, BlockFunction, TensorGroup
from posttrain.store.errors import UserError


@merge_method(
    "by_importance",
    models=(2, None),
    ranges={"weight": Range(0), "importance": Range(0), "layer_boundary": Range(0, 1)},
    needs=("weight", "importance"),
)
def by_importance(
    group: TensorGroup,
    *,
    weight: PerModel = (1.0,),
    importance: PerHead | None = None,
    heads: Literal["average", "choose"] = "average",
    layer_boundary: float = 1.0,
) -> BlockFunction:
    """Averages layers and attention heads by their importance, and keeps high layers of the model that needs them most.

    In layers below the boundary the queries, keys and values of a head are rows, and its outputs columns, of four
    tensors: they are sum_i c_i theta_i with c_i = a_i / sum_i a_i, where a_i is the importance of the head in model
    i. Query heads that share a key and value head move together, as none means anything without its keys: their a_i is
    the sum of theirs. All other tensors have c_i = w_i / sum_i w_i. From the boundary on, a layer is that of the model
    with the largest w_i. Where all importances are zero, the models count alike.

    ``posttrain merge --method by_importance --data FILE`` measures w and a (`posttrain.models.importance`) and writes
    them into the recipe as rules for each layer.

    Args:
        weight: w, one per model; in a rule for a layer, the layer's importance.
        importance: for each model a list of a, one per query head; in a rule for a layer. Without, heads count as the
            layer does.
        heads: average, or choose the heads of the model in which they are the most important, the first of equals.
        layer_boundary: share of the layers, from the first on, that are averaged; 1 averages all.

    Raises:
        UserError: a list of importances has not one number per query head.
    """
    layer = layer_of(group.name)
    if layer is not None and layer_boundary < 1 and layer >= layer_boundary * int(group.config["num_hidden_layers"]):
        return combine(_largest(np.array(weight)).tolist())
    shared = _shares(np.array(weight))
    axes = axes_of(group.name) or ()
    axis = next((axis for axis in axes if axis in (QUERIES, KEYS, VALUES, ATTENDED)), None)
    if importance is None or axis is None:
        return combine(shared.tolist())
    own = attention_heads(group.config)
    if own is None or any(len(numbers) != own.heads for numbers in importance):
        lengths = sorted({len(numbers) for numbers in importance})
        what = f"has {lengths} numbers per model and the model {own.heads if own else 'unknown'} query heads"
        raise UserError(what, where=f"importance of {group.name}", fix="give one per query head")
    # [models, kv heads]
    sums = np.array(importance).reshape(group.models, own.kv_heads, own.shared).sum(2)
    by_group = np.stack([_largest(column) if heads == "choose" else _shares(column) for column in sums.T], axis=1)
    width = own.size * (own.shared if axis in (QUERIES, ATTENDED) else 1)
    coefficients = torch.from_numpy(by_group.repeat(width, axis=1)).float()
    by_row = len(axes) == 2 and axis != ATTENDED  # a bias is one row

    def merge(block: Block) -> Tensor:
        rows = block.values.shape[1]
        factors = coefficients[:, block.start : block.start + rows, None] if by_row else coefficients[:, None]
        return torch.sum(block.values.mul_(factors), dim=0)

    return merge


def _shares(importance: np.ndarray) -> np.ndarray:
    """Returns the shares of the sum; equal ones if it is zero."""
    total = importance.sum()
    return importance / total if total > 0 else np.full(len(importance), 1 / len(importance))


def _largest(importance: np.ndarray) -> np.ndarray:
    """Returns 1 for the largest, the first of equals, and 0 for the others."""
    chosen = np.zeros(len(importance))
    chosen[importance.argmax()] = 1
    return chosen
