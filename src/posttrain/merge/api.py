"""`merge`: one model out of several, in a Hugging Face folder that is whole or not there."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

# Of a model's folder, all that is not weights, and no pickles: loading one runs the code in it.
_NOT_COPIED = (".*", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", MERGE_FILE, "README.md")


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
        options: further options of the method.

    Raises:
        UserError: the models cannot be merged so, or the disk refused.
    """
    given = _recipe(recipe, method, weights, base, seed, options)
    root = Path(recipe).parent if isinstance(recipe, str | Path) else Path()
    with planned_merge(given, root, Path(out)) as (plan, folder):
        run = run_plan(plan, folder, memory, threads, shard_bytes)
        _write_config(plan, folder)
        write_atomically(folder / MERGE_FILE, json.dumps(describe(plan, run), indent=1).encode())
        with disk_errors(folder):
            sync_tree(folder)
        commit(folder, Path(out))
    return MergeResult(Path(out), len(plan.tensors), plan.bytes, run.seconds, run.peak_memory)


@contextmanager
def planned_merge(recipe: Recipe, root: Path, out: Path) -> Iterator[tuple[MergePlan, Path]]:
    """Opens the models, checks everything that can be checked before any work, and yields the plan.

    Args:
        recipe: the recipe.
        root: the folder that its paths are relative to.
        out: the folder that is to be written.

    Yields:
        The plan, and an empty temporary folder on the same file system.

    Raises:
        UserError: the merge cannot be done.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError("exists and is not empty", where=str(out), fix="remove it or name another folder")
    parent = out.absolute().parent / _TEMPORARY
    locations = {key: _locate(root, *key) for key in _model_keys(recipe)}
    make_folder(parent.parent)
    try:
        remove_abandoned_folders(parent)
        with temporary_folder(parent) as scratch:
            sources = _open(locations, scratch)
            try:
                check_vocabularies(list(sources.values()))
                plan = build_plan(recipe, sources)
                _check_space(plan, parent)
                (scratch / "model").mkdir()
                yield plan, scratch / "model"
            finally:
                for source in sources.values():
                    source.close()
    finally:
        with _ignored_if_used():
            parent.rmdir()


def commit(folder: Path, out: Path) -> None:
    """Moves the finished folder to where it was asked for, in one step."""
    with disk_errors(out):
        os.rename(folder, out)
        sync_folder(out.absolute().parent)


def describe(plan: MergePlan, run: MergeRun | None = None) -> dict[str, Any]:
    """Returns the plan, and what running it measured, as ``merge.json`` and ``--json`` have it."""
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
    if run:
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
    ignore = shutil.ignore_patterns(*_NOT_COPIED)
    with disk_errors(folder):
        shutil.copytree(plan.template.folder, folder, dirs_exist_ok=True, ignore=ignore)
        if plan.tokenizer is not plan.template:
            for file in plan.tokenizer.folder.iterdir():
                if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template")):
                    shutil.copyfile(file, folder / file.name)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | dict(plan.config_changes)
    floating = [tensor.dtype for tensor in plan.tensors if tensor.dtype.is_floating_point]
    if floating:
        config.pop("torch_dtype", None)
        config["dtype"] = str(max(set(floating), key=floating.count)).removeprefix("torch.")
    write_atomically(file, json.dumps(config, indent=2).encode())


@contextmanager
def _ignored_if_used() -> Iterator[None]:
    # Another merge may be writing beside this one.
    try:
        yield
    except OSError:
        pass
