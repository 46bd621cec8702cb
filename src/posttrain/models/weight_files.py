"""Reads and checks the headers of a model's safetensors files, so that a damaged file is named before it is loaded."""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.store.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_FIX = "copy or download the model again"

# https://github.com/huggingface/safetensors#format: the length of the header, the header, the tensors.
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors

# Bits of a number by safetensors' name of its dtype.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS |= {"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a weights file: its file, dtype (``F32``, ``BF16`` ...), shape, and offset in the file in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that hold a model's weights.

    Raises:
        UserError: there are none, or the index is damaged or names a missing file.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        raise UserError(f"holds neither {WEIGHTS} nor {INDEX}", where=str(folder), fix=_FIX)
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        # A name, no path: a file elsewhere is none of the model's.
        files = [folder / Path(name).name for name in sorted(set(names))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError("is damaged: it maps no weights to files", where=str(index), fix=_FIX) from None
    if missing := [file.name for file in files if not file.is_file()]:
        raise UserError(f"names {missing[0]}, which is missing", where=str(index), fix=_FIX)
    return files


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Reads the headers of a model's weights, by the names of the tensors.

    Raises:
        UserError: a file is damaged or cut short; the line names it and, where it is one, the tensor.
    """
    return {name: header for file in weight_files(folder) for name, header in read_file_headers(file)}


def read_file_headers(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Yields the header of each tensor of one file, with its name.

    Raises:
        UserError: as `read_headers`.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH.size):
            raise UserError(
                "is damaged or cut short: it has no header of a safetensors file", where=str(file), fix=_FIX
            )
        content = opened.read(length)
    try:
        tensors = json.loads(content)
        tensors.pop("__metadata__", None)
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise UserError("is damaged: its header cannot be read", where=str(file), fix=_FIX) from None
    end = 0
    ends: list[tuple[int, int, str]] = []
    for name, values in tensors.items():
        header, first, last = _read_tensor(file, name, values, _LENGTH.size + length)
        ends.append((first, last, name))
        yield name, header
    # Without holes and overlaps, as safetensors demands: else a tensor could be read as another's numbers.
    for first, last, name in sorted(ends):
        if first != end:
            raise UserError(
                f"is damaged: tensor {name} does not begin where the one before ends", where=str(file), fix=_FIX
            )
        end = last
    held = size - _LENGTH.size - length
    if end != held:
        cut = f", cut short in tensor {max(ends)[2]}" if held < end else ""
        raise UserError(
            f"is damaged: it holds {held:,} bytes of tensors instead of {end:,}{cut}", where=str(file), fix=_FIX
        )


def _read_tensor(file: Path, name: str, values: Any, start: int) -> tuple[TensorHeader, int, int]:
    try:
        dtype, shape, (first, last) = str(values["dtype"]), tuple(values["shape"]), values["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        what = f"is damaged: tensor {name} has no dtype, shape or place that can be read"
        raise UserError(what, where=str(file), fix=_FIX) from None
    if dtype not in _BITS:
        raise UserError(
            f"tensor {name} has the unknown dtype {dtype[:20]}", where=str(file), fix="convert it to bfloat16"
        )
    expected = math.prod(shape) * _BITS[dtype]
    if expected != 8 * (last - first):
        what = f"is damaged: tensor {name} of shape {list(shape)} in {dtype} has {last - first:,} bytes"
        raise UserError(f"{what} instead of {expected // 8:,}", where=str(file), fix=_FIX)
    return TensorHeader(file, dtype, shape, start + first), first, last
