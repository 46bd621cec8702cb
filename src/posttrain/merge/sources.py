"""The models that a merge reads: tensors of safetensors files by ranges, with a LoRA adapter applied on the fly."""

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.models.weight_files import TensorHeader, read_headers
from posttrain.store.errors import UserError, shorten

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# By safetensors' names; 8-bit and packed numbers have scales elsewhere, so that their values alone mean nothing.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

BLOCK = 1 << 16
"""Elements of a block, about: a few of them per model stay in a core's cache."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def block_rows(columns: int) -> int:
    """Returns the rows of a block; of the shape alone, so that no setting of the machine changes a bit of the result."""
    return max(1, BLOCK // columns)


class WeightSource(ABC):
    """The tensors of one model, read by ranges of elements.

    Attributes:
        name: the model as the user named it.
        folder: where its config and tokenizer lie.
    """

    name: str
    folder: Path

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor, by name."""

    @abstractmethod
    def dtype(self, tensor: str) -> torch.dtype:
        """Returns the dtype that `read` fills in."""

    @abstractmethod
    def read(self, tensor: str, start: int, out: Tensor) -> None:
        """Fills ``out``, flat and of the tensor's dtype, with the tensor's elements from ``start`` on.

        The range begins and ends with a row of the last dimension.
        """

    def file(self, tensor: str) -> str:
        """Returns the file that holds a tensor, for messages."""
        return str(self.folder)

    def close(self) -> None:
        """Closes the files."""


class ModelFolder(WeightSource):
    """A Hugging Face folder with safetensors weights.

    Raises:
        UserError: a file is damaged or missing, or a tensor has a dtype that cannot be merged.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._headers: dict[str, TensorHeader] = read_headers(folder)
        for tensor, header in self._headers.items():
            if header.dtype not in DTYPES:
                raise UserError(
                    f"tensor {tensor} is quantised ({header.dtype}), and its numbers alone mean nothing",
                    where=str(header.file),
                    fix="merge the model it was quantised from",
                )
        self._files = {file: os.open(file, os.O_RDONLY) for file in {h.file for h in self._headers.values()}}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: header.shape for name, header in self._headers.items()}

    def dtype(self, tensor: str) -> torch.dtype:
        return DTYPES[self._headers[tensor].dtype]

    def file(self, tensor: str) -> str:
        return str(self._headers[tensor].file)

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        # Not mapped into memory: the pages would count as this process's, and a disk that fails would kill it.
        header = self._headers[tensor]
        view = memoryview(out.view(torch.uint8).numpy())
        offset, done = header.offset + start * out.element_size(), 0
        while done < len(view):
            count = os.preadv(self._files[header.file], [view[done:]], offset + done)
            if not count:
                raise UserError(f"ended amid tensor {tensor}", where=str(header.file), fix="was it changed meanwhile?")
            done += count

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


class AdaptedModel(WeightSource):
    """A model with a LoRA adapter, whose update is added to the rows as they are read, in float32.

    W + s B A, with s = alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (Hu et al. 2021; Kalajdzievski 2023).

    Raises:
        UserError: the adapter is of another kind, or fits no tensor of the model.
    """

    def __init__(self, name: str, adapter: Path, base: WeightSource) -> None:
        self.name, self.folder, self._base = name, base.folder, base
        config = _read_adapter_config(adapter)
        self._updates = _read_updates(adapter, config, base)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._base.shapes()

    def dtype(self, tensor: str) -> torch.dtype:
        # Merged in float32 and rounded once, with the result; peft rounds the update to the model's dtype first.
        return torch.float32 if tensor in self._updates else self._base.dtype(tensor)

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        update = self._updates.get(tensor)
        if update is None:
            self._base.read(tensor, start, out)
            return
        down, up = update
        columns = down.shape[1]
        stored = torch.empty(len(out), dtype=self._base.dtype(tensor))
        self._base.read(tensor, start, stored)
        first = start // columns
        # Block by block, however much is read at once: the last bit of a product depends on its shape.
        for result, rows in zip(
            out.view(-1, columns).split(block_rows(columns)),
            stored.view(-1, columns).split(block_rows(columns)),
            strict=True,
        ):
            torch.addmm(rows.float(), up[first : first + len(rows)], down, out=result)
            first += len(rows)

    def file(self, tensor: str) -> str:
        return self._base.file(tensor)

    def close(self) -> None:
        self._base.close()


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
    file = adapter / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError):
        raise UserError("cannot be read", where=str(file)) from None
    unsupported = [key for key in ("use_dora", "alora_invocation_tokens", "lora_bias") if config.get(key)]
    if kind != "LORA" or unsupported:
        what = f"is a {kind} adapter" if kind != "LORA" else f"has `{unsupported[0]}`"
        raise UserError(f"{what}; only plain LoRA is applied", where=str(file), fix="merge it with peft first")
    return config


def _read_updates(adapter: Path, config: Mapping[str, Any], base: WeightSource) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns A and the scaled B, both float32, by the name of the tensor that they change."""
    from safetensors.torch import load_file

    file = adapter / ADAPTER_WEIGHTS
    if not file.is_file():
        raise UserError(f"holds no {ADAPTER_WEIGHTS}", where=str(adapter), fix="save it as safetensors")
    weights = load_file(file)
    updates = {}
    shapes = base.shapes()
    for name in sorted(weights):
        prefix, separator, _ = name.partition(".lora_A.")
        if not separator:
            if ".lora_B." not in name:
                raise UserError(f"tensor {shorten(name)} is none of LoRA's", where=str(file))
            continue
        tensor = f"{prefix.removeprefix('base_model.model.')}.weight"
        down, up = weights[name].float(), weights[name.replace(".lora_A.", ".lora_B.")].float()
        if shapes.get(tensor) != (up.shape[0], down.shape[1]):
            raise UserError(
                f"{shorten(tensor)} of shape {list(shapes.get(tensor, ()))} does not fit the adapter's "
                f"{[up.shape[0], down.shape[1]]}",
                where=str(file),
                fix="name the model that the adapter was trained on",
            )
        rank = _pattern_value(config.get("rank_pattern"), prefix, config["r"])
        alpha = _pattern_value(config.get("alpha_pattern"), prefix, config["lora_alpha"])
        updates[tensor] = (down, up * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))
    if not updates:
        raise UserError("holds no LoRA weights", where=str(file))
    return updates


def _pattern_value(patterns: Mapping[str, Any] | None, module: str, default: Any) -> float:
    # As peft reads its patterns: the end of the module's name, at a dot.
    for pattern, value in (patterns or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            return float(value)
    return float(default)
