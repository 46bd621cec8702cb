"""A model whose rows of tokens stand in the order of another vocabulary, read as if they were stored so."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from posttrain.merge.sources import HEAD, SourceView, WeightSource, block_rows, embedding_of, is_embedding

# Besides the embedding, the tensors with a row per token, by the names that the families have for them.
_HEADS = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.(?:weight|bias)$|^output\.weight$")


class VocabularyView(SourceView):
    """A model whose rows of tokens stand in another order.

    Args:
        source: the model.
        rows: int64, for each row of the result the model's own, or -1.
        donors: models with their maps: a row that is -1 is the first one's, or else the average of the others that
            have it.
    """

    def __init__(
        self, source: WeightSource, rows: np.ndarray, donors: Sequence[tuple[WeightSource, np.ndarray]]
    ) -> None:
        super().__init__(source)
        self._rows, self._donors = rows, donors
        self._is_whole = bool((rows >= 0).all())
        self._shapes = {
            name: (len(rows), *shape[1:]) if is_by_token(name) else shape for name, shape in source.shapes().items()
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, tensor: str) -> torch.dtype:
        # What other models add is rounded once, with the result.
        own_rows = self._is_whole or not is_by_token(tensor)
        return self._source.dtype(tensor) if own_rows else torch.float32

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        if not is_by_token(tensor):
            self._source.read(tensor, start, out)
            return
        shape = self._source.shapes()[tensor]
        columns = shape[-1] if len(shape) > 1 else 1
        first, result = start // columns, out.view(-1, columns)
        # Block by block, however much is read at once: an adapter's last bits depend on how many rows are read.
        step = block_rows(columns)
        for begin in range(0, len(result), step):
            part = result[begin : begin + step]
            self._fill(tensor, first + begin, part)

    def _fill(self, tensor: str, start: int, out: Tensor) -> None:
        span = slice(start, start + len(out))
        own = self._rows[span]
        read_rows(self._source, tensor, own, out)
        missing = own < 0
        if not missing.any():
            return
        template, *others = [(source, rows[span]) for source, rows in self._donors]
        template_rows = np.where(missing, template[1], -1)
        read_rows(template[0], _own_name(template[0], tensor), template_rows, out)
        orphans = missing & (template_rows < 0)
        if not orphans.any():
            return
        total = torch.zeros(len(out), out.shape[1])
        counts = np.zeros(len(out), np.int64)
        for source, rows in others:
            own_rows = np.where(orphans, rows, -1)
            addend = torch.zeros_like(total)
            read_rows(source, _own_name(source, tensor), own_rows, addend)
            total += addend
            counts += own_rows >= 0
        at = torch.from_numpy(np.flatnonzero(orphans))
        out[at] = (total[at] / torch.from_numpy(counts)[at, None]).to(out.dtype)


def read_rows(source: WeightSource, tensor: str, rows: np.ndarray, out: Tensor) -> None:
    """Reads a model's rows into those of ``out`` that are not -1."""
    dtype = source.dtype(tensor)
    for begin, end in _runs(rows):
        target = out[begin:end]
        start = int(rows[begin]) * out.shape[1]
        if dtype == out.dtype:
            source.read(tensor, start, target.reshape(-1))
        else:
            stored = torch.empty(target.numel(), dtype=dtype)
            source.read(tensor, start, stored)
            target.copy_(stored.view_as(target))


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the ends of the stretches whose numbers ascend one by one, without those of -1."""
    breaks = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] < 0) | (rows[:-1] < 0)) + 1
    ends = [0, *breaks.tolist(), len(rows)]
    for begin, end in pairwise(ends):
        if end > begin and rows[begin] >= 0:
            yield begin, end


def is_by_token(name: str) -> bool:
    """Returns whether a tensor has a row per token, as embedding and output head have, by its name."""
    return is_embedding(name) or bool(_HEADS.search(name))


def _own_name(source: WeightSource, tensor: str) -> str:
    # A model with tied embeddings stores no head of its own.
    return embedding_of(source.shapes()) or tensor if tensor == HEAD and HEAD not in source.shapes() else tensor
