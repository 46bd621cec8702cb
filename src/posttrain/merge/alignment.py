"""Aligns the hidden units of models of different initialisation by their weights (git re-basin)."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.decoder_axes import RESIDUAL, VOCABULARY, AttentionHeads, axes_of, check_axes
from posttrain.merge.engine import one_thread_each
from posttrain.merge.permuted_model import AttentionOrder, PermutedModel, UnitOrder
from posttrain.merge.sources import WeightSource, layer_of
from posttrain.store.progress import progress_bar

log = logging.getLogger("posttrain")

Result = TypeVar("Result")

Key = tuple[str, str | None]
"""A model and its adapter, as the recipe names them."""

_SWEEPS = 50

_ROWS = 4096  # of an embedding at a time

_LEAST_GAIN = 1e-6  # by the similarity: less is rounding, and two orders of equal units would take turns


@dataclass(frozen=True)
class Alignment:
    """The order in which a model's units are nearest to another model's.

    Attributes:
        order: of the model's units.
        before, after: distance between the models' weights, before and after.
    """

    order: UnitOrder
    before: float
    after: float


class AlignedModel(PermutedModel):
    """A model whose units stand in the order of another model's."""

    def __init__(self, source: WeightSource, alignment: Alignment) -> None:
        super().__init__(source, alignment.order)
        self.alignment = alignment


def align_models(
    sources: Mapping[tuple[str, str | None], WeightSource],
    reference: tuple[str, str | None],
    threads: int | None = None,
) -> dict[tuple[str, str | None], WeightSource]:
    """Returns the models with the units of all in the order of the reference's.

    Each is aligned with the reference alone; the paper's MergeMany aligns each with the average of the others.

    Args:
        sources: the models.
        reference: the key of the model that stays as it is.
        threads: that match layers side by side; one per core by default.

    Raises:
        UserError: a model is not a Llama-like decoder.
    """
    for source in sources.values():
        check_axes(source, "leave out the alignment, or let the models answer together, as an ensemble")
    aligned = dict(sources)
    for key, source in sources.items():
        if key == reference:
            continue
        alignment = match_weights(sources[reference], source, threads)
        names = source.name, sources[reference].name
        if alignment.after < alignment.before:
            log.info("%s is aligned with %s: distance %.4g, before %.4g", *names, alignment.after, alignment.before)
        else:
            log.info("%s stays as it is: no other order is nearer to %s", *names)
        aligned[key] = AlignedModel(source, alignment)
    return aligned


def match_weights(reference: WeightSource, model: WeightSource, threads: int | None = None) -> Alignment:
    """Finds the order of a model's units in which its weights are nearest to the reference's.

    Ainsworth, Hayase and Srinivasa 2023 (arXiv:2209.04836), algorithm 1, weight matching by coordinate descent:
    of the orders of one kind of units, the others being fixed, it takes the one with the largest inner product between
    both models' weights, a linear assignment problem. The kinds: the channels of the residual stream, in one order for
    all tensors that read or write it; each layer's feed-forward units; its groups of a key and value head and the
    query heads that read it; the query heads inside a group; and the channels of values inside a head. Channels of
    queries and keys stay, as rotary embeddings number them. The first order of the residual stream is the one by
    embedding, head and final norm alone, whose other axis is known.

    Orders of a layer's units depend on no other layer's once the residual stream's is fixed, so that all layers are
    matched side by side, where the paper goes through them in random order: the result needs no seed. The search ends
    in a local optimum; if that is not nearer than the model as it is, nothing is moved.

    It holds one layer of both models a thread in float32, and the square of the largest number of units in float64.

    Args:
        reference: the model that stays as it is.
        model: one of the same sizes.
        threads: that match layers side by side; one per core by default. Nothing depends on their number.
    """
    heads = check_axes(reference, "align models of Llama's kind alone")
    count = threads or len(os.sched_getaffinity(0))
    # One thread of torch each: the order of its sums depends on their number, and so the order of equal units.
    with one_thread_each(), ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        matcher = _Matcher(reference, model, heads, pool, count)
        unchanged = matcher.unchanged()
        before = matcher.distance(unchanged)
        order = matcher.search(unchanged)
        after = matcher.distance(order)
    if after >= before:
        return Alignment(unchanged, before, before)
    return Alignment(order, before, after)


