"""The statistics that a merge needs of its models' data: computed once, and kept as files in the user's cache."""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from posttrain.merge.auto_weights import auto_weights
from posttrain.merge.methods.base import Statistic
from posttrain.merge.plan import MergePlan, Sources, TensorPlan
from posttrain.merge.recipe import AUTO, ModelEntry, Recipe
from posttrain.merge.sources import ModelFolder, TensorFiles, WeightSource
from posttrain.merge.statistics import Example, ModelStatistics, fisher_information, input_grams
from posttrain.merge.tensor_group import TensorInput
from posttrain.merge.vocabulary_view import VocabularyView, is_by_token
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.loading import load_tokenizer
from posttrain.models.task import TaskConfig
from posttrain.models.weight_files import INDEX, read_file_headers
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, set_default_mode, sync_file, write_atomically
from posttrain.store.hashing import digest, file_digest
from posttrain.store.user_cache import cache_folder

log = logging.getLogger("posttrain")

Examples = Mapping[str, Sequence[Example]]
"""The records of each file that a recipe names, by its name there."""

FOLDER = "merge-statistics"

_VERSION = 1  # of what is computed: another one makes files of their own

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


def check_data(plan: MergePlan) -> None:
    """Checks that the recipe names data of every model of which a method needs statistics, and that these will fit.

    Raises:
        UserError: it does not, or a model's rows of tokens stand in the order of another vocabulary.
    """
    recipe, data = plan.recipe, _data_of_models(plan.recipe)
    if recipe.scores is not None and len(recipe.scores) != len(_models(plan)):
        count = len(_models(plan))
        raise UserError(f"{len(recipe.scores)} scores for {count} models", where="scores", fix="give one a model")
    if recipe.data_files() and not needs_statistics(plan):
        log.warning("no method here needs statistics of the models: the data is not read")
    for name, statistics in _needed(plan).items():
        if data.get(name) is None and recipe.data is None:
            methods = {tensor.method.name for tensor in plan.tensors if tensor.method and tensor.method.statistic}
            what = min(methods) if methods else f"the weight {AUTO}"
            statistic = "Fisher information" if "fisher" in statistics else "Gram matrices"
            raise UserError(
                f"{what} needs the {statistic} of `{name}`, and no data is given",
                where="data",
                fix="name records of the model's task: --data FILE, or `data` in the recipe",
            )
    for tensor in plan.tensors:
        for entry in tensor.inputs if tensor.method is not None and tensor.method.statistic == "fisher" else ():
            if isinstance(entry.source, VocabularyView) and is_by_token(entry.tensor):
                raise UserError(
                    f"the Fisher information of {entry.tensor} has its rows in the order of another vocabulary",
                    where=entry.source.name,
                    fix="give it another method by a rule below `layers`: {match: 'embed|lm_head', method: linear}",
                )


@contextmanager
def with_statistics(
    plan: MergePlan, sources: Sources, examples: Examples, task: TaskConfig | None = None
) -> Iterator[MergePlan]:
    """Computes the statistics that a plan's methods need, or reads them from the cache, and yields the plan with them.

    Args:
        plan: the plan.
        sources: the models, as they were opened.
        examples: the records that the recipe names.
        task: how prompts are shown to the models; as they are by default.

    Raises:
        UserError: a model cannot be loaded, or has no statistics of one of its tensors.
    """
    models = {source.name: source for source in sources.values()}
    files: dict[tuple[str, Statistic], StatisticsFile] = {}
    described = []
    with ExitStack() as opened:
        for name, needed in _needed(plan).items():
            data = _data_of_models(plan.recipe).get(name) or plan.recipe.data
            assert data is not None, "check_data comes before"
            if data not in examples:
                raise UserError(
                    f"the records of `{data}` are not given",
                    where="data",
                    fix="call posttrain.loop.merge_data.merge_on_data, which reads them",
                )
            model = _Model(models[name], examples[data], plan.recipe, task or TaskConfig())
            for statistic in needed:
                file = files[name, statistic] = StatisticsFile(f"{statistic} of {name}", model.file(statistic))
                opened.callback(file.close)
                described.append({"model": name, "statistic": statistic, "data": data, **_public(file.summary)})
        tensors = [_with_statistics(tensor, files) for tensor in plan.tensors]
        _warn_of_plain_means(tensors)
        known = replace(plan, tensors=tensors, statistics=described)
        yield _with_weights(known) if plan.recipe.has_auto_weights else known


def needs_statistics(plan: MergePlan) -> bool:
    """Returns whether the plan can run only with statistics of its models."""
    return bool(_needed(plan))


