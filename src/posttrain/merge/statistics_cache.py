"""Statistics of models on their data, computed once and kept as files in the user's cache."""

import json
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from posttrain.merge.methods.base import Statistic
from posttrain.merge.recipe import Recipe
from posttrain.merge.sources import ModelFolder, TensorFiles, WeightSource
from posttrain.merge.statistics import Example, ModelStatistics, fisher_information, input_grams
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.loading import load_tokenizer
from posttrain.models.task import TaskConfig
from posttrain.models.weight_files import INDEX, read_file_headers
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, set_default_mode, sync_file, write_atomically
from posttrain.store.hashing import digest, file_digest
from posttrain.store.user_cache import cache_folder

log = logging.getLogger("posttrain")

FOLDER = "merge-statistics"

VERSION = 3
"""The version of the statistics; a change of what is computed raises it, and gives the files other names."""

# What decides on a model's tokens and outputs, beside its weights; not the records of its training.
_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_RECORDS = ("merge.json", "summary.json", INDEX)

_READ_ELEMENTS = 1 << 22


class StatisticsFile(WeightSource):
    """Statistics of one model, read by ranges as the model's own tensors are.

    Attributes:
        summary: what was computed: ``examples``, ``tokens``, ``log_likelihood``, ``norm``.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.folder, self.location = name, file.parent, str(file)
        self.summary: dict[str, Any] = json.loads(_summary_file(file).read_bytes())
        self._tensors = TensorFiles(dict(read_file_headers(file)))
        self._shared: Mapping[str, str] = self.summary["shared"]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        own = {name: header.shape for name, header in self._tensors.headers.items()}
        return own | {name: own[owner] for name, owner in self._shared.items()}

    def dtype(self, tensor: str) -> torch.dtype:
        return torch.float32

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        self._tensors.read(self._shared.get(tensor, tensor), start, out)

    def close(self) -> None:
        self._tensors.close()


class ModelWithData:
    """One model with its data, whose statistics are computed or read.

    Args:
        source: the model.
        examples: its data.
        recipe: says how statistics are computed, and has the seed.
    """

    def __init__(self, source: WeightSource, examples: Sequence[Example], recipe: Recipe) -> None:
        self._source, self._examples, self._recipe = source, examples, recipe
        self._loaded: LanguageModel | None = None

    def file(self, statistic: Statistic) -> Path:
        """Returns the file of a statistic, which is computed if the cache does not hold it whole.

        Raises:
            UserError: the user has no home folder, or the statistic cannot be computed.
        """
        folder = cache_folder()
        if folder is None:
            raise UserError("there is no home folder for the statistics", where="data", fix="set XDG_CACHE_HOME")
        file = folder / FOLDER / f"{self._key(statistic)}.safetensors"
        if not _is_whole(file):
            _write(file, self._compute(statistic))
        return file

    def _key(self, statistic: Statistic) -> str:
        options = self._recipe.statistics
        settings: list[Any] = [options.answers, self._recipe.seed if options.answers == "sampled" else None]
        return digest(
            {
                "version": VERSION,
                "statistic": statistic,
                "weights": self._digests,
                "examples": [list(example) for example in self._examples],
                "settings": settings if statistic == "fisher" else [],
            }
        )

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Digests of all that decides on the model's outputs: its weights, config and tokenizer."""
        source = self._source
        digests = {f"tensor {name}": _tensor_digest(source, name) for name in sorted(source.shapes())}
        for folder in dict.fromkeys([source.folder, source.tokenizer_folder]):
            files = [file for file in sorted(folder.iterdir()) if file.suffix in _SUFFIXES and file.is_file()]
            digests |= {f"file {file.name}": file_digest(file) for file in files if file.name not in _RECORDS}
        return digests

    def _compute(self, statistic: Statistic) -> ModelStatistics:
        log.info("computing %s of %s on %d records", statistic, self._source.name, len(self._examples))
        if self._loaded is None:
            self._loaded = _load(self._source)
        if statistic == "gram":
            return _with_stored_names(
                input_grams(self._loaded, self._examples), self._loaded.model, self._source.shapes()
            )
        answers = self._recipe.statistics.answers
        return fisher_information(self._loaded, self._examples, answers=answers, seed=self._recipe.seed)


def _with_stored_names(statistics: ModelStatistics, model: Any, stored: Collection[str]) -> ModelStatistics:
    """Returns the Gram matrices under the names that files of a decoder alone have, which lack the model's prefix."""
    prefix, shared = f"{model.base_model_prefix}.", dict(statistics.shared)
    for name in [*statistics.tensors, *statistics.shared]:
        if name not in stored and (short := name.removeprefix(prefix)) in stored:
            shared[short] = statistics.shared.get(name, name)
    return replace(statistics, shared=shared)


def _load(source: WeightSource) -> LanguageModel:
    """Loads a model in float32, with the weights that a merge reads of it, such as those of an adapter."""
    lm = load_language_model(source.folder, TaskConfig(), "float32")
    if isinstance(source, ModelFolder):
        return lm
    if source.tokenizer_folder != source.folder:
        lm = LanguageModel(lm.model, load_tokenizer(str(source.tokenizer_folder)), lm.task)
    parameters = dict(lm.model.named_parameters())
    with torch.no_grad():
        for name, shape in source.shapes().items():
            if name in parameters and parameters[name].shape == shape:
                weights = torch.empty(math.prod(shape), dtype=source.dtype(name))
                source.read(name, 0, weights)
                parameters[name].copy_(weights.view(shape))
            elif source.dtype(name).is_floating_point:
                raise UserError(
                    f"tensor {name} has no parameter of its shape in the model below the adapter",
                    where=source.name,
                    fix="merge the adapter into its model first: posttrain merge MODEL+ADAPTER --out DIR",
                )
    return lm


def _tensor_digest(source: WeightSource, tensor: str) -> str:
    shape = source.shapes()[tensor]
    columns, elements = (shape[-1] if shape else 1), math.prod(shape)
    step = max(1, _READ_ELEMENTS // max(columns, 1)) * columns
    running = xxhash.xxh3_128(f"{source.dtype(tensor)} {list(shape)}".encode())
    for start in range(0, elements, max(step, 1)):
        part = torch.empty(min(step, elements - start), dtype=source.dtype(tensor))
        source.read(tensor, start, part)
        running.update(part.view(torch.uint8).numpy().data)
    return running.hexdigest()


def _write(file: Path, statistics: ModelStatistics) -> None:
    """Writes tensors and summary; the summary last, as it says that the tensors are whole."""
    make_folder(file.parent)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    with disk_errors(file):
        try:
            save_file(statistics.tensors, temporary)
            set_default_mode(temporary)  # safetensors lets only the owner read
            sync_file(temporary)
            checksum = file_digest(temporary)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    likelihood = statistics.log_likelihood
    summary = {
        "examples": statistics.examples,
        "tokens": statistics.tokens,
        "log_likelihood": None if math.isnan(likelihood) else likelihood,
        "norm": statistics.norm,
        "shared": statistics.shared,
        "buffers": statistics.buffers,
        "sha256": checksum,
    }
    write_atomically(_summary_file(file), json.dumps(summary).encode())


def _is_whole(file: Path) -> bool:
    """Returns whether the cache holds a file as it was written; warns of one that is damaged."""
    try:
        summary = json.loads(_summary_file(file).read_bytes())
        whole = file_digest(file) == str(summary["sha256"])
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        log.warning("%s is damaged: it is computed again", file)
    return whole


def _summary_file(file: Path) -> Path:
    return file.with_suffix(".json")
