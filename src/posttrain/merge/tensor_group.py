"""One tensor of every model, read in blocks of rows, and the statistics that methods need of it as a whole."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.order_statistics import of_ranks, rank_of_share
from posttrain.merge.sources import block_rows
from posttrain.merge.tensor_reader import Arena, Digests, TensorInput, TensorReader
from posttrain.store.errors import UserError

_ACCELERATOR_BLOCK = 1 << 24  # elements; a processor's block would keep an accelerator waiting for Python
_PRODUCTS = 2048  # elements whose products are summed in float32


@dataclass(frozen=True)
class Block:
    """Rows of one tensor. Its memory is used again for the next block.

    Attributes:
        index: number of the block in its tensor.
        start: number of its first row.
        values: float32 [models, rows, columns], the weights, or the task vectors (weights minus base).
        base: float32 [rows, columns]; None without a base.
        fisher: float32 [models, rows, columns], the diagonal Fisher information of the weights, for methods with
            ``statistic="fisher"``; None if it is not known of this tensor.
    """

    index: int
    start: int
    values: Tensor
    base: Tensor | None
    fisher: Tensor | None = None


BlockFunction = Callable[[Block], Tensor]
"""Returns float32 [rows, columns]: the merged weights, or the task vector to add to the base. May change the block."""


class TensorGroup:
    """One tensor of every model.

    The weights are read once where they fit into the arena, and once for each pass where they do not.

    Args:
        name: the tensor's name in the result.
        inputs: one per model.
        base: the base model's, to have task vectors as the values.
        arena: the thread's memory; its device is where the blocks lie.
        seed: the recipe's.
        digests: receives the inputs' digests; None to take none.

    Attributes:
        shape: of the tensor.
        has_input_grams: whether it is a linear layer's weight, whose Gram matrices are known.
        rows, columns: of the tensor as a matrix, whose columns are the last dimension.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorInput],
        base: TensorInput | None,
        arena: Arena,
        seed: int = 0,
        digests: Digests | None = None,
        *,
        task_vectors: bool = False,
        fisher: Sequence[TensorInput] = (),
        fisher_norms: Sequence[float] = (),
        grams: Sequence[TensorInput] = (),
    ) -> None:
        self.name, self.seed = name, seed
        self._inputs = [*inputs, *([base] if base else []), *fisher]
        self.fisher_norms = tuple(fisher_norms)
        self._grams, self._with_fisher, self.has_input_grams = list(grams), bool(fisher), bool(grams)
        self._base, self._task_vectors, self._arena = base, task_vectors, arena
        self.models = len(inputs)
        self.shape = inputs[0].source.shapes()[inputs[0].tensor]
        self.columns = self.shape[-1] if self.shape else 1
        self.elements = math.prod(self.shape)
        self.rows = self.elements // self.columns if self.columns else 0
        self._block_rows = block_rows(self.columns) if self.columns else 1
        if arena.device is not None:
            self._block_rows = max(1, _ACCELERATOR_BLOCK // max(1, self.columns))
        self._reader = TensorReader(self._inputs, self.rows, self.columns, arena, digests)
        self._checked = False

    @property
    def device(self) -> torch.device | None:
        """Returns the accelerator on which the blocks lie; None on the processor."""
        return self._arena.device

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the first model's ``config.json``."""
        return self._inputs[0].source.config

    def gram(self) -> np.ndarray:
        """Returns the inner products of the models' values, float64 [models, models].

        The products of 2,048 elements are summed in float32, and those sums in float64, in their order.
        """
        self.hold()
        total = torch.zeros(self.models, self.models, dtype=torch.float64)
        for block in self.blocks():
            flat = block.values.flatten(1)
            split = flat.shape[1] // _PRODUCTS * _PRODUCTS
            # A float32 sum of a whole block is wrong in the sixth digit, and the norms more than the cosines.
            parts = flat[:, :split].view(self.models, -1, _PRODUCTS).transpose(0, 1)
            rest = flat[:, split:]
            total += torch.bmm(parts, parts.transpose(1, 2)).sum(0, dtype=torch.float64) + (rest @ rest.T).double()
        return total.numpy()

    def input_grams(self) -> Iterator[Tensor]:
        """Yields the Gram matrix X^T X of each model's inputs to this linear layer, float64 [inputs, inputs].

        None are yielded where the tensor is not a linear layer's. Each is read when it is asked for, as a whole: what a
        method holds of them counts as its own memory, not as the weights'.

        Raises:
            UserError: a matrix holds NaN or infinite numbers.
        """
        for entry in self._grams:
            width = entry.source.shapes()[entry.tensor][-1]
            stored = torch.empty(width * width, dtype=entry.source.dtype(entry.tensor))
            entry.source.read(entry.tensor, 0, stored)
            matrix = stored.to(self._arena.device).view(width, width).double()
            if not math.isfinite(float(matrix.sum())):
                raise UserError(
                    f"the Gram matrix of {entry.tensor} holds NaN or infinite numbers",
                    where=entry.source.name,
                    fix="use an undamaged model",
                )
            yield matrix

    def kth_largest(self, shares: Sequence[float]) -> list[float]:
        """Returns for each model the magnitude that the share of its values that are largest reaches.

        Args:
            shares: one per model; 0 gives infinity, and any more at least the largest value.
        """
        self.hold()
        ranks = [rank_of_share(share, self.elements) for share in shares]
        return of_ranks(self._magnitudes, ranks, self.elements)

    def _magnitudes(self, stride: int) -> Iterator[list[np.ndarray]]:
        """Yields every ``stride``-th absolute value of each model, float32 and flat, block by block; until the next."""
        resident = self._reader.resident
        if resident is not None and stride > 1:
            # Of what is in memory only the sample is converted.
            sample = torch.stack([stored[::stride].float() for stored in resident[: self.models]])
            if self._task_vectors and self._base:
                sample.sub_(resident[self.models][::stride].float())
            yield list(sample.abs_().numpy())
            return
        for block in self.blocks():
            flat = block.values.flatten(1)
            yield list((flat if stride == 1 else flat[:, ::stride].contiguous()).abs_().numpy())

    def generator(self, model: int, block: int) -> np.random.Generator:
        """Returns the random generator of one block of one model: the same whatever was drawn before."""
        seeds = [self.seed, zlib.crc32(self.name.encode()), model, block]
        return np.random.Generator(np.random.SFC64(seeds))

    def random_levels(self, model: int, block: Block) -> np.ndarray:
        """Returns random integers from 0 to 65535, uint16 [rows, columns], of one block of one model."""
        rows, columns = block.values.shape[1:]
        # Four of each 64 random bits: a third of the time of `bytes`, a tenth of that of floats.
        numbers = self.generator(model, block.index).bit_generator.random_raw(-(-rows * columns // 4))
        return numbers.view(np.uint16)[: rows * columns].reshape(rows, columns)

    def hold(self) -> None:
        """Reads the whole tensor of every model into memory, if it fits, for the passes that follow."""
        self._reader.hold()

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks in their order, each in the memory of the last.

        Raises:
            UserError: on the first pass, a value is NaN or infinite.
        """
        step = self._block_rows
        size = min(step, self.rows) * self.columns
        values = self._arena.take("values", self.models * size, torch.float32)
        base = self._arena.take("base", size, torch.float32) if self._base else None
        fisher = self._arena.take("fisher", self.models * size, torch.float32) if self._with_fisher else None
        index = 0
        for start, stop, stored in self._reader.chunks(step):
            for first in range(0, stop - start, step):
                rows = min(step, stop - start - first)
                span = slice(first * self.columns, (first + rows) * self.columns)
                block = values[: self.models * rows * self.columns].view(self.models, -1)
                part = None
                if base is not None:
                    part = base[: rows * self.columns].copy_(stored[self.models][span])
                for model in range(self.models):
                    block[model].copy_(stored[model][span])
                information = None
                if fisher is not None:
                    information = fisher[: self.models * rows * self.columns].view(self.models, -1)
                    for model in range(self.models):
                        information[model].copy_(stored[model - self.models][span])
                if not self._checked:
                    self._check_finite([block, part, information])
                if part is not None and self._task_vectors:
                    block.sub_(part)
                yield Block(
                    index,
                    start + first,
                    block.view(self.models, rows, self.columns),
                    None if part is None else part.view(rows, self.columns),
                    None if information is None else information.view(self.models, rows, self.columns),
                )
                index += 1
        self._checked = True

    def _check_finite(self, read: Sequence[Tensor | None]) -> None:
        # A sum carries every NaN and infinity, in a fraction of the time of looking for them.
        parts = [part for part in read if part is not None]
        if all(math.isfinite(float(part.sum())) for part in parts):
            return
        rows = [row for part in parts for row in part.view(-1, part.shape[-1])]
        for entry, numbers in zip(self._inputs, rows, strict=True):
            if not torch.isfinite(numbers).all():
                raise UserError(
                    f"tensor {entry.tensor} holds NaN or infinite numbers",
                    where=entry.source.file(entry.tensor),
                    fix="use an undamaged model",
                )
