"""``manifest.json``: what a checkpoint's files must hold, to the byte."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_hexdigest

FORMAT = 2
TENSORS, STATE, STEPS, MANIFEST = "tensors.safetensors", "state.json", "steps.jsonl", "manifest.json"


class Damaged(Exception):
    """What is wrong with a checkpoint, in a few words."""


class OtherFormat(Damaged):
    """The checkpoint was written by an older or newer version of this program, and only that one can read it."""


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
    covered, and none is hashed twice. ``steps.jsonl`` may go on behind its size, with what later checkpoints added.
    """

    step: int
    metric: float | None
    state_size: int
    state_checksum: str
    steps_size: int
    steps_checksum: str
    tensors_size: int
    header_size: int
    header_checksum: str
    tensors: dict[str, TensorEntry]


def encode(manifest: Manifest) -> bytes:
    """The file's content, with the format and the manifest's own checksum."""
    own = checksum(_json(vars(manifest)))
    return _json({"format": FORMAT, "checksum": own, **vars(manifest)})


def decode(content: bytes) -> Manifest:
    """The manifest in a file's content.

    Raises:
        OtherFormat: this version cannot read it.
        Damaged: it is no manifest, or not a byte is as it was written.
    """
    try:
        values = json.loads(content)
        format = values.pop("format")
        if isinstance(format, int) and format != FORMAT:
            raise OtherFormat(f"{MANIFEST} has format {format}, and this version of posttrain reads {FORMAT}")
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


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, default=vars, allow_nan=False).encode()


def checksum(content: bytes | memoryview) -> str:
    """XXH3 of 128 bits, 32 hex characters: against damage, not malice, and ten times as fast as SHA-256."""
    return xxh3_128_hexdigest(content)
