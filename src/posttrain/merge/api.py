"""`merge`: one model out of several, in a Hugging Face folder that is whole or not there."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.merge.engine import MEMORY, MergeRun, run_plan
from posttrain.merge.plan import MergePlan, build_plan
from posttrain.merge.recipe import Recipe, read_recipe
from posttrain.merge.shard_writer import SHARD_BYTES
from posttrain.merge.sources import ADAPTER_CONFIG, AdaptedModel, ModelFolder, WeightSource
from posttrain.merge.vocabulary import check_vocabularies
from posttrain.models.sources import fetch_once, locate
from posttrain.store.errors import StorageError, UserError
from posttrain.store.files import (
    disk_errors,
    make_folder,
    remove_abandoned_folders,
    sync_folder,
    sync_tree,
    temporary_folder,
    write_atomically,
)
from posttrain.store.paths import locate_path

log = logging.getLogger("posttrain")

MERGE_FILE = "merge.json"

_TEMPORARY = ".posttrain-merge"

_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens*", "vocab*", "merges.txt", "added_tokens*", "chat_template*"),
    *("*.model", "*.jinja"),
)

# What a merged model has from the first: not its weights, adapters and records of its training, and no pickles.
_COPIED = ("config.json", "generation_config.json", "*processor_config.json", "LICENSE*", *_TOKENIZER_FILES)


@dataclass(frozen=True)
class MergeResult:
    """A finished merge.

    Attributes:
        folder: the model.
        tensors: number of its tensors.
        bytes: of its weights.
        seconds: of the whole merge.
        peak_memory: bytes that the process held at most.
    """

    folder: Path
    tensors: int
    bytes: int
    seconds: float
    peak_memory: int


def merge(
    recipe: Recipe | Path | str | Mapping[str, Any] | Sequence[Path | str],
    out: Path | str,
    *,
    method: str = "linear",
    weights: Sequence[float] | None = None,
    base: Path | str | None = None,
    memory: int = MEMORY,
    threads: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    root: Path | None = None,
    **options: Any,
) -> MergeResult:
    """Merges models into a new Hugging Face folder.

    Args:
        recipe: a recipe, as `Recipe`, mapping or YAML file (mergekit's too); or the models, as folders, Hub ids, GGUF
            files or LoRA adapters. The next four arguments are for models alone.
        out: the folder to write; not there yet, or empty.
        method: name of a merge method.
        weights: one a model, for methods with the option ``weight``.
        base: the model that all were trained from, for methods on task vectors.
        memory: bytes of weights that are held at once.
        threads: that work side by side; one a core by default.
        shard_bytes: most bytes of one file of weights.
        seed: seed of methods that draw.
        root: the folder that the recipe's paths are relative to; the file's own, or the current one, by default.
        options: further options of the method.

    Raises:
        UserError: the models cannot be merged so, or the disk refused.
    """
    given = _recipe(recipe, method, weights, base, seed, options)
    folder_of_paths = root or (Path(recipe).parent if isinstance(recipe, str | Path) else Path())
    target = Path(out)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError("exists and is not empty", where=str(out), fix="remove it or name another folder")
    with planned_merge(given, folder_of_paths, target.absolute().parent) as (plan, folder):
        _check_space(plan, folder)
        run = write_merge(plan, folder, memory, threads, shard_bytes)
        write_atomically(folder / MERGE_FILE, json.dumps(describe(plan, run), indent=1).encode())
        with disk_errors(folder):
            sync_tree(folder)
            os.rename(folder, target)
            sync_folder(target.absolute().parent)
    return MergeResult(Path(out), len(plan.tensors), plan.bytes, run.seconds, run.peak_memory)


@contextmanager
def planned_merge(recipe: Recipe, root: Path, parent: Path) -> Iterator[tuple[MergePlan, Path]]:
    """Opens the models, checks everything that can be checked before any work, and yields the plan.

    Args:
        recipe: the recipe.
        root: the folder that its paths are relative to.
        parent: the folder in which temporary files may lie.

    Yields:
        The plan, and an empty temporary folder below ``parent``.

    Raises:
        UserError: the merge cannot be done.
    """
    locations = {key: _locate(root, *key) for key in _model_keys(recipe)}
    # A folder of our own, as those that killed merges left are removed from it.
    temporary = parent / _TEMPORARY
    make_folder(parent)
    try:
        remove_abandoned_folders(temporary)
        with temporary_folder(temporary) as scratch:
            sources = _open(locations, scratch)
            (scratch / "model").mkdir()
            with _plan_of(recipe, sources) as plan:
                yield plan, scratch / "model"
    finally:
        with suppress(OSError):  # another merge may be writing beside this one
            temporary.rmdir()


@contextmanager
def opened_plan(recipe: Recipe, folders: Mapping[tuple[str, str | None], Path]) -> Iterator[MergePlan]:
    """Opens models that lie in folders, checks them, and yields the plan.

    Args:
        recipe: the recipe.
        folders: of its models and base, by the names that it has for them, with None for no adapter.

    Raises:
        UserError: the merge cannot be done.
    """
    with _plan_of(recipe, {key: ModelFolder(key[0], folder) for key, folder in folders.items()}) as plan:
        yield plan


@contextmanager
def _plan_of(recipe: Recipe, sources: Mapping[tuple[str, str | None], WeightSource]) -> Iterator[MergePlan]:
    try:
        check_vocabularies(list(sources.values()))
        yield build_plan(recipe, sources)
    finally:
        for source in sources.values():
            source.close()


def write_merge(
    plan: MergePlan,
    folder: Path,
    memory: int = MEMORY,
    threads: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> MergeRun:
    """Writes weights, config and tokenizer of the merged model into an empty folder; see `run_plan`."""
    run = run_plan(plan, folder, memory, threads, shard_bytes)
    _write_config(plan, folder)
    return run


def describe(plan: MergePlan, run: MergeRun | None = None, *, measures: bool = True) -> dict[str, Any]:
    """Returns the plan, and what running it measured, as ``merge.json`` and ``--json`` have it.

    Args:
        measures: with folders, seconds and memory, which differ between runs of the same merge.
    """
    digests = run.inputs if run else {}
    tensors = {}
    for tensor in plan.tensors:
        inputs = [*tensor.inputs, *([tensor.base] if tensor.base else [])]
        entry: dict[str, Any] = {
            "method": tensor.method.name if tensor.method else "copy",
            "options": dict(tensor.options),
            "inputs": [
                {"model": part.source.name, "tensor": part.tensor}
                | ({"digest": digests[part.source.name, part.tensor]} if run and tensor.method else {})
                for part in inputs
            ],
        }
        if run:
            entry["digest"] = run.outputs[tensor.name]
        tensors[tensor.name] = entry
    description: dict[str, Any] = {
        "posttrain": __version__,
        "recipe": plan.recipe.model_dump(mode="json", exclude_defaults=True) | {"method": plan.recipe.method},
        "models": {source.name: str(source.folder) for source in plan.sources},
        "bytes": plan.bytes,
        "bytes_read": plan.bytes_read,
        "tensors": tensors,
    }
    if not measures:
        del description["models"]
    if run and measures:
        description |= {"seconds": round(run.seconds, 3), "peak_memory": run.peak_memory, "digests": "xxh3_128"}
    return description


def _recipe(
    recipe: Recipe | Path | str | Mapping[str, Any] | Sequence[Path | str],
    method: str,
    weights: Sequence[float] | None,
    base: Path | str | None,
    seed: int,
    options: Mapping[str, Any],
) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return Recipe.read(recipe, "recipe")
    if isinstance(recipe, str | Path):
        return read_recipe(Path(recipe))
    return recipe_of_models([str(model) for model in recipe], method, weights, str(base) if base else None, seed, options)


def recipe_of_models(
    models: Sequence[str],
    method: str,
    weights: Sequence[float] | None,
    base: str | None,
    seed: int,
    options: Mapping[str, Any],
) -> Recipe:
    """Returns the recipe of a call that names the models.

    Raises:
        UserError: there are not as many weights as models, or an option does not exist.
    """
    if weights is not None and len(weights) != len(models):
        raise UserError(f"{len(weights)} weights for {len(models)} models", where="weights", fix="give one a model")
    parameters = dict(options) | ({"weight": list(weights)} if weights is not None else {})
    values = {"method": method, "base": base, "models": list(models), "parameters": parameters, "seed": seed}
    return Recipe.read(values, "merge")


def _model_keys(recipe: Recipe) -> list[tuple[str, str | None]]:
    keys: list[tuple[str, str | None]] = [(entry.model, entry.adapter) for entry in recipe.entries()]
    bases = [recipe.base, *(part.base for part in recipe.slices)]
    return list(dict.fromkeys([*keys, *((base, None) for base in bases if base)]))


def _locate(root: Path, model: str, adapter: str | None) -> tuple[str, Path | None]:
    """Returns the source of a model and the folder of its adapter."""
    folder = locate_path(root, model)
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        # An adapter alone says which model it is for.
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        name = settings.get("base_model_name_or_path")
        if not name:
            raise UserError("is an adapter that names no base model", where=model, fix=f"write MODEL+{model}")
        return locate(name, root), folder
    if adapter is not None and not (locate_path(root, adapter) / ADAPTER_CONFIG).is_file():
        raise UserError(f"holds no {ADAPTER_CONFIG}", where=adapter, fix="name the folder of a LoRA adapter")
    return locate(model, root), locate_path(root, adapter) if adapter else None


def _open(
    locations: Mapping[tuple[str, str | None], tuple[str, Path | None]], scratch: Path
) -> dict[tuple[str, str | None], WeightSource]:
    sources: dict[tuple[str, str | None], WeightSource] = {}
    for number, ((model, adapter), (source, adapter_folder)) in enumerate(locations.items()):
        opened: WeightSource = ModelFolder(model, fetch_once(source, scratch / f"input-{number}"))
        if adapter_folder is not None:
            opened = AdaptedModel(f"{model}+{adapter}" if adapter else model, adapter_folder, opened)
        sources[model, adapter] = opened
    return sources


def _check_space(plan: MergePlan, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < plan.bytes:
        raise StorageError(
            f"the result needs {plan.bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free",
            where=str(folder.parent),
            fix="free some space and run the same command again",
        )


def _write_config(plan: MergePlan, folder: Path) -> None:
    """Copies config and tokenizer, with what the merge changed."""
    with disk_errors(folder):
        for file in sorted(plan.template.folder.iterdir()):
            if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _COPIED):
                shutil.copyfile(file, folder / file.name)
        if plan.tokenizer is not plan.template:
            for file in plan.tokenizer.folder.iterdir():
                if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _TOKENIZER_FILES):
                    shutil.copyfile(file, folder / file.name)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | dict(plan.config_changes)
    floating = [tensor.dtype for tensor in plan.tensors if tensor.dtype.is_floating_point]
    if floating:
        config.pop("torch_dtype", None)
        config["dtype"] = str(max(set(floating), key=floating.count)).removeprefix("torch.")
    write_atomically(file, json.dumps(config, indent=2).encode())