def _with_weights(plan: MergePlan) -> MergePlan:
    """Returns the plan with the weights that ``auto`` stands for."""
    fisher = [entry for entry in plan.statistics if entry["statistic"] == "fisher"]
    order = {name: number for number, name in enumerate(_models(plan))}
    fisher.sort(key=lambda entry: order[entry["model"]])
    # Of a token, geometric mean: the sums of a long and of a short answer would not compare.
    scores = plan.recipe.scores or [math.exp(entry["log_likelihood"] / entry["tokens"]) for entry in fisher]
    weights = auto_weights(scores, [entry["norm"] for entry in fisher])
    for entry, score, weight in zip(fisher, scores, weights, strict=True):
        log.info("weight of %s: %.4f (score %.4f, Fisher norm %.4g)", entry["model"], weight, score, entry["norm"])
    tensors = [
        replace(tensor, options={**tensor.options, "weight": tuple(weights)})
        if tensor.options.get("weight") == AUTO
        else tensor
        for tensor in plan.tensors
    ]
    recipe = plan.recipe.model_copy(update={"parameters": {**plan.recipe.parameters, "weight": weights}})
    return replace(plan, recipe=recipe, tensors=tensors)


def _needed(plan: MergePlan) -> dict[str, list[Statistic]]:
    """Returns the statistics that are needed, by the model's name."""
    needed: dict[str, dict[Statistic, None]] = {}
    if plan.recipe.has_auto_weights:
        needed = {name: {"fisher": None} for name in _models(plan)}
    for tensor in plan.tensors:
        if tensor.method is not None and tensor.method.statistic is not None:
            for entry in tensor.inputs:
                needed.setdefault(entry.source.name, {})[tensor.method.statistic] = None
    return {name: list(statistics) for name, statistics in needed.items()}


def _models(plan: MergePlan) -> list[str]:
    return [entry.source.name for entry in plan.tensors[0].inputs]


def _data_of_models(recipe: Recipe) -> dict[str, str | None]:
    return {_name(entry): entry.data for entry in recipe.entries()}


def _name(entry: ModelEntry) -> str:
    return entry.model if entry.adapter is None else f"{entry.model}+{entry.adapter}"


def _with_statistics(tensor: TensorPlan, files: Mapping[tuple[str, Statistic], StatisticsFile]) -> TensorPlan:
    if tensor.method is None or tensor.method.statistic is None:
        return tensor
    entries = []
    for entry in tensor.inputs:
        file = files[entry.source.name, tensor.method.statistic]
        if entry.tensor not in file.shapes():
            if tensor.method.statistic == "fisher" and entry.tensor not in file.summary["buffers"]:
                raise UserError(
                    f"the model that was loaded has no parameter {entry.tensor}, so that its Fisher information is "
                    "not known",
                    where=entry.source.name,
                    fix="give such tensors another method by a rule below `layers`",
                )
            return tensor
        entries.append(TensorInput(file, entry.tensor))
    return replace(tensor, statistics=tuple(entries))


def _warn_of_plain_means(tensors: Sequence[TensorPlan]) -> None:
    """Warns of matrices that a method averages, as no layer is known that they are of."""
    merged = [tensor for tensor in tensors if tensor.method is not None and tensor.method.statistic == "gram"]
    plain = [t.name for t in merged if not t.statistics and len(t.shape) > 1 and not is_by_token(t.name)]
    if plain:
        log.warning(
            "%d matrices become the plain mean, as their inputs are not known; the first: %s", len(plain), plain[0]
        )


class _Model:
    """One model with its data, whose statistics are computed or read."""

    def __init__(self, source: WeightSource, examples: Sequence[Example], recipe: Recipe, task: TaskConfig) -> None:
        self._source, self._examples, self._recipe, self._task = source, examples, recipe, task
        self._loaded: LanguageModel | None = None

    def file(self, statistic: Statistic) -> Path:
        """Returns the file of a statistic, which is computed if the cache does not hold it whole."""
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
                "version": _VERSION,
                "statistic": statistic,
                "weights": self._digests,
                "task": self._task.model_dump(mode="json"),
                "examples": [list(example) for example in self._examples],
                "settings": settings if statistic == "fisher" else [],
            }
        )

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Returns digests of all that decides on the model's outputs."""
        digests = {f"tensor {name}": _tensor_digest(self._source, name) for name in sorted(self._source.shapes())}
        for folder in dict.fromkeys([self._source.folder, self._source.tokenizer_folder]):
            for file in sorted(folder.iterdir()):
                if file.suffix in _SUFFIXES and file.name not in _RECORDS and file.is_file():
                    digests[f"file {file.name}"] = file_digest(file)
        return digests

    def _compute(self, statistic: Statistic) -> ModelStatistics:
        log.info("computing %s of %s on %d records", statistic, self._source.name, len(self._examples))
        if self._loaded is None:
            self._loaded = _load(self._source, self._task)
        if statistic == "gram":
            return input_grams(self._loaded, self._examples)
        answers = self._recipe.statistics.answers
        return fisher_information(self._loaded, self._examples, answers=answers, seed=self._recipe.seed)


def _load(source: WeightSource, task: TaskConfig) -> LanguageModel:
    """Loads a model in float32, with the weights that a merge reads of it, such as those of an adapter."""
    lm = load_language_model(source.folder, task, "float32")
    if isinstance(source, ModelFolder):
        return lm
    if source.tokenizer_folder != source.folder:
        lm = LanguageModel(lm.model, load_tokenizer(str(source.tokenizer_folder)), task)
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


def _public(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("examples", "tokens", "log_likelihood", "norm", "sha256")}