class _Matcher:
    """Searches the order of one model's units."""

    def __init__(
        self, reference: WeightSource, model: WeightSource, heads: AttentionHeads, pool: ThreadPoolExecutor, window: int
    ) -> None:
        self._reference, self._model, self._heads = reference, model, heads
        self._pool, self._window = pool, window
        self._outside: list[str] = []
        self._tensors: dict[int, list[str]] = {}
        for name in reference.shapes():
            layer = layer_of(name)
            (self._outside if layer is None else self._tensors.setdefault(layer, [])).append(name)
        self._layers = len(self._tensors)

    def unchanged(self) -> UnitOrder:
        """Returns the order that changes nothing."""
        shapes = self._reference.shapes()
        inner = [np.arange(shapes[f"model.layers.{layer}.mlp.down_proj.weight"][1]) for layer in range(self._layers)]
        attention = [AttentionOrder.unchanged(self._heads)] * self._layers
        return UnitOrder(np.arange(self._reference.config["hidden_size"]), inner, attention)

    def search(self, start: UnitOrder) -> UnitOrder:
        """Returns the order after passes over all layers until nothing changes."""
        order = UnitOrder(_assign(self._outside_similarity), start.inner, start.attention)
        with progress_bar(f"aligning {self._model.name}", _SWEEPS, "sweeps at most") as advance:
            for _ in range(_SWEEPS):
                layers = self._each_layer(partial(self._match_layer, order))
                order = UnitOrder(order.residual, [inner for inner, _ in layers], [heads for _, heads in layers])
                residual, better = _improved(self._residual_similarity(order), order.residual)
                order = UnitOrder(residual, order.inner, order.attention)
                advance(1)
                if not better:
                    break  # with the same residual stream each layer's orders would be the same again
        return order

    def distance(self, order: UnitOrder) -> float:
        """Returns the norm of the difference of all weights."""
        permuted = PermutedModel(self._model, order)

        def squares(names: list[str]) -> float:
            total = 0.0
            for name in names:
                for start, stop in self._spans(name):
                    difference = _read(self._reference, name, start, stop) - _read(permuted, name, start, stop)
                    total += float(difference.double().square().sum())
            return total

        parts = self._each_layer(lambda layer: squares(self._tensors[layer]))
        return math.sqrt(math.fsum([squares(self._outside), *parts]))

    def _each_layer(self, function: Callable[[int], Result]) -> list[Result]:
        return list(self._pool.map(function, sorted(self._tensors)))

    def _spans(self, name: str) -> list[tuple[int, int]]:
        """Returns the rows to read at once: an embedding in parts, all else as a whole."""
        shape = self._reference.shapes()[name]
        rows = shape[0] if len(shape) == 2 else 1
        step = _ROWS if axes_of(name)[0] == VOCABULARY else rows  # type: ignore[index]
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    @cached_property
    def _outside_similarity(self) -> np.ndarray:
        """The inner products of the residual stream's channels in the tensors outside of the layers."""
        size = self._reference.config["hidden_size"]
        total = torch.zeros(size, size, dtype=torch.float64)
        for name in self._outside:
            for start, stop in self._spans(name):
                first = _read(self._reference, name, start, stop)
                total += first.T @ _read(self._model, name, start, stop)
        return total.numpy()

    def _residual_similarity(self, order: UnitOrder) -> np.ndarray:
        """Returns the inner products of the residual stream's channels, the other units in the given order."""
        total = self._outside_similarity.copy()
        layers = sorted(self._tensors)
        # In the layers' order, as the sums' last bits depend on it; few at once, as each is as wide as the model.
        for start in range(0, len(layers), self._window):
            for part in self._pool.map(partial(self._layer_similarity, order), layers[start : start + self._window]):
                total += part
        return total

    def _layer_similarity(self, order: UnitOrder, layer: int) -> np.ndarray:
        size = self._reference.config["hidden_size"]
        total = torch.zeros(size, size)
        for name in self._tensors[layer]:
            axes = axes_of(name)
            assert axes is not None
            if RESIDUAL not in axes:
                continue
            first, second = _read(self._reference, name), _read(self._model, name)
            if axes[-1] == RESIDUAL:  # also a vector, which is one row
                rows = order.index(axes[0], layer) if len(axes) == 2 else None
                total += first.T @ (second if rows is None else second[torch.from_numpy(rows)])
            elif len(axes) == 2:
                columns = order.index(axes[1], layer)
                total += first @ (second if columns is None else second[:, torch.from_numpy(columns)]).T
        return total.double().numpy()

    def _match_layer(self, order: UnitOrder, layer: int) -> tuple[np.ndarray, AttentionOrder]:
        residual = torch.from_numpy(order.residual)
        inner, _ = _improved(self._inner_similarity(residual, layer), order.inner[layer])
        return inner, _HeadSimilarity.measure(self._pairs(layer, "self_attn", residual), self._heads).match()

    def _inner_similarity(self, residual: Tensor, layer: int) -> np.ndarray:
        pairs = self._pairs(layer, "mlp", residual)
        parts = [first @ second.T for name, (first, second) in pairs.items() if not name.startswith("down")]
        first, second = pairs["down_proj.weight"]
        return sum(parts, first.T @ second).double().numpy()

    def _pairs(self, layer: int, block: str, residual: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the tensors of a block of both models, with the residual stream in order; biases as columns."""
        pairs = {}
        for name in self._tensors[layer]:
            _, separator, short = name.partition(f".{block}.")
            axes = axes_of(name)
            if not separator or axes is None or axes == (RESIDUAL,):
                continue
            first, second = _read(self._reference, name), _read(self._model, name)
            if len(axes) == 1:
                first, second = first.T, second.T
            elif axes[0] == RESIDUAL:
                second = second[residual]
            else:
                second = second[:, residual]
            pairs[short] = first, second
        return pairs


@dataclass(frozen=True)
class _HeadSimilarity:
    """The inner products between the heads of one layer of two models.

    Attributes:
        queries: float64 [groups, heads of a group, groups, heads of a group].
        keys: float64 [groups, groups].
        values: float64 [groups, channels, groups, channels].
        outputs: float64 [groups, heads, channels, groups, heads, channels], of the output projection's columns.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    outputs: np.ndarray

    @classmethod
    def measure(cls, pairs: Mapping[str, tuple[Tensor, Tensor]], heads: AttentionHeads) -> "_HeadSimilarity":
        groups, shared, size = heads.kv_heads, heads.shared, heads.size

        def products(projection: str, rows: int) -> np.ndarray:
            """Returns the inner products of as many stretches of rows, biases with them."""
            total = torch.zeros(rows, rows)
            for tensor, (a, b) in pairs.items():
                if tensor.startswith(projection):
                    total += a.reshape(rows, -1) @ b.reshape(rows, -1).T
            return total.double().numpy()

        first, second = pairs["o_proj.weight"]
        return cls(
            products("q_proj", heads.heads).reshape(groups, shared, groups, shared),
            products("k_proj", groups),
            products("v_proj", groups * size).reshape(groups, size, groups, size),
            (first.T @ second).double().numpy().reshape(groups, shared, size, groups, shared, size),
        )

    def match(self) -> AttentionOrder:
        """Returns an order of large similarity: groups by what their best inner orders reach."""
        groups, shared, _, _ = self.queries.shape
        totals = np.empty((groups, groups))
        heads = np.empty((groups, groups, shared), np.int64)
        channels = np.empty((groups, groups, self.values.shape[1]), np.int64)
        for slot in range(groups):
            for group in range(groups):
                totals[slot, group], heads[slot, group], channels[slot, group] = self._match_group(slot, group)
        order = _assign(totals)
        slots = np.arange(groups)
        return AttentionOrder(order, (heads[slots, order] + order[:, None] * shared).ravel(), channels[slots, order])

    def _match_group(self, slot: int, group: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Matches the query heads of two groups and the channels of their values, in turns."""
        queries = self.queries[slot, :, group]
        heads, best = _assign(queries), (-math.inf, np.empty(0), np.empty(0))
        while True:
            similarity = self._channels(slot, group, heads)
            channels = _assign(similarity)
            # Output columns of each pair of heads, with the channels in this order.
            outputs = np.einsum("icjc->ij", self.outputs[slot, :, :, group][:, :, :, channels])
            own = np.arange(len(heads))
            total = self.keys[slot, group] + queries[own, heads].sum() + similarity[:, channels].trace()
            if total <= best[0] + _LEAST_GAIN * abs(best[0] if math.isfinite(best[0]) else 0.0):
                return best
            best = float(total), heads, channels
            heads = _assign(queries + outputs)

    def _channels(self, slot: int, group: int, heads: np.ndarray) -> np.ndarray:
        """Returns the inner products of the channels of two groups' values and outputs, float64 [size, size]."""
        similarity = self.values[slot, :, group].copy()
        for own, head in enumerate(heads):
            similarity += self.outputs[slot, own, :, group, head]
        return similarity


def _assign(similarity: np.ndarray) -> np.ndarray:
    """Returns for each row the column of the assignment with the largest sum, int64 [rows]."""
    # Here, as its import takes a tenth of the start of every merge, and few align.
    from scipy.optimize import linear_sum_assignment

    columns: np.ndarray = linear_sum_assignment(similarity, maximize=True)[1]
    return columns


def _improved(similarity: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns the best order of units and True; or the present one and False, if that is as good."""
    best, own = _assign(similarity), np.arange(len(order))
    present = float(similarity[own, order].sum())
    if float(similarity[own, best].sum()) > present + _LEAST_GAIN * abs(present):
        return best, True
    return order, False


def _read(source: WeightSource, name: str, start: int = 0, stop: int | None = None) -> Tensor:
    """Returns rows of a tensor, float32 [rows, columns]; a vector is one row."""
    shape = source.shapes()[name]
    columns, rows = shape[-1], shape[0] if len(shape) == 2 else 1
    part = torch.empty(((stop or rows) - start) * columns, dtype=source.dtype(name))
    source.read(name, start * columns, part)
    return part.float().view(-1, columns)
