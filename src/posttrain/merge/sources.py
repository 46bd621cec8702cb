"""The models that a merge reads: the tensors of safetensors files, by ranges."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.models.weight_files import TensorHeader, read_headers
from posttrain.store.errors import UserError, shorten

CONFIG = "config.json"

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

_SMALL_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")

BLOCK = 1 << 16
"""Elements of a block, about: a few of them per model stay in a core's cache."""

HEAD = "lm_head.weight"

# By the names that the families of transformers have for it.
_EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings)\.weight$")

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")


def block_rows(columns: int) -> int:
    """Returns the rows of a block: of the shape alone, so that no setting of the machine changes the result."""
    return max(1, BLOCK // columns)


def layer_of(name: str) -> int | None:
    """Returns the number of the layer that a tensor belongs to; None outside of the layers."""
    match = LAYER.search(name)
    return int(match.group(1)) if match else None


def is_embedding(name: str) -> bool:
    """Returns whether a tensor is the embedding of the tokens, by its name."""
    return bool(_EMBEDDINGS.search(name))


def embedding_of(tensors: Iterable[str]) -> str | None:
    """Returns the name of the tokens' embedding among a model's tensors; None if there is none."""
    return next(filter(is_embedding, tensors), None)


class WeightSource(ABC):
    """The tensors of one model, read by ranges of elements.

    Attributes:
        name: the model as the user named it.
        folder: where its config lies.
        tokenizer_folder: where its tokenizer lies.
        location: its folder, URL or Hub id, as the record of the merge has it.
        config: content of its ``config.json``.
    """

    name: str
    folder: Path
    tokenizer_folder: Path
    location: str
    config: Mapping[str, Any]

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shape of every tensor, by name."""

    @abstractmethod
    def dtype(self, tensor: str) -> torch.dtype:
        """Returns the dtype that `read` fills in."""

    def stored_dtype(self, tensor: str) -> torch.dtype:
        """Returns the dtype that the tensor has in the model's files, and gets in the result."""
        return self.dtype(tensor)

    @abstractmethod
    def read(self, tensor: str, start: int, out: Tensor) -> None:
        """Fills ``out``, flat and of the tensor's dtype, with the tensor's elements from ``start`` on.

        The range begins and ends with a row of the last dimension.
        """

    def file(self, tensor: str) -> str:
        """Returns the file that holds a tensor, for messages."""
        return str(self.folder)

    def prepare(self) -> None:  # noqa: B027 - most have nothing to compute
        """Computes what the source does not read from files, with all threads, before the first read."""

    def check_unchanged(self) -> None:  # noqa: B027 - a source without files has nothing to check
        """Raises a UserError if a file has changed since it was opened."""

    def close(self) -> None:  # noqa: B027
        """Closes the files."""


def has_tied_head(source: WeightSource) -> bool:
    """Returns whether a model without a head of its own in its files takes the embedding for it."""
    text = source.config.get("text_config")
    configs = [source.config, *([text] if isinstance(text, Mapping) else [])]
    untied = any(config.get("tie_word_embeddings") is False for config in configs)
    return not untied and HEAD not in source.shapes() and embedding_of(source.shapes()) is not None


class SourceView(WeightSource):
    """The tensors of another source, some of which a subclass reads in another order or shape.

    Args:
        source: the model.
    """

    def __init__(self, source: WeightSource) -> None:
        self.name, self.folder, self.config = source.name, source.folder, source.config
        self.tokenizer_folder, self.location = source.tokenizer_folder, source.location
        self._source = source

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def dtype(self, tensor: str) -> torch.dtype:
        return self._source.dtype(tensor)

    def stored_dtype(self, tensor: str) -> torch.dtype:
        return self._source.stored_dtype(tensor)

    def prepare(self) -> None:
        self._source.prepare()

    def file(self, tensor: str) -> str:
        return self._source.file(tensor)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()


class TensorFiles:
    """Tensors of safetensors files, read by ranges.

    Raises:
        UserError: a tensor has a dtype that cannot be merged.
    """

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = headers
        for tensor, header in headers.items():
            if header.dtype not in DTYPES:
                raise UserError(
                    f"tensor {shorten(tensor)} is quantised ({header.dtype}), and its numbers alone mean nothing",
                    where=str(header.file),
                    fix="merge the model it was quantised from",
                )
        self._files = {file: os.open(file, os.O_RDONLY) for file in {header.file for header in headers.values()}}
        self._states = {file: _state(descriptor) for file, descriptor in self._files.items()}

    def dtype(self, tensor: str) -> torch.dtype:
        """Returns a tensor's dtype."""
        return DTYPES[self.headers[tensor].dtype]

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        """Fills ``out``, flat and of the tensor's dtype, with its elements from ``start`` on.

        Raises:
            UserError: the file ends before, or cannot be read.
        """
        # Not mapped into memory: the pages would count as this process's, and a disk that fails would kill it.
        header = self.headers[tensor]
        view = out.view(torch.uint8).numpy().data
        offset, done = header.offset + start * out.element_size(), 0
        while done < len(view):
            try:
                count = os.preadv(self._files[header.file], [view[done:]], offset + done)
            except OSError as error:
                what = f"tensor {shorten(tensor)} cannot be read: {error.strerror}"
                raise UserError(what, where=str(header.file), fix="check the disk") from None
            if not count:
                raise UserError(f"ended amid tensor {tensor}", where=str(header.file), fix="was it changed meanwhile?")
            done += count

    def check_unchanged(self) -> None:
        """Raises a UserError if a file has changed since it was opened."""
        for file, descriptor in self._files.items():
            if _state(descriptor) != self._states[file]:
                raise UserError("was changed while it was read", where=str(file), fix="run the same command again")

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


class ModelFolder(WeightSource):
    """A Hugging Face folder with safetensors weights.

    Raises:
        UserError: a file is damaged or missing, or the weights are quantised.
    """

    def __init__(self, name: str, folder: Path, location: str | None = None) -> None:
        self.name, self.folder, self.tokenizer_folder = name, folder, folder
        self.location = location or str(folder)
        self._files = FolderFiles(folder)
        self.config = _read_config(folder)
        headers = read_headers(folder)
        self._tensors = TensorFiles(headers)
        try:
            if self.config.get("tie_word_embeddings") is True and HEAD in headers and self._is_head_tied():
                del headers[HEAD]
        except BaseException:
            self._tensors.close()
            raise
        self._shapes = {name: header.shape for name, header in headers.items()}

    def _is_head_tied(self) -> bool:
        """Returns whether the stored head equals the embedding: else transformers does not tie them."""
        headers = self._tensors.headers
        embedding = embedding_of(headers)
        if embedding is None or headers[embedding].shape != headers[HEAD].shape:
            return False
        if self.dtype(embedding) != self.dtype(HEAD):
            return False
        rows, columns = headers[HEAD].shape
        for start in range(0, rows, step := block_rows(columns)):
            parts = [torch.empty(min(step, rows - start) * columns, dtype=self.dtype(HEAD)) for _ in range(2)]
            for name, part in zip((embedding, HEAD), parts, strict=True):
                self.read(name, start * columns, part)
            if not torch.equal(*parts):
                return False
        return True

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtype(self, tensor: str) -> torch.dtype:
        return self._tensors.dtype(tensor)

    def file(self, tensor: str) -> str:
        return str(self._tensors.headers[tensor].file)

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        self._tensors.read(tensor, start, out)

    def check_unchanged(self) -> None:
        self._tensors.check_unchanged()
        self._files.check_unchanged()

    def close(self) -> None:
        self._tensors.close()


class FolderFiles:
    """The files of a model or adapter beside its weights: config, tokenizer, templates."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states = self._read()

    def _read(self) -> dict[str, tuple[int, ...]]:
        try:
            paths = [path for path in self._folder.iterdir() if path.suffix in _SMALL_FILES and path.is_file()]
            return {path.name: _state(path) for path in paths}
        except FileNotFoundError:
            return {}

    def check_unchanged(self) -> None:
        """Raises a UserError if a file has changed, or is gone, since this object was made."""
        states = self._read()
        for name, state in self._states.items():
            if states.get(name) != state:
                what = "was changed while it was read" if name in states else "is gone since the work began"
                raise UserError(what, where=str(self._folder / name), fix="run the same command again")


def _state(file: int | Path) -> tuple[int, ...]:
    status = os.stat(file)
    # Who writes into a file can set its old time again, but not the time of its inode.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"is not a model: it holds no {CONFIG}", where=str(folder)) from None
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError("is damaged: it cannot be read", where=str(file), fix="copy the model again")
    quantization = config.get("quantization_config")
    if quantization:
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"the model is quantised ({shorten(str(kind))}), and its numbers alone mean nothing",
            where=str(file),
            fix="merge the model it was quantised from",
        )
    return config
