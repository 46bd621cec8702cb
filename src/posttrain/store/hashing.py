"""Canonical JSON and the digests made of it: equal content, equal digest, on every machine."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Returns the canonical JSON of ``value``: keys sorted, no spaces, ASCII; tuples are written as lists.

    Raises:
        TypeError: something in ``value`` has no JSON form, such as a NumPy integer or a key that is not a
            string; the message names where it is.
        ValueError: a number is not finite.
    """
    # `json` would write a key 1 as "1" and NaN as NaN: two different values could then share an id.
    _check(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(value: Any) -> str:
    """Returns the SHA-256 of the canonical JSON of ``value``, 64 hex characters."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, 64 hex characters."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_stats(path: Path) -> list[list[str | int]]:
    """Returns name, size and time of a file, or of a folder's files, to notice that one has changed."""
    # In place of a digest: hashing gigabytes of a base model would take longer than the work that it guards.
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _check(value: Any, location: str) -> None:
    if isinstance(value, Mapping):
        if not isinstance(value, dict):
            raise TypeError(f"{location}: {type(value).__name__} has no JSON form")
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{location}: key {key!r} is no string")
            _check(inner, f"{location}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{location}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{location}: {value} is not finite")
    elif value is not None and not isinstance(value, str | bool | int):
        raise TypeError(f"{location}: {type(value).__name__} has no JSON form")
