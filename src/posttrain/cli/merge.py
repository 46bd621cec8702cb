"""``posttrain merge``: merges models into one, by a recipe or by the options."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.merge.recipe import AUTO, Recipe
from posttrain.store.errors import UserError
from posttrain.store.yaml_files import parse_yaml

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_RECIPES = (".yaml", ".yml")


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            help="A recipe (YAML, mergekit's too); or models: folders, Hub ids, .gguf files, MODEL+ADAPTER, s3:// "
            "folders, or a workspace's, such as champion."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the merged model.")] = None,
    method: Annotated[str | None, typer.Option(help="Merge method; linear by default.")] = None,
    base: Annotated[str | None, typer.Option(help="The model that all were trained from.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="One a model, such as 0.3,0.7; auto: from scores and Fisher norms.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Records of the models' tasks, for fisher, regmean and auto; repeatable, one a model."),
    ] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Most records of a file; 256 by default.")] = None,
    scores: Annotated[
        str | None, typer.Option(help="With --weights auto, one a model, such as 0.85,0.90; by default of the data.")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="An option of the method, such as density=0.5; repeatable.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the base's by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of methods that draw; 0 by default.")] = None,
    memory: Annotated[str, typer.Option(help="Weights held at once, such as 2GiB or 500MB.")] = "2GiB",
    threads: Annotated[int | None, typer.Option(min=1, help="One a core by default.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with an estimate, and write nothing.")
    ] = False,
    conflicts: Annotated[
        Path | None, typer.Option(help="Write a page about what the models contradict each other in; needs --base.")
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Merge models into one, by a recipe or by options."""
    limit = read_bytes(memory, "--memory")
    if out is None and not dry_run and conflicts is None:
        raise UserError("say where the model is to be written", where="--out")
    changes: dict[str, Any] = {"dtype": dtype, "seed": seed}
    changes["statistics"] = None if examples is None else {"examples": examples}
    changes["scores"] = None if scores is None else _numbers(scores, "--scores")
    recipe, root = _recipe(models, method, base, weights, set or [], changes, workspace)
    if data:
        from posttrain.loop.merge_data import with_data

        # A recipe's own paths are relative to its folder.
        recipe = with_data(recipe, data if root == CURRENT_FOLDER else [_absolute(name) for name in data])
    # After the checks: a mistake in an option is reported before torch is loaded.
    from posttrain.merge.api import describe, merge, planned_merge
    from posttrain.merge.engine import estimate_seconds
    from posttrain.merge.plan_statistics import needs_statistics

    if conflicts is not None:
        _write_conflicts(conflicts, recipe, root, limit, threads, json and out is None)
        if out is None:
            return
    if dry_run:
        with planned_merge(recipe, root, Path(tempfile.gettempdir())) as (plan, _):
            description = describe(plan)
            # The seconds of a merge follow from its weights alone, and not those of a model on its data.
            if not needs_statistics(plan):
                description["estimated_seconds"] = round(estimate_seconds(plan, limit, threads), 1)
        _print_plan(description, json)
        return
    assert out is not None
    result = merge(recipe, out, memory=limit, threads=threads, root=root, data=_read_data(recipe, root))
    if json:
        print_json(
            {
                "model": str(result.folder),
                "tensors": result.tensors,
                "bytes": result.bytes,
                "seconds": result.seconds,
                "peak_memory": result.peak_memory,
            }
        )
        return
    rate = result.bytes / 1e9 / max(result.seconds, 1e-9)
    print_line(
        f"{result.tensors} tensors, {result.bytes / 1e9:.2f} GB in {result.seconds:.1f} s ({rate:.2f} GB/s), "
        f"peak memory {result.peak_memory / 2**30:.2f} GiB\nmodel: {result.folder}"
    )


