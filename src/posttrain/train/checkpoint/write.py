"""Write a checkpoint's files into a fresh folder, have them on the disk, and read them back."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from posttrain.store.errors import WorkError
from posttrain.store.files import sync_file, sync_folder
from posttrain.train.checkpoint.manifest import MANIFEST, STATE, STEPS, TENSORS, Damaged, Manifest, checksum, encode
from posttrain.train.checkpoint.read import check
from posttrain.train.checkpoint.steps_file import StepsFile, write_steps
from posttrain.train.checkpoint.tensors_file import write_tensors
from posttrain.train.watch.values import StepValues

if sys.platform == "linux":
    from os import POSIX_FADV_DONTNEED, posix_fadvise


def write(
    folder: Path,
    step: int,
    metric: float | None,
    tensors: Mapping[str, Tensor],
    state: bytes,
    steps: Sequence[StepValues],
    earlier: StepsFile | None,
) -> Manifest:
    """Write one checkpoint, the manifest last.

    Args:
        folder: an empty folder.
        tensors: contiguous, in host memory, none sharing it with another; nobody changes them meanwhile.
        state: JSON.
        steps: what each step so far has measured.
        earlier: a file that steps may be added to.

    Raises:
        WorkError: what is read back is not what was written.
        OSError: the disk refused; `posttrain.store.files.writing` says it in words.
    """
    header, entries = write_tensors(folder / TENSORS, tensors)
    (folder / STATE).write_bytes(state)
    lines = write_steps(folder, steps, earlier)
    manifest = Manifest(
        step=step,
        metric=metric,
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
    (folder / MANIFEST).write_bytes(encode(manifest))
    sync_file(folder / MANIFEST)
    sync_folder(folder)
    for name in (TENSORS, STATE, STEPS, MANIFEST):
        _forget(folder / name)
    try:
        check(folder, manifest)
    except Damaged as damage:
        raise WorkError(f"{folder}: read back after writing, {damage}; check the disk and the memory") from None
    return manifest


def _forget(path: Path) -> None:
    """Have the system drop its copy of a file's content, so that reading it back asks the disk."""
    if sys.platform == "linux":
        with path.open("rb") as file:
            posix_fadvise(file.fileno(), 0, 0, POSIX_FADV_DONTNEED)
