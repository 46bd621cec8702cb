"""Reads one tensor of every model, by ranges of rows, into memory that is used again for each tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from posttrain.merge.sources import WeightSource

_READ_BYTES = 1 << 22  # of one model at a time, where a tensor is not held as a whole
_STAGE_BYTES = 1 << 26  # read at once on the way to an accelerator


@dataclass(frozen=True)
class TensorInput:
    """A tensor of one model."""

    source: WeightSource
    tensor: str


class Arena:
    """Memory of one thread that is used again for each tensor, as fresh memory costs more than reading into it.

    Args:
        limit: bytes of stored weights that it holds at most.
        device: where it lies, if tensors are merged by an accelerator; None for the processor's way.
    """

    def __init__(self, limit: int, device: torch.device | None = None) -> None:
        self.limit, self.device = limit, device
        self._memory: dict[str, Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Returns ``count`` uninitialised elements, in the memory that was last taken under this name."""
        return self._take(name, count, dtype, self.device, pinned=False)

    def take_host(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Returns elements in the processor's memory, from where they are copied to an accelerator, or back."""
        pinned = self.device is not None and self.device.type == "cuda"  # copied twice as fast
        return self._take(f"host {name}", count, dtype, None, pinned=pinned)

    def _take(self, name: str, count: int, dtype: torch.dtype, device: torch.device | None, *, pinned: bool) -> Tensor:
        size = count * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < size:
            self._memory.pop(name, None)  # before the larger one, so that never both are held
            memory = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._memory[name] = memory
        return memory[:size].view(dtype)


class Digests:
    """XXH3 (128 bits) of each input tensor's bytes, by source and tensor; taken when it is first read."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], str] = {}


class TensorReader:
    """The stored numbers of one tensor of every model.

    Args:
        inputs: one per model; all have the same shape.
        rows, columns: of the tensor as a matrix.
        arena: the thread's memory.
        digests: receives the inputs' digests on the first pass; None to take none.

    Attributes:
        resident: the whole tensor of every model, flat, once `hold` has read it; None if it does not fit.
    """

    def __init__(
        self, inputs: Sequence[TensorInput], rows: int, columns: int, arena: Arena, digests: Digests | None
    ) -> None:
        self._inputs, self._rows, self._columns = inputs, rows, columns
        self._arena, self._digests = arena, digests
        self.resident: list[Tensor] | None = None

    def hold(self) -> None:
        """Reads the whole tensor of every model into memory, if it fits, for the passes that follow."""
        size = sum(self._rows * self._columns * entry.source.dtype(entry.tensor).itemsize for entry in self._inputs)
        if self.resident is None and size <= self._arena.limit:
            self.resident = self._read(0, self._rows)

    def chunks(self, block_rows: int) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yields first row, row behind the last, and each model's numbers, flat; whole blocks of so many rows.

        They lie in the memory of the last ones.
        """
        if self.resident is not None or not self._rows:
            # Of an empty tensor the digest is that of no bytes.
            yield 0, self._rows, self.resident if self.resident is not None else self._read(0, 0)
            return
        width = self._columns * max(entry.source.dtype(entry.tensor).itemsize for entry in self._inputs)
        step = block_rows * max(1, _READ_BYTES // (block_rows * width))
        for start in range(0, self._rows, step):
            stop = min(start + step, self._rows)
            yield start, stop, self._read(start, stop)

    def _read(self, start: int, stop: int) -> list[Tensor]:
        count, read = (stop - start) * self._columns, []
        for number, entry in enumerate(self._inputs):
            out = self._arena.take(f"stored {number}", count, entry.source.dtype(entry.tensor))
            if self._arena.device is None:
                self._read_part(number, start, out)
            else:
                self._upload(number, start, out)
            read.append(out)
        if stop == self._rows and self._digests is not None:
            for entry, running in zip(self._inputs, self._hashes, strict=True):
                self._digests.values[entry.source.name, entry.tensor] = running.hexdigest()
            self._digests = None  # after the first pass
        return read

    def _upload(self, number: int, start: int, out: Tensor) -> None:
        """Fills memory of an accelerator."""
        columns = max(1, self._columns)
        step = columns * max(1, _STAGE_BYTES // (columns * out.element_size()))
        for first in range(0, len(out), step):
            part = out[first : first + step]
            host = self._arena.take_host("stored", len(part), out.dtype)
            self._read_part(number, start + first // columns, host)
            part.copy_(host)

    def _read_part(self, number: int, start: int, out: Tensor) -> None:
        entry = self._inputs[number]
        entry.source.read(entry.tensor, start * self._columns, out)
        if self._digests is not None:
            self._hashes[number].update(out.view(torch.uint8).numpy().data)

    @cached_property
    def _hashes(self) -> "list[xxhash.xxh3_128]":
        return [xxhash.xxh3_128() for _ in self._inputs]
