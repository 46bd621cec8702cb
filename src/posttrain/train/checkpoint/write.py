"""Write a checkpoint's files into a fresh folder, have them on the disk, and read them back."""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from posttrain.store.errors import WorkError
from posttrain.store.files import make_readable, sync_file, sync_folder
from posttrain.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Damaged,
    Manifest,
    TensorEntry,
    checksum,
    encode,
)
from posttrain.train.checkpoint.read import check
from posttrain.train.checkpoint.tensor_bytes import digest
from posttrain.train.checkpoint.threads import alongside, each

if sys.platform == "linux":
    from os import POSIX_FADV_DONTNEED, posix_fadvise


def write(folder: Path, step: int, metric: float | None, tensors: Mapping[str, Tensor], state: bytes) -> None:
    """Write one checkpoint, the manifest last.

    Args:
        folder: an empty folder.
        tensors: contiguous, in host memory, none sharing it with another; nobody changes them meanwhile.
        state: JSON.

    Raises:
        WorkError: what is read back is not what was written.
        OSError: the disk refused; `posttrain.store.files.writing` says it in words.
    """
    digests = alongside(lambda: each(digest, tensors.values()))  # while the disk is busy
    try:
        save_file(dict(tensors), folder / TENSORS)
        (folder / STATE).write_bytes(state)
    finally:
        wait([digests])
    make_readable(folder / TENSORS)
    header, starts = _header(folder / TENSORS)
    entries = {
        name: TensorEntry(
            str(tensor.dtype).removeprefix("torch."), list(tensor.shape), starts[name], tensor.nbytes, sha
        )
        for (name, tensor), sha in zip(tensors.items(), digests.result(), strict=True)
    }
    size = len(header) + sum(entry.size for entry in entries.values())
    manifest = Manifest(step, metric, len(state), checksum(state), size, len(header), checksum(header), entries)
    for name in (TENSORS, STATE):
        sync_file(folder / name)
    (folder / MANIFEST).write_bytes(encode(manifest))
    sync_file(folder / MANIFEST)
    sync_folder(folder)
    for name in (TENSORS, STATE, MANIFEST):
        _forget(folder / name)
    try:
        check(folder, manifest)
    except Damaged as damage:
        raise WorkError(f"{folder}: read back after writing, {damage}; check the disk and the memory") from None


def _header(path: Path) -> tuple[bytes, dict[str, int]]:
    """All that stands before the first tensor, and where each tensor starts in the file."""
    with path.open("rb") as file:
        length = file.read(8)
        text = file.read(int.from_bytes(length, "little"))
    header = length + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in json.loads(text).items()}


def _forget(path: Path) -> None:
    """Have the system drop its copy of a file's content, so that reading it back asks the disk."""
    if sys.platform == "linux":
        with path.open("rb") as file:
            posix_fadvise(file.fileno(), 0, 0, POSIX_FADV_DONTNEED)
