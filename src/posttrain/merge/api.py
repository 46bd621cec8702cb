"""`merge`: one model out of several, in a Hugging Face folder that is whole or not there."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain import __version__
from posttrain.merge.adapter_writer import write_adapter
from posttrain.merge.alignment import AlignedModel, align_models
from posttrain.merge.engine import MEMORY, MergeRun, run_plan
from posttrain.merge.inputs import open_models
from posttrain.merge.lora_adapter import ADAPTER_WEIGHTS
from posttrain.merge.methods.registry import load_method
from posttrain.merge.mixture import plan_mixture
from posttrain.merge.output_folder import (
    check_new_folder,
    check_space,
    commit,
    copy_tokenizer,
    remove_abandoned,
    scratch_folder,
    write_config,
)
from posttrain.merge.plan import MergePlan, template_key, writes_adapter
from posttrain.merge.plan_builder import build_plan
from posttrain.merge.plan_statistics import Examples, check_data, needs_statistics, with_statistics
from posttrain.merge.preflight import check_architectures, check_weights
from posttrain.merge.recipe import AUTO, Recipe, read_recipe
from posttrain.merge.result_config import check_result
from posttrain.merge.shard_writer import SHARD_BYTES
from posttrain.merge.sources import ModelFolder, WeightSource
from posttrain.merge.statistics import Example
from posttrain.merge.vocabulary import match_vocabularies
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.files import (
    disk_errors,
    make_folder,
    sync_tree,
    write_atomically,
)
from posttrain.store.paths import check_path

MERGE_FILE = "merge.json"

_DATA = "data"  # the name of records in memory


@dataclass(frozen=True)
class MergeResult:
    """A finished merge.

    Attributes:
        folder: the model.
        tensors: number of its tensors.
        bytes: of its weights.
        seconds: of the whole merge.
        peak_memory: bytes that the process held at most.
        adapter: energy and relative error that an adapter keeps, overall and by matrix, as merge.json has them.
    """

    folder: Path
    tensors: int
    bytes: int
    seconds: float
    peak_memory: int
    adapter: Mapping[str, Any] | None = None


def merge(
    recipe: Recipe | Path | str | Mapping[str, Any] | Sequence[Path | str],
    out: Path | str,
    *,
    method: str = "linear",
    weights: Sequence[float] | Literal["auto"] | None = None,
    base: Path | str | None = None,
    memory: int = MEMORY,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    align: str = "none",
    root: Path | None = None,
    data: Mapping[str, Sequence[Example]] | Sequence[Example] | None = None,
    **options: Any,
) -> MergeResult:
    """Merges models into a new Hugging Face folder.

    Args:
        recipe: a recipe, as `Recipe`, mapping or YAML file (mergekit's too); or the models, as folders, Hub ids, GGUF
            files or LoRA adapters. `method`, `weights`, `base`, `seed`, `align` and `options` are for models alone.
        out: the folder to write; not there yet, or empty.
        method: name of a merge method.
        weights: one per model, for methods with the option ``weight``; ``auto``: computed from scores and Fisher norms
            (`posttrain.merge.plan_statistics.auto_weights`).
        base: the model that all were trained from, for methods on task vectors.
        memory: bytes of weights that are held at once.
        workers: processes that merge side by side; one per core by default.
        shard_bytes: most bytes of one file of weights.
        seed: seed of methods that draw.
        align: ``weights`` puts the hidden units of models of different initialisation in one order first.
        root: the folder that the recipe's paths are relative to; the file's own, or the current one, by default.
        data: conversations with their answers, ``([{"role": "user", "content": "..."}], "...")``, for methods that
            need statistics of the models: of all models, or by the names that the recipe has for its files
            (`posttrain.tune.merges.data.merge_on_data` reads these).
        options: further options of the method.

    Raises:
        UserError: the models cannot be merged so, or the disk refused.
    """
    merge_recipe, folder_of_paths = recipe_of_call(
        recipe, root, method=method, weights=weights, base=base, seed=seed, align=align, **options
    )
    if merge_recipe.search is not None:
        raise UserError(
            "is done by `posttrain merge` and `posttrain.tune.merges.search.search_recipe`",
            where="search",
            fix="leave out the key here",
        )
    check_path(Path(out))
    target = Path(out).absolute()
    # First, as the same command after a kill behind the last rename must not leave anything either.
    remove_abandoned(target.parent)
    check_new_folder(Path(out))
    examples = data if isinstance(data, Mapping) else {_DATA: data or []}
    if data is not None and not isinstance(data, Mapping):
        merge_recipe = merge_recipe.model_copy(update={"data": _DATA})
    with planned_merge(merge_recipe, folder_of_paths, target.parent, examples) as (plan, folder):
        check_space(plan, folder)
        run = write_merge(plan, folder, memory, workers, shard_bytes)
        write_atomically(folder / MERGE_FILE, json.dumps(describe(plan, run), indent=1).encode())
        with disk_errors(folder):
            sync_tree(folder)
        commit(folder, target)
    size = plan.bytes if run.adapter is None else (target / ADAPTER_WEIGHTS).stat().st_size
    return MergeResult(Path(out), len(plan.tensors), size, run.seconds, run.peak_memory, run.adapter)


@contextmanager
def planned_merge(
    recipe: Recipe, root: Path, parent: Path, examples: Examples | None = None
) -> Iterator[tuple[MergePlan, Path]]:
    """Opens the models, checks everything that can be checked before any work, and yields the plan.

    Args:
        recipe: the recipe.
        root: the folder that its paths are relative to.
        parent: the folder in which temporary files may lie.
        examples: the records that the recipe names; None for a plan without the statistics of the models' data, which
            cannot be run where a method needs them.

    Yields:
        The plan, and an empty temporary folder below ``parent``.

    Raises:
        UserError: the merge cannot be done.
    """
    with scratch_folder(parent) as scratch:
        make_folder(scratch / "model")
        with _plan_of(recipe, open_models(recipe, root, scratch), scratch / "tokenizer", examples) as plan:
            yield plan, scratch / "model"


@contextmanager
def opened_plan(
    recipe: Recipe,
    folders: Mapping[tuple[str, str | None], Path],
    examples: Examples | None = None,
    task: TaskConfig | None = None,
) -> Iterator[MergePlan]:
    """Opens models that lie in folders, checks them, and yields the plan.

    Args:
        recipe: the recipe.
        folders: of its models and base, by the names that it has for them, with None for no adapter.
        examples: the records that the recipe names, for methods that need them.
        task: how prompts are shown to the models.

    Raises:
        UserError: the merge cannot be done.
    """
    sources = {key: ModelFolder(key[0], folder) for key, folder in folders.items()}
    with _plan_of(recipe, sources, examples=examples, task=task) as plan:
        yield plan


@contextmanager
def _plan_of(
    recipe: Recipe,
    sources: Mapping[tuple[str, str | None], WeightSource],
    scratch: Path | None = None,
    examples: Examples | None = None,
    task: TaskConfig | None = None,
) -> Iterator[MergePlan]:
    try:
        check_architectures([*sources.values()])
        matched = match_vocabularies(sources, template_key(recipe), recipe.tokenizer, scratch)
        models = matched.sources
        if recipe.align == "weights":
            models = align_models(models, template_key(recipe))
        template, tokenizer = models[template_key(recipe)], (matched.folder, matched.owner)
        if load_method(recipe.method).result == "mixture":
            plan = plan_mixture(recipe, models, template, tokenizer)
        else:
            plan = build_plan(recipe, models, tokenizer)
        if not writes_adapter(recipe):
            check_result(plan)
        check_weights(plan)
        check_data(plan)
        if examples is None:
            yield plan
            return
        with with_statistics(plan, sources, examples, task) as known:
            yield known
    finally:
        for source in sources.values():
            source.close()


def write_merge(
    plan: MergePlan,
    folder: Path,
    memory: int = MEMORY,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> MergeRun:
    """Writes weights, config and tokenizer of the merged model, or an adapter, into an empty folder; see `run_plan`.

    Raises:
        UserError: as `run_plan`; or the plan was made without records that its methods need.
    """
    if needs_statistics(plan) and not plan.statistics:
        raise UserError("the statistics of the models were not computed", where="data", fix="give their records")
    for source in plan.sources:
        source.check_unchanged()
        source.prepare()
    if writes_adapter(plan.recipe):
        copy_tokenizer(plan, folder)
        run = write_adapter(plan, folder, memory, workers)
    else:
        write_config(plan, folder)
        run = run_plan(plan, folder, memory, workers, shard_bytes)
    for source in plan.sources:
        source.check_unchanged()
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
        if tensor.low_rank is not None:
            entry["adapter"] = dict(tensor.low_rank)
        if run and tensor.name in run.outputs:
            entry["digest"] = run.outputs[tensor.name]
        tensors[tensor.name] = entry
    description: dict[str, Any] = {
        "posttrain": __version__,
        "recipe": plan.recipe.model_dump(mode="json", exclude_defaults=True) | {"method": plan.recipe.method},
        "models": {source.name: source.location for source in plan.sources},
        "bytes": plan.bytes,
        "bytes_read": plan.bytes_read,
        "tensors": tensors,
    }
    if plan.statistics:
        description["statistics"] = list(plan.statistics)
    if run and run.adapter is not None:
        description["adapter"] = {**run.adapter, "digests": dict(run.outputs)}
    if aligned := [source for source in plan.sources if isinstance(source, AlignedModel)]:
        description["alignment"] = {
            source.name: {"before": source.alignment.before, "after": source.alignment.after} for source in aligned
        }
    if not measures:
        del description["models"]
    if run and measures:
        description |= {"seconds": round(run.seconds, 3), "peak_memory": run.peak_memory, "digests": "xxh3_128"}
    return description


def recipe_of_call(
    recipe: Recipe | Path | str | Mapping[str, Any] | Sequence[Path | str],
    root: Path | None = None,
    *,
    method: str = "linear",
    weights: Sequence[float] | Literal["auto"] | None = None,
    base: Path | str | None = None,
    seed: int = 0,
    align: str = "none",
    **options: Any,
) -> tuple[Recipe, Path]:
    """Returns the recipe that arguments of `merge` stand for, and the folder that its paths are relative to.

    Raises:
        UserError: it is not a recipe, or an option does not exist.
    """
    folder = root or (Path(recipe).parent if isinstance(recipe, str | Path) else Path())
    if isinstance(recipe, Recipe):
        return recipe, folder
    if isinstance(recipe, Mapping):
        return Recipe.read(recipe, "recipe"), folder
    if isinstance(recipe, str | Path):
        return read_recipe(Path(recipe)), folder
    names = [str(model) for model in recipe]
    return recipe_of_models(names, method, weights, str(base) if base else None, seed, options, align), folder


def recipe_of_models(
    models: Sequence[str],
    method: str,
    weights: Sequence[float] | Literal["auto"] | None,
    base: str | None,
    seed: int,
    options: Mapping[str, Any],
    align: str = "none",
) -> Recipe:
    """Returns the recipe of a call that names the models.

    Raises:
        UserError: there are not as many weights as models, or an option does not exist.
    """
    if weights is not None and weights != AUTO and len(weights) != len(models):
        raise UserError(f"{len(weights)} weights for {len(models)} models", where="weights", fix="give one per model")
    parameters = dict(options) | (
        {"weight": weights if weights == AUTO else list(weights)} if weights is not None else {}
    )
    values = {"method": method, "base": base, "models": list(models), "parameters": parameters, "seed": seed}
    values["align"] = align
    return Recipe.read(values, "merge")
