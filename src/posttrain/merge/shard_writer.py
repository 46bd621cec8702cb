"""Writes the safetensors files of a model whose tensors come in any order, and reads them back to check them."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from posttrain.models.weight_files import INDEX, WEIGHTS
from posttrain.store.errors import WorkError
from posttrain.store.files import disk_errors, write_atomically

_ALIGNMENT = 8  # of the first tensor, as safetensors has it

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
_NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}

SHARD_BYTES = 5_000_000_000
"""Most bytes of one file, unless one tensor has more."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class ShardWriter:
    """Lays out the files, takes the tensors' bytes in any order from any process, and syncs them to the disk.

    Args:
        folder: an empty folder.
        tensors: in the order in which they are to lie in the files.
        shard_bytes: most bytes of one file.

    Raises:
        StorageError: the disk refused, or has too little space.
    """

    def __init__(self, folder: Path, tensors: Sequence[TensorSpec], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        shards = _split(tensors, shard_bytes)
        count = len(shards)
        self._names = (
            [WEIGHTS] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        )
        self._files: list[int] = []
        self._places: dict[str, tuple[int, int, int]] = {}
        with disk_errors(folder):
            for name, shard in zip(self._names, shards, strict=True):
                self._create(folder / name, shard)
            if count > 1:
                places = {tensor: self._names[place[0]] for tensor, place in self._places.items()}
                total = sum(spec.bytes for spec in tensors)
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
                write_atomically(folder / INDEX, json.dumps(index, indent=2).encode())

    def _create(self, path: Path, shard: Sequence[TensorSpec]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in shard:
            shape, ends = list(spec.shape), [offset, offset + spec.bytes]
            header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": shape, "data_offsets": ends}
            offset += spec.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._files.append(descriptor)
        start = 8 + len(text)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        if offset:
            # Now, and not hours into the work: a disk with too little space refuses here.
            os.posix_fallocate(descriptor, 0, start + offset)
        begin = start
        for spec in shard:
            self._places[spec.name] = (len(self._files) - 1, begin, spec.bytes)
            begin += spec.bytes

    def write(self, tensor: str, parts: Iterable[Tensor]) -> str:
        """Writes one tensor's consecutive parts, flat or not, contiguous and in the tensor's dtype.

        Returns:
            The digest (XXH3, 128 bits) of its bytes.

        Raises:
            StorageError: the disk refused.
        """
        file, offset, size = self._places[tensor]
        running, done = xxhash.xxh3_128(), 0
        with disk_errors(self._folder / self._names[file]):
            for part in parts:
                view = part.reshape(-1).view(torch.uint8).numpy().data
                running.update(view)
                while len(view):
                    written = os.pwrite(self._files[file], view, offset + done)
                    view, done = view[written:], done + written
        if done != size:
            raise WorkError(f"tensor {tensor} has {done:,} bytes instead of {size:,}")
        return running.hexdigest()

    def verify(self, tensor: str, digest: str) -> None:
        """Reads a tensor back and compares its bytes with the digest that `write` returned.

        Raises:
            WorkError: they are others.
        """
        file, offset, size = self._places[tensor]
        running, done = xxhash.xxh3_128(), 0
        buffer = bytearray(min(size, 1 << 22))
        while done < size:
            view = memoryview(buffer)[: min(len(buffer), size - done)]
            count = os.preadv(self._files[file], [view], offset + done)
            if not count:
                break
            running.update(view[:count])
            done += count
        if running.hexdigest() != digest:
            raise WorkError(f"{self._folder / self._names[file]}: tensor {tensor} reads other than it was written")

    def sync(self) -> None:
        """Writes all files through to the disk.

        Raises:
            StorageError: the disk refused.
        """
        for name, descriptor in zip(self._names, self._files, strict=True):
            with disk_errors(self._folder / name):
                os.fsync(descriptor)

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


def _split(tensors: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in tensors:
        if shards[-1] and filled + spec.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.bytes
    # Large numbers first, so that each tensor begins at a multiple of its number's size.
    return [sorted(shard, key=lambda spec: -spec.dtype.itemsize) for shard in shards]
