"""LoRA adapters as inputs of a merge: their updates are added to the rows of a model as these are read."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.merge.sources import (
    HEAD,
    FolderFiles,
    TensorFiles,
    WeightSource,
    block_rows,
    embedding_of,
    has_tied_head,
)
from posttrain.models.weight_files import INDEX, WEIGHTS, read_file_headers
from posttrain.store.errors import UserError, shorten

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# What a LoRA configuration may not have: the update is more than B A, or the weights below it are not the base's.
_OTHER_LORA = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication"),
    *("monteclora_config", "arrow_config", "kasa_config", "target_parameters", "trainable_token_indices"),
)
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # beginnings of init_lora_weights

PREFIX = "base_model.model."

_PLAIN_NAME = re.compile(r"[\w.]+")

_FACTOR = re.compile(r"\.(lora_A|lora_embedding_A)(?:\.weight)?$")


class AdaptedModel(WeightSource):
    """A model with a LoRA adapter, whose update is added to the rows as they are read, in float32.

    W + s B A, with s = alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (Hu et al. 2021; Kalajdzievski 2023).
    Tensors that the adapter holds as a whole (``modules_to_save``, biases) take the place of the model's. Where
    only the embedding of a tied model is adapted, the head is a tensor of its own: peft leaves it as it was.

    Attributes:
        base_location: folder, URL or Hub id of the model.

    Raises:
        UserError: the adapter is of another kind, or fits no tensor of the model.
    """

    def __init__(self, name: str, adapter: Path, base: WeightSource) -> None:
        self.name, self.folder, self.config, self._base = name, base.folder, base.config, base
        self.base_location = base.location
        self.location = f"{base.location}+{adapter}"
        self.tokenizer_folder = adapter if (adapter / "tokenizer.json").is_file() else base.tokenizer_folder
        self._files = FolderFiles(adapter)
        settings = read_adapter_config(adapter)
        file = adapter / ADAPTER_WEIGHTS
        if not file.is_file():
            raise UserError(f"holds no {ADAPTER_WEIGHTS}", where=str(adapter), fix="save it as safetensors")
        self._file = str(file)
        headers = dict(read_file_headers(file))
        whole = {name: header for name, header in headers.items() if ".lora_" not in name}
        self._whole = TensorFiles({_base_name(name): header for name, header in whole.items()})
        try:
            self._check_whole()
            self._shapes = dict(base.shapes()) | {name: entry.shape for name, entry in self._whole.headers.items()}
            self._head = self._unadapted_head(settings)
            if self._head is not None:
                self._shapes[HEAD] = self._shapes[self._head[1]]
            self._updates = _read_updates(file, headers.keys() - whole.keys(), settings, self._shapes)
            if self._head is not None and not self._has_own_head(self._head[1], settings):
                del self._shapes[HEAD]
        except BaseException:
            self._whole.close()
            raise

    def _check_whole(self) -> None:
        shapes = self._base.shapes()
        for name, header in self._whole.headers.items():
            # An embedding may have got rows for new tokens.
            if name == HEAD and has_tied_head(self._base):
                continue
            if name not in shapes or shapes[name][1:] != header.shape[1:]:
                raise _misfit(name, shapes.get(name), header.shape, self._file)

    def _unadapted_head(self, settings: Mapping[str, Any]) -> tuple[TensorFiles | WeightSource, str] | None:
        """Returns what a tied head is without its update, and the tensor's name there; None if it is stored."""
        embedding = embedding_of(self._base.shapes())
        if embedding is None or HEAD in self._whole.headers or not has_tied_head(self._base):
            return None
        if embedding not in self._whole.headers or _is_saved_module(embedding, settings):
            return self._base, embedding
        return self._whole, embedding  # the layer below the update, which base and head share

    def _has_own_head(self, embedding: str, settings: Mapping[str, Any]) -> bool:
        """Returns whether the adapter changes one of the two tensors that a tied model holds as one.

        Raises:
            UserError: the embedding has other tokens than the head.
        """
        if HEAD in self._updates:
            return True
        replaced = embedding in self._whole.headers and _is_saved_module(embedding, settings)
        if settings.get("ensure_weight_tying") or not (replaced or embedding in self._updates):
            return False
        if replaced and self._shapes[embedding] != self._base.shapes()[embedding]:
            raise _misfit(embedding, self._base.shapes()[embedding], self._shapes[embedding], self._file)
        return True

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, tensor: str) -> torch.dtype:
        # Merged in float32 and rounded once, with the result; peft rounds the update to the model's dtype first.
        if tensor in self._updates:
            return torch.float32
        source, name = self._unadapted(tensor)
        return source.dtype(name)

    def _unadapted(self, tensor: str) -> tuple[TensorFiles | WeightSource, str]:
        if tensor == HEAD and self._head is not None:
            return self._head
        return (self._whole if tensor in self._whole.headers else self._base), tensor

    def factors(self, tensor: str) -> tuple[Tensor, Tensor] | None:
        """Returns A [rank, columns] and s B [rows, rank] of a tensor's update, float32; None if it has none."""
        return self._updates.get(tensor)

    def holds_whole(self, tensor: str) -> bool:
        """Returns whether the adapter has a tensor of its own in place of the model's."""
        return tensor in self._whole.headers

    def stored_dtype(self, tensor: str) -> torch.dtype:
        name = embedding_of(self._base.shapes()) if tensor not in self._base.shapes() else tensor
        return self._base.stored_dtype(name or tensor)

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        update, (unadapted, name) = self._updates.get(tensor), self._unadapted(tensor)
        if update is None:
            unadapted.read(name, start, out)
            return
        down, up = update
        columns = down.shape[1]
        stored = torch.empty(len(out), dtype=unadapted.dtype(name))
        unadapted.read(name, start, stored)
        first = start // columns
        # Block by block, however much is read at once: the last bit of a product depends on its shape.
        results, weights, step = out.view(-1, columns), stored.view(-1, columns), block_rows(columns)
        for begin in range(0, len(results), step):
            rows = weights[begin : begin + step].float()
            factor = up[first + begin : first + begin + len(rows)]
            torch.addmm(rows, factor, down, out=results[begin : begin + step])

    def file(self, tensor: str) -> str:
        source, name = self._unadapted(tensor)
        return source.file(name) if isinstance(source, WeightSource) else self._file

    def check_unchanged(self) -> None:
        self._whole.check_unchanged()
        self._files.check_unchanged()
        self._base.check_unchanged()

    def close(self) -> None:
        self._whole.close()
        self._base.close()


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder holds a LoRA adapter and no model of its own."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    """Returns the configuration of a LoRA adapter.

    Raises:
        UserError: it cannot be read, or the adapter is not plain LoRA.
    """
    file = adapter / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise UserError("cannot be read", where=str(file), fix="copy the adapter again") from None
    others = [key for key in _OTHER_LORA if config.get(key)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        others.append("init_lora_weights")
    if kind != "LORA" or others:
        what = f"is a {kind} adapter" if kind != "LORA" else f"has `{others[0]}`"
        raise UserError(f"{what}; only plain LoRA is applied", where=str(file), fix="merge it with peft first")
    return config


def _read_updates(
    file: Path, names: Collection[str], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the right and the left factor of each update, the left one scaled, both float32, by the base's tensor."""
    from safetensors import safe_open

    updates: dict[str, tuple[Tensor, Tensor]] = {}
    left = set(names)
    alpha_of = _pattern_values(config.get("alpha_pattern"), config.get("lora_alpha", 8))
    with safe_open(file, "pt") as weights:
        for name in sorted(names):
            match = _FACTOR.search(name)
            if match is None:
                continue
            other = name.replace(".lora_A", ".lora_B").replace(".lora_embedding_A", ".lora_embedding_B")
            if other not in left:
                raise UserError(f"has no tensor {shorten(other)}", where=str(file), fix="copy the adapter again")
            left -= {name, other}
            module = name[: match.start()].removeprefix(PREFIX)
            down, up = weights.get_tensor(name).float(), weights.get_tensor(other).float()
            for factor, values in ((name, down), (other, up)):
                if not torch.isfinite(values).all():
                    raise UserError(
                        f"tensor {shorten(factor)} holds NaN or infinite numbers",
                        where=str(file),
                        fix="use an undamaged adapter",
                    )
            if down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0]:
                raise UserError(f"the factors of {shorten(module)} do not fit each other", where=str(file))
            rank = len(down)
            scale = alpha_of(module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
            if config.get("fan_in_fan_out") or match.group(1) == "lora_embedding_A":
                down, up = up.T.contiguous(), down.T.contiguous()  # the weight is stored as its transpose
            tensor, shape = f"{module}.weight", (up.shape[0], down.shape[1])
            if shapes.get(tensor) != shape:
                raise _misfit(tensor, shapes.get(tensor), shape, str(file))
            updates[tensor] = (down, up * scale)
    if left:
        raise UserError(
            f"tensor {shorten(min(left))} does not belong to plain LoRA",
            where=str(file),
            fix="merge it with peft first",
        )
    if not updates:
        raise UserError("holds no LoRA weights", where=str(file))
    return updates


def _is_saved_module(tensor: str, settings: Mapping[str, Any]) -> bool:
    """Returns whether peft trains a copy of a tensor's module, and leaves the model's own as it is."""
    module = tensor.rpartition(".")[0]
    return any(module == saved or module.endswith(f".{saved}") for saved in settings.get("modules_to_save") or ())


def _base_name(name: str) -> str:
    """Returns the base's name of a tensor that an adapter holds as a whole."""
    return name.removeprefix(PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", ".")


def _misfit(tensor: str, shape: Sequence[int] | None, other: Sequence[int], file: str) -> UserError:
    what = f"has the shape {list(shape)} in the model" if shape is not None else "is not in the model"
    return UserError(
        f"{shorten(tensor)} {what} and {list(other)} in the adapter",
        where=file,
        fix="name the model that the adapter was trained on",
    )


def _pattern_values(patterns: Mapping[str, Any] | None, default: Any) -> Callable[[str], float]:
    """Returns the function that gives a module's value: that of the first pattern that matches, as peft reads them.

    A pattern is a regular expression for the end of a module's name, from a dot on. Plain names, of which there is one
    a module in some adapters, are looked up.
    """
    names: dict[str, tuple[int, float]] = {}
    expressions: list[tuple[int, float, re.Pattern[str]]] = []
    try:
        last = float(default)
        for at, (pattern, value) in enumerate((patterns or {}).items()):
            if _PLAIN_NAME.fullmatch(pattern):
                names[pattern] = at, float(value)
            else:
                expressions.append((at, float(value), re.compile(rf"(.*\.)?({pattern})$")))
    except (re.error, AttributeError, TypeError, ValueError):
        raise UserError("has a damaged alpha_pattern or lora_alpha", where=ADAPTER_CONFIG) from None

    def value_of(module: str) -> float:
        parts = module.split(".")
        endings = (".".join(parts[start:]) for start in range(len(parts)))
        matches = [names[ending] for ending in endings if ending in names]
        matches += [(at, value) for at, value, expression in expressions if expression.match(module)]
        return min(matches, default=(0, last))[1]

    return value_of
