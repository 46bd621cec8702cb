"""Read a checkpoint's folder, and believe nothing that does not match the manifest."""

import errno
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from posttrain.train.checkpoint.contents import Checkpoint
from posttrain.train.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Damaged,
    Manifest,
    TensorEntry,
    checksum,
    decode,
    encode,
)
from posttrain.train.checkpoint.tensor_bytes import raw
from posttrain.train.checkpoint.threads import each

_CHUNK = 1 << 20  # hashed while it is still in the processor's cache


def read(folder: Path, step: int) -> Checkpoint:
    """The checkpoint in a folder, which must be of this step; its tensors are in memory of their own.

    Raises:
        Damaged: names the file, and the tensor, that is not as it was written.
        OSError: the files cannot be read for a reason that is no damage, such as missing permissions.
    """
    manifest = read_manifest(folder, step)
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in manifest.tensors.items()
    }
    _read_tensors(folder, manifest, {name: raw(tensor) for name, tensor in tensors.items()})
    return Checkpoint(tensors, json.loads(_state(folder, manifest)))


def check(folder: Path, manifest: Manifest) -> None:
    """Read all of a folder, without keeping it, and compare it with what was to be written.

    Raises:
        Damaged: something differs.
    """
    if _content(folder, MANIFEST) != encode(manifest):
        raise Damaged(f"{MANIFEST} is not as it was written")
    _check_sizes(folder, manifest)
    _state(folder, manifest)
    _read_tensors(folder, manifest, {})


def read_manifest(folder: Path, step: int) -> Manifest:
    """The manifest of this step, after a look at the sizes of the files that it speaks of.

    Raises:
        Damaged: it does not hold, or a file is missing or has another size.
    """
    manifest = decode(_content(folder, MANIFEST))
    if manifest.step != step:
        raise Damaged(f"{MANIFEST} is of step {manifest.step}")
    _check_sizes(folder, manifest)
    return manifest


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, size in ((TENSORS, manifest.tensors_size), (STATE, manifest.state_size)):
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        found = (folder / name).stat().st_size
        if found == size:
            continue
        problem = f"{name} has {found} bytes instead of {size}"
        lost = [entry for entry, place in manifest.tensors.items() if place.start + place.size > found]
        raise Damaged(f"{problem}: {_named(lost)} cut off" if lost and name == TENSORS else problem)


def _state(folder: Path, manifest: Manifest) -> bytes:
    content = _content(folder, STATE)
    if checksum(content) != manifest.state_sha256:
        raise Damaged(f"{STATE} does not match its checksum")
    return content


def _read_tensors(folder: Path, manifest: Manifest, into: Mapping[str, memoryview]) -> None:
    """Check the header and every tensor; the bytes of a tensor named in ``into`` are left there."""
    path = folder / TENSORS
    names = list(manifest.tensors)
    with _reading(TENSORS):
        with path.open("rb") as file:
            if checksum(file.read(manifest.header_size)) != manifest.header_sha256:
                raise Damaged(f"the header of {TENSORS} does not match its checksum")
        found = each(lambda name: _read_tensor(path, manifest.tensors[name], into.get(name)), names)
    wrong = [name for name, sha256 in zip(names, found, strict=True) if sha256 != manifest.tensors[name].sha256]
    if wrong:
        raise Damaged(f"{TENSORS} does not match its checksums in {_named(wrong)}")


def _read_tensor(path: Path, entry: TensorEntry, into: memoryview | None) -> str:
    """The checksum of a tensor's bytes as they are in the file."""
    sha256 = hashlib.sha256()
    once = memoryview(bytearray(min(_CHUNK, entry.size))) if into is None else into
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        for position in range(0, entry.size, _CHUNK):
            size = min(_CHUNK, entry.size - position)
            part = once[:size] if into is None else into[position : position + size]
            count = file.readinto(part) or 0  # a file that was cut off since gives less, and another checksum
            sha256.update(part[:count])
    return sha256.hexdigest()


def _content(folder: Path, name: str) -> bytes:
    with _reading(name):
        return (folder / name).read_bytes()


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Tell damage from other reasons why a file cannot be read."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise Damaged(f"{name} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(f"{name} cannot be read: {error.strerror}") from None


def _named(tensors: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    names = ", ".join(f"`{name}`" for name in tensors[:3])
    return f"{names} and {len(tensors) - 3} more" if len(tensors) > 3 else names