def read_bytes(text: str, where: str) -> int:
    """Reads a size such as ``2GiB``, ``500MB`` or ``1e9``.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UserError(f"`{text}` is no size", where=where, fix="write 2GiB or 500MB")
    return size


def _recipe(
    models: Sequence[str],
    method: str | None,
    base: str | None,
    weights: str | None,
    settings: Sequence[str],
    changes: Mapping[str, Any],
    workspace: Path,
) -> tuple[Recipe, Path]:
    """Returns the recipe of the call, and the folder that its paths are relative to."""
    parameters: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"`{setting}` is no setting", where="--set", fix="key=value, such as density=0.5")
        parameters[key] = parse_yaml(text, f"--set {key}")
    changes = {name: value for name, value in changes.items() if value is not None}
    if any(Path(name).suffix in _RECIPES for name in models):
        if len(models) > 1 or any(value is not None for value in (method, base, weights)):
            raise UserError("a recipe names models, method, base and weights itself", where=models[0])
        from posttrain.merge.recipe import read_recipe

        recipe = read_recipe(Path(models[0]))
        values = recipe.model_dump(exclude_unset=True)
        if "statistics" in changes:
            changes["statistics"] = {**values.get("statistics", {}), **changes["statistics"]}
        values |= changes
        values["parameters"] = {**recipe.parameters, **parameters}
        return Recipe.read(_with_workspace_models(values, workspace), models[0]), Path(models[0]).parent
    if weights is not None:
        numbers = AUTO if weights == AUTO else _numbers(weights, "--weights")
        if weights != AUTO and len(numbers) != len(models):
            raise UserError(
                f"{len(numbers)} weights for {len(models)} models", where="--weights", fix="give one a model"
            )
        parameters["weight"] = numbers
    values = {"method": method or "linear", "base": base, "models": list(models), "parameters": parameters, **changes}
    return Recipe.read(_with_workspace_models(values, workspace), "merge"), CURRENT_FOLDER


def _read_data(recipe: Recipe, root: Path) -> Mapping[str, Any]:
    if not recipe.data_files():
        return {}
    # Not at the top: it loads the readers of files.
    from posttrain.loop.merge_data import read_examples

    return read_examples(recipe, root)


def _absolute(name: str) -> str:
    return name if ":" in name else str(Path(name).absolute())


def _numbers(text: str, where: str) -> list[Any]:
    return [parse_yaml(part, where) for part in text.split(",")]


def _with_workspace_models(values: dict[str, Any], workspace: Path) -> dict[str, Any]:
    """Replaces names of the workspace's models, such as ``champion`` or ``round 2``, by their folders."""
    if not (workspace / ".posttrain" / "format.json").is_file():
        return values
    from posttrain.loop.model_registry import find_model

    with open_store(workspace) as store:

        def folder(name: Any) -> Any:
            if not isinstance(name, str) or Path(name).exists() or "/" in name or "+" in name:
                return name
            try:
                return str(store.artifacts.path(find_model(store, name)).resolve())
            except UserError:
                return name  # `tiny`, or a model that the sources know

        def entry(model: Any) -> Any:
            return model | {"model": folder(model["model"])} if isinstance(model, dict) else folder(model)

        changed = {"base": folder(values.get("base")), "models": [entry(model) for model in values.get("models") or []]}
        return values | {key: value for key, value in changed.items() if value}


def _write_conflicts(path: Path, recipe: Recipe, root: Path, memory: int, threads: int | None, json: bool) -> None:
    from posttrain.merge.api import planned_merge
    from posttrain.merge.conflicts import measure_conflicts
    from posttrain.web.merge_report import write_merge_report
    from posttrain.web.page import check_page_file

    check_page_file(path)
    if recipe.base is None or recipe.slices:
        fix = "name the model that all were trained from" if not recipe.slices else "leave out the slices"
        raise UserError("compares task vectors of whole models", where="--conflicts", fix=fix)
    models = [{"model": entry.model, "adapter": entry.adapter} for entry in recipe.models]
    compared = Recipe.read({"method": "task_arithmetic", "base": recipe.base, "models": models}, "merge")
    with planned_merge(compared, root, Path(tempfile.gettempdir())) as (plan, _):
        report = measure_conflicts(plan, memory, threads)
    write_merge_report(path, report)
    if json:
        print_json(report.to_dict())
        return
    method, reason = report.recommendation()
    print_line("\n".join([*report.warnings(), f"recommended: {method} ({reason})", f"page: {path}"]))


def _print_plan(description: dict[str, Any], json: bool) -> None:
    if json:
        print_json(description)
        return
    tensors = description["tensors"].values()
    methods: dict[str, int] = {}
    for tensor in tensors:
        options = ", ".join(f"{name} {_short(value)}" for name, value in tensor["options"].items())
        line = f"{tensor['method']}: {options}" if options else tensor["method"]
        methods[line] = methods.get(line, 0) + 1
    print_table("", ["tensors", "method"], [[count, line] for line, count in methods.items()])
    print_line(
        f"{len(tensors)} tensors of {len(description['models'])} models: reads "
        f"{description['bytes_read'] / 1e9:.2f} GB, writes {description['bytes'] / 1e9:.2f} GB, "
        + (
            f"in about {description['estimated_seconds']:g} s"
            if "estimated_seconds" in description
            else "after the statistics of the models on their data"
        )
    )


def _short(value: Any) -> str:
    return "[" + ", ".join(f"{item:g}" for item in value) + "]" if isinstance(value, list | tuple) else str(value)
