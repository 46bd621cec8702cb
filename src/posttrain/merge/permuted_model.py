"""A model with its hidden units in another order, read as if it were stored so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.decoder_axes import (
    ATTENDED,
    INNER,
    KEYS,
    QUERIES,
    RESIDUAL,
    VALUES,
    AttentionHeads,
    axes_of,
)
from posttrain.merge.sources import SourceView, WeightSource, layer_of
from posttrain.merge.vocabulary_view import read_rows


@dataclass(frozen=True)
class AttentionOrder:
    """The order of one layer's heads.

    Attributes:
        groups: int64 [kv heads], the model's own key and value head at each place.
        heads: int64 [heads], its own query head at each place, of the group that stands there.
        channels: int64 [kv heads, head size], the order of the channels inside the values of the group at each place,
            and inside the outputs of its heads. Those of queries and keys stay, as rotary embeddings number them.
    """

    groups: np.ndarray
    heads: np.ndarray
    channels: np.ndarray

    @classmethod
    def unchanged(cls, heads: AttentionHeads) -> "AttentionOrder":
        """Returns the order that changes nothing."""
        channels = np.tile(np.arange(heads.size), (heads.kv_heads, 1))
        return cls(np.arange(heads.kv_heads), np.arange(heads.heads), channels)


@dataclass(frozen=True)
class UnitOrder:
    """The order of all units of a decoder: element i of the result is element ``order[i]`` of the model.

    Every order is exact: the model computes the same function, but for the order in which sums are rounded.

    Attributes:
        residual: int64 [hidden size], of the residual stream's channels: one order for all tensors that read or write
            it, the norms too.
        inner: by layer, int64 [intermediate size], of the feed-forward block's units.
        attention: by layer.
    """

    residual: np.ndarray
    inner: Sequence[np.ndarray]
    attention: Sequence[AttentionOrder]

    def index(self, axis: str, layer: int | None) -> np.ndarray | None:
        """Returns the order of an axis in a layer; None if it stays as it is."""
        if axis == RESIDUAL:
            return self.residual
        if layer is None:
            return None
        if axis == INNER:
            return self.inner[layer]
        order = self.attention[layer]
        size = order.channels.shape[1]
        unchanged = np.arange(size)[None]
        # Where each head stands, and the order of the channels inside it.
        stretches = {
            QUERIES: (order.heads, unchanged),
            KEYS: (order.groups, unchanged),
            VALUES: (order.groups, order.channels),
            ATTENDED: (order.heads, np.repeat(order.channels, len(order.heads) // len(order.groups), axis=0)),
        }
        if axis not in stretches:
            return None
        slots, channels = stretches[axis]
        index: np.ndarray = (slots[:, None] * size + channels).ravel()
        return index


class PermutedModel(SourceView):
    """A Llama-like decoder with its units in another order; see `UnitOrder`.

    Args:
        source: the model.
        order: of its units.
    """

    def __init__(self, source: WeightSource, order: UnitOrder) -> None:
        super().__init__(source)
        self._order = order
        self._shapes = dict(source.shapes())
        self._indices = {name: self._index(name) for name in self._shapes}

    def _index(self, tensor: str) -> tuple[np.ndarray | None, Tensor | None]:
        """Returns the order of the rows and of the columns; a vector is one row."""
        axes, layer = axes_of(tensor) or (), layer_of(tensor)
        indices = [_unless_unchanged(self._order.index(axis, layer)) for axis in axes]
        rows = indices[0] if len(indices) == 2 else None
        columns = indices[-1] if indices else None
        return rows, None if columns is None else torch.from_numpy(columns)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        rows, columns = self._indices[tensor]
        width = self._shapes[tensor][-1]
        if rows is None:
            self._source.read(tensor, start, out)
        else:
            first = start // width
            read_rows(self._source, tensor, rows[first : first + out.numel() // width], out.view(-1, width))
        if columns is not None:
            matrix = out.view(-1, width)
            matrix.copy_(matrix[:, columns])


def _unless_unchanged(index: np.ndarray | None) -> np.ndarray | None:
    return None if index is None or (index == np.arange(len(index))).all() else index
