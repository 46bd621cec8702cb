"""``manifest.json``: what a checkpoint's files must hold, to the byte."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.store.hashing import digest

FORMAT = 1
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"


class Damaged(Exception):
    """What is wrong with a checkpoint, in a few words."""


class NewerFormat(Damaged):
    """The checkpoint was written by a newer version of this program."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: PyTorch's name of its dtype, and where in ``tensors.safetensors`` its bytes are."""

    dtype: str
    shape: list[int]
    start: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Sizes in bytes and SHA-256 of everything.

    ``tensors.safetensors`` is its header, which has a checksum, and the tensors, which have theirs: every byte is
    covered, and none is hashed twice.
    """

    step: int
    metric: float | None
    state_size: int
    state_sha256: str
    tensors_size: int
    header_size: int
    header_sha256: str
    tensors: dict[str, TensorEntry]


def encode(manifest: Manifest) -> bytes:
    """The file's content, with the format and the manifest's own checksum."""
    values = asdict(manifest)
    return json.dumps({"format": FORMAT, "checksum": digest(values), **values}, indent=1, allow_nan=False).encode()


def decode(content: bytes) -> Manifest:
    """The manifest in a file's content.

    Raises:
        NewerFormat: this version cannot read it.
        Damaged: it is no manifest, or not a byte is as it was written.
    """
    try:
        values = json.loads(content)
        format = values.pop("format")
        if isinstance(format, int) and format > FORMAT:
            raise NewerFormat(f"{MANIFEST} has format {format}, and this version of posttrain reads {FORMAT}")
        values.pop("checksum")
        manifest = Manifest(**{**values, "tensors": _entries(values["tensors"])})
        unchanged = encode(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} is no manifest") from None
    if not unchanged:
        raise Damaged(f"{MANIFEST} does not match its checksum")
    return manifest


def _entries(values: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(**entry) for name, entry in values.items()}


def checksum(content: bytes) -> str:
    """SHA-256, 64 hex characters."""
    return hashlib.sha256(content).hexdigest()
