"""Write a checkpoint's tensors, state and steps into a fresh folder, sync them to disk, and read them back."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128

from posttrain.store.errors import WorkError
from posttrain.store.files import sync_file, sync_folder
from posttrain.train.checkpoint.format import (
    CHUNK,
    MANIFEST,
    STATE,
    STEPS,
    TENSORS,
    DamagedCheckpoint,
    Manifest,
    TensorEntry,
    byte_view,
    checksum,
    encode_manifest,
)
from posttrain.train.checkpoint.reader import verify_checkpoint
from posttrain.train.monitor.metrics import StepValues

# Bytes between two requests to the kernel to write out what is dirty.
_WRITEBACK = 32 << 20

_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}

if sys.platform == "linux":
    from os import POSIX_FADV_DONTNEED, posix_fadvise


@dataclass(frozen=True)
class StepsFile:
    """The steps that this process wrote into an earlier checkpoint's folder, and their checksum."""

    folder: Path
    steps: Sequence[StepValues]
    checksum: str


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: bytes,
    steps: Sequence[StepValues],
    earlier: StepsFile | None,
) -> Manifest:
    """Writes one checkpoint, syncs it to disk, and verifies it by reading it back.

    Args:
        folder: an empty folder.
        tensors: contiguous, in host memory that they do not share, unchanged until this returns.
        state: JSON.
        steps: the metrics of each step so far.
        earlier: a steps file that may grow.

    Raises:
        WorkError: the data read back differ from the data written.
        OSError: such as a full disk; see `posttrain.store.files.disk_errors`.
    """
    header, entries = write_tensors(folder / TENSORS, tensors)
    (folder / STATE).write_bytes(state)
    lines = write_steps(folder, steps, earlier)
    manifest = Manifest(
        step=step,
        state_size=len(state),
        state_checksum=checksum(state),
        steps_size=len(lines),
        steps_checksum=checksum(lines),
        tensors_size=len(header) + sum(entry.size for entry in entries.values()),
        header_size=len(header),
        header_checksum=checksum(header),
        tensors=entries,
    )
    for name in (TENSORS, STATE, STEPS):
        sync_file(folder / name)
    # The manifest last: without it a folder is not a checkpoint.
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    sync_file(folder / MANIFEST)
    sync_folder(folder)
    for name in (TENSORS, STATE, STEPS, MANIFEST):
        _drop_page_cache(folder / name)
    try:
        verify_checkpoint(folder, manifest)
    except DamagedCheckpoint as damage:
        raise WorkError(f"{folder}: read back after writing, {damage}; check the disk and the memory") from None
    return manifest


def _drop_page_cache(path: Path) -> None:
    """Drops a file from the page cache."""
    # Otherwise reading back would verify memory, not the disk.
    if sys.platform == "linux":
        with path.open("rb") as file:
            posix_fadvise(file.fileno(), 0, 0, POSIX_FADV_DONTNEED)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Writes tensors in the safetensors format, and checksum them in the same pass over memory.

    Args:
        tensors: contiguous, in host memory, of dtypes that `check_storable` lets pass.

    Returns:
        All that stands before the first tensor, and where each tensor is, in the order of ``tensors``.

    Raises:
        OSError: the disk refused.
    """
    # Largest elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, starts = _build_header({name: tensors[name] for name in order})
    checksums = {}
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            checksums[name] = _write_tensor(file, byte_view(tensors[name]))
    return header, {
        name: TensorEntry(
            str(tensor.dtype).removeprefix("torch."), list(tensor.shape), starts[name], tensor.nbytes, checksums[name]
        )
        for name, tensor in tensors.items()
    }


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raises a ``ValueError`` that names the first tensor which cannot be stored."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise ValueError(f"tensor `{name}` is sparse; a checkpoint holds dense ones")
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(f"tensor `{name}` is of {tensor.dtype}, which a checkpoint cannot hold")


def _build_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Builds the safetensors header, and the start of each tensor in the file."""
    fields, starts, end = {}, {}, 0
    for name, tensor in tensors.items():
        starts[name], end = end, end + tensor.nbytes
        fields[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    # The format pads the header with spaces, so that the tensors behind it are aligned.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _write_tensor(file: BinaryIO, content: memoryview) -> str:
    """Appends to a file and returns the checksum."""
    checksum = xxh3_128()
    for position in range(0, len(content), CHUNK):
        chunk = content[position : position + CHUNK]
        checksum.update(chunk)
        file.write(chunk)
        if file.tell() % _WRITEBACK < len(chunk) and sys.platform == "linux":
            # Starts the write-back now, so that less of it is left for the sync.
            posix_fadvise(file.fileno(), max(0, file.tell() - 2 * _WRITEBACK), 2 * _WRITEBACK, POSIX_FADV_DONTNEED)
    return checksum.hexdigest()


def write_steps(folder: Path, steps: Sequence[StepValues], earlier: StepsFile | None) -> bytes:
    """Writes the steps into a fresh folder, as a hard link to the earlier file with new lines appended.

    What another checkpoint's manifest covers is never touched: a kill leaves behind it, at most, lines that are
    not read.

    Returns:
        The lines of all steps.

    Raises:
        OSError: the disk refused.
    """
    path = folder / STEPS
    earlier_lines, count = _link_earlier(path, steps, earlier)
    added = _encode_steps(steps[count:])
    append(path, added)
    return earlier_lines + added


def append(path: Path, lines: bytes) -> None:
    """Appends to a file; creates it if it is missing."""
    with path.open("ab") as file:
        file.write(lines)


def _link_earlier(path: Path, steps: Sequence[StepValues], earlier: StepsFile | None) -> tuple[bytes, int]:
    """Hard-links the earlier file; returns its content and how many of the steps it holds.

    Nothing and 0 where it was removed, holds other steps, or the file system has no second names: all is written again.
    """
    if earlier is None or steps[: len(earlier.steps)] != earlier.steps:
        return b"", 0
    with suppress(OSError):
        os.link(earlier.folder / STEPS, path)
        content = path.read_bytes()
        # A line damaged since would otherwise pass into every later checkpoint, under a fresh checksum.
        if checksum(content) == earlier.checksum:
            return content, len(earlier.steps)
    path.unlink(missing_ok=True)
    return b"", 0


def _encode_steps(steps: Sequence[StepValues]) -> bytes:
    return b"".join(json.dumps(step.to_json(), allow_nan=False).encode() + b"\n" for step in steps)
