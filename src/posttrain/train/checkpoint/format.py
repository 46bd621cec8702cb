"""The contents of a checkpoint, and the manifest with the size and checksum of every byte."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from posttrain.train.monitor.metrics import StepValues

FORMAT = 3

TENSORS, STATE, STEPS, MANIFEST = "tensors.safetensors", "state.json", "steps.jsonl", "manifest.json"

CHUNK = 1 << 20
"""Bytes that are hashed at a time, while they are in the processor's cache."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a training resumes from.

    Args:
        tensors: tensors of the optimiser and the random generators, by name.
        state: everything else that is JSON.
        steps: values of each step so far. Of a list that grew since it was saved only the growth is written.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    steps: list[StepValues] = field(default_factory=list)


def encode_state(state: dict[str, Any]) -> bytes:
    """Encodes the state as JSON. Tuples become lists; NaN and infinities are kept.

    Raises:
        TypeError: a value has no JSON form, or a key is not a string and would come back as one.
    """
    _check_string_keys(state, "state")
    return json.dumps(state).encode()


def _check_string_keys(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path}: key {key!r} is not a string")
            _check_string_keys(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_string_keys(inner, f"{path}[]")


class DamagedCheckpoint(Exception):
    """Raised for a damaged checkpoint; the message names the damage."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: PyTorch's name of its dtype, and where in ``tensors.safetensors`` its bytes are."""

    dtype: str
    shape: list[int]
    start: int
    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Sizes in bytes and checksums of everything.

    ``tensors.safetensors`` is its header, which has a checksum, and the tensors, which have theirs: every byte is
    covered, and none is hashed twice. ``steps.jsonl`` may continue behind its size, with what later checkpoints added.
    """

    step: int
    state_size: int
    state_checksum: str
    steps_size: int
    steps_checksum: str
    tensors_size: int
    header_size: int
    header_checksum: str
    tensors: dict[str, TensorEntry]


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes a manifest, with the format and its own checksum."""
    # The manifest has the checksums of all other files, so it needs one for itself.
    own = checksum(_to_json(vars(manifest)))
    return _to_json({"format": FORMAT, "checksum": own, **vars(manifest)})


def decode_manifest(content: bytes) -> Manifest:
    """Decodes a manifest.

    Raises:
        DamagedCheckpoint: it is not a manifest of this format, or not a byte is as it was written.
    """
    try:
        values = json.loads(content)
        del values["format"], values["checksum"]
        manifest = Manifest(**{**values, "tensors": _tensor_entries(values["tensors"])})
        # Encoded again and compared byte by byte: this covers its own checksum, and a change that JSON would read over.
        unchanged = encode_manifest(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedCheckpoint(f"{MANIFEST} is not a manifest") from None
    if not unchanged:
        raise DamagedCheckpoint(f"{MANIFEST} does not match its checksum")
    return manifest


def _tensor_entries(values: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(**entry) for name, entry in values.items()}


def _to_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, default=vars, allow_nan=False).encode()


def checksum(content: bytes | memoryview) -> str:
    """Returns the 128-bit XXH3 of some bytes, 32 hex characters."""
    # Against damage, not malice; ten times as fast as SHA-256.
    return xxh3_128_hexdigest(content)


def byte_view(tensor: Tensor) -> memoryview:
    """Views a contiguous tensor in host memory, of any dtype and shape, as writable bytes."""
    # Flat first: a tensor without dimensions cannot be viewed in another element size.
    return tensor.flatten().view(torch.uint8).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """Returns the SHA-256 of a contiguous tensor in host memory, 64 hex characters; releases the GIL."""
    return hashlib.sha256(byte_view(tensor)).hexdigest()
