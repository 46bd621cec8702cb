"""Read a checkpoint folder, and verify everything against its manifest."""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from xxhash import xxh3_128

from posttrain.train.checkpoint.format import (
    CHUNK,
    MANIFEST,
    STATE,
    STEPS,
    TENSORS,
    Checkpoint,
    DamagedCheckpoint,
    Manifest,
    TensorEntry,
    byte_view,
    checksum,
    decode_manifest,
    encode_manifest,
)
from posttrain.train.monitor.metrics import StepValues


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Reads and verifies the checkpoint of a step; its tensors share no memory.

    Raises:
        DamagedCheckpoint: names the file, and the tensor, that is not as it was written.
        OSError: the files cannot be read for a reason that is not damage, such as missing permissions.
    """
    manifest = read_manifest(folder, step)
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in manifest.tensors.items()
    }
    _read_tensors(folder, manifest, {name: byte_view(tensor) for name, tensor in tensors.items()})
    return Checkpoint(tensors, json.loads(_read_state(folder, manifest)), decode_steps(_read_steps(folder, manifest)))


def verify_checkpoint(folder: Path, manifest: Manifest) -> None:
    """Reads a whole folder back and compare it with its manifest.

    Raises:
        DamagedCheckpoint: something differs.
    """
    if _read_file(folder, MANIFEST) != encode_manifest(manifest):
        raise DamagedCheckpoint(f"{MANIFEST} is not as it was written")
    _check_sizes(folder, manifest)
    _read_state(folder, manifest)
    _read_steps(folder, manifest)
    _read_tensors(folder, manifest, {})


def read_manifest(folder: Path, step: int) -> Manifest:
    """Reads the manifest of a step, and checks the sizes of its files.

    Raises:
        DamagedCheckpoint: it does not hold, or a file is missing or has another size.
    """
    manifest = decode_manifest(_read_file(folder, MANIFEST))
    if manifest.step != step:
        raise DamagedCheckpoint(f"{MANIFEST} is of step {manifest.step}")
    _check_sizes(folder, manifest)
    return manifest


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    sizes = {TENSORS: manifest.tensors_size, STATE: manifest.state_size, STEPS: manifest.steps_size}
    for name, size in sizes.items():
        if not (folder / name).is_file():
            raise DamagedCheckpoint(f"{name} is missing")
        actual = (folder / name).stat().st_size
        if actual == size or (name == STEPS and actual > size):  # later checkpoints add to it
            continue
        problem = f"{name} has {actual} bytes instead of {size}"
        lost = [entry for entry, location in manifest.tensors.items() if location.start + location.size > actual]
        raise DamagedCheckpoint(f"{problem}: {_quote_names(lost)} cut off" if lost and name == TENSORS else problem)


def _read_state(folder: Path, manifest: Manifest) -> bytes:
    content = _read_file(folder, STATE)
    if checksum(content) != manifest.state_checksum:
        raise DamagedCheckpoint(f"{STATE} does not match its checksum")
    return content


def _read_steps(folder: Path, manifest: Manifest) -> bytes:
    content = _read_file(folder, STEPS)[: manifest.steps_size]
    if checksum(content) != manifest.steps_checksum:
        raise DamagedCheckpoint(f"{STEPS} does not match its checksum")
    return content


def _read_tensors(folder: Path, manifest: Manifest, into: Mapping[str, memoryview]) -> None:
    """Verifies the header and every tensor; tensors named in ``into`` are read into it."""
    # All tensors are read before the error: its message names every damaged one.
    wrong = set()
    # Unbuffered: `readinto` fills the tensors' own memory without another copy.
    with _as_damage(TENSORS), (folder / TENSORS).open("rb", buffering=0) as file:
        if checksum(file.read(manifest.header_size)) != manifest.header_checksum:
            raise DamagedCheckpoint(f"the header of {TENSORS} does not match its checksum")
        # In the order of the file, which the disk reads ahead.
        for name, entry in sorted(manifest.tensors.items(), key=lambda item: item[1].start):
            if _read_tensor(file, entry, into.get(name)) != entry.checksum:
                wrong.add(name)
    if wrong:
        named = _quote_names([name for name in manifest.tensors if name in wrong])
        raise DamagedCheckpoint(f"{TENSORS} does not match its checksums in {named}")


def _read_tensor(file: FileIO, entry: TensorEntry, into: memoryview | None) -> str:
    """Returns the checksum of a tensor's bytes in the file."""
    digest = xxh3_128()
    scratch = memoryview(bytearray(min(CHUNK, entry.size))) if into is None else into
    file.seek(entry.start)
    for position in range(0, entry.size, CHUNK):
        size = min(CHUNK, entry.size - position)
        part = scratch[:size] if into is None else into[position : position + size]
        count = file.readinto(part) or 0  # a file truncated since gives fewer bytes, and so another checksum
        digest.update(part[:count])
    return digest.hexdigest()


def _read_file(folder: Path, name: str) -> bytes:
    with _as_damage(name):
        return (folder / name).read_bytes()


@contextmanager
def _as_damage(name: str) -> Iterator[None]:
    """Turns missing files and I/O errors into `DamagedCheckpoint`; others, such as permissions, are not damage."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamagedCheckpoint(f"{name} is missing") from None
    except OSError as error:
        # Only an I/O error says that the data are lost: after a missing permission they may still be read.
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from None


def _quote_names(tensors: Sequence[str]) -> str:
    """Joins the first few names, and counts the rest."""
    names = ", ".join(f"`{name}`" for name in tensors[:3])
    return f"{names} and {len(tensors) - 3} more" if len(tensors) > 3 else names


def decode_steps(content: bytes) -> list[StepValues]:
    """The reverse of what `write_steps` writes."""
    return [StepValues.from_json(json.loads(line)) for line in content.splitlines()]
