"""``posttrain merge``: merges models into one, by a recipe or by the options."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.output import JsonOption, print_json, print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption, open_store
from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError
from posttrain.store.yaml_files import parse_yaml

if TYPE_CHECKING:  # torch comes with it
    from posttrain.loop.merge_importance import ModelImportance

_BY_IMPORTANCE = "by_importance"

_MEASURES = ("gradient", "ablation")

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
    weights: Annotated[str | None, typer.Option(help="One a model, such as 0.3,0.7.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Records of the models' tasks, for by_importance and the losses of --conflicts; repeatable, one a "
            "model."
        ),
    ] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Most records of a file; 128 by default.")] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="How --data measures importance: gradient, or ablation, which takes far longer."),
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="An option of the method, such as density=0.5; repeatable.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the base's by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of methods that draw; 0 by default.")] = None,
    align: Annotated[
        str | None,
        typer.Option(help="`weights` puts the hidden units of models of different initialisation in one order first."),
    ] = None,
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
    recipe, root = _recipe(models, method, base, weights, set or [], dtype, seed, align, workspace)
    data = data or []
    _check_data(recipe, data, measure, conflicts)
    # After the checks: a mistake in an option is reported before torch is loaded.
    from posttrain.merge.api import check_out, describe, merge, planned_merge
    from posttrain.merge.engine import estimate_seconds

    if conflicts is not None:
        _write_conflicts(conflicts, recipe, root, limit, threads, data, examples, json and out is None)
        if out is None:
            return
    importances: list[ModelImportance] = []
    if recipe.method == _BY_IMPORTANCE and data:
        from posttrain.loop.merge_importance import measured_recipe

        if out is not None and not dry_run:
            check_out(out)  # before the work of measuring
        parent = None if out is None else out.absolute().parent
        by_gradient = measure != "ablation"
        recipe, importances = measured_recipe(
            recipe, root, data, examples, by_gradient=by_gradient, memory=limit, parent=parent
        )
    if dry_run:
        with planned_merge(recipe, root, Path(tempfile.gettempdir())) as (plan, _):
            description = describe(plan) | {"estimated_seconds": round(estimate_seconds(plan, limit, threads), 1)}
        if importances:
            description["importance"] = [importance.to_dict() for importance in importances]
        _print_plan(description, json)
        return
    assert out is not None
    result = merge(recipe, out, memory=limit, threads=threads, root=root)
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
    dtype: str | None,
    seed: int | None,
    align: str | None,
    workspace: Path,
) -> tuple[Recipe, Path]:
    """Returns the recipe of the call, and the folder that its paths are relative to."""
    parameters: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"`{setting}` is no setting", where="--set", fix="key=value, such as density=0.5")
        parameters[key] = parse_yaml(text, f"--set {key}")
    options = {"dtype": dtype, "seed": seed, "align": align}
    changes = {name: value for name, value in options.items() if value is not None}
    if any(Path(name).suffix in _RECIPES for name in models):
        if len(models) > 1 or any(value is not None for value in (method, base, weights)):
            raise UserError("a recipe names models, method, base and weights itself", where=models[0])
        from posttrain.merge.recipe import read_recipe

        recipe = read_recipe(Path(models[0]))
        values = recipe.model_dump(exclude_unset=True) | changes
        values["parameters"] = {**recipe.parameters, **parameters}
        return Recipe.read(_with_workspace_models(values, workspace), models[0]), Path(models[0]).parent
    if weights is not None:
        numbers = [parse_yaml(part, "--weights") for part in weights.split(",")]
        if len(numbers) != len(models):
            raise UserError(
                f"{len(numbers)} weights for {len(models)} models", where="--weights", fix="give one a model"
            )
        parameters["weight"] = numbers
    values = {"method": method or "linear", "base": base, "models": list(models), "parameters": parameters, **changes}
    return Recipe.read(_with_workspace_models(values, workspace), "merge"), CURRENT_FOLDER


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


def _check_data(recipe: Recipe, data: Sequence[str], measure: str | None, conflicts: Path | None) -> None:
    """Raises a UserError if nothing needs the records."""
    by_importance = recipe.method == _BY_IMPORTANCE
    if measure not in (None, *_MEASURES):
        raise UserError(f"is no `{measure}`", where="--measure", fix=f"one of {', '.join(_MEASURES)}")
    if measure and not (by_importance and data):
        raise UserError("nothing is measured", where="--measure", fix="add --method by_importance and --data")
    if data and not by_importance and conflicts is None:
        raise UserError(f"{recipe.method} needs none", where="--data", fix="leave it out, or add --conflicts")


def _write_conflicts(
    path: Path,
    recipe: Recipe,
    root: Path,
    memory: int,
    threads: int | None,
    data: Sequence[str],
    count: int | None,
    json: bool,
) -> None:
    from posttrain.loop.merge_conflicts import measure_report
    from posttrain.merge.recommendation import describe_conflicts, recommend, warnings_of
    from posttrain.web.merge_report import write_merge_report
    from posttrain.web.page import check_page_file

    check_page_file(path)
    if recipe.base is None or recipe.slices:
        fix = "name the model that all were trained from" if not recipe.slices else "leave out the slices"
        raise UserError("compares task vectors of whole models", where="--conflicts", fix=fix)
    measured = measure_report(recipe, root, data, count, memory=memory, threads=threads, parent=path.absolute().parent)
    report, barriers, importances = measured
    write_merge_report(path, report, barriers, importances)
    if json:
        numbers = describe_conflicts(report, barriers)
        print_json(numbers | {"importance": [importance.to_dict() for importance in importances]})
        return
    method, reason = recommend(report, barriers)
    lines = [*warnings_of(report, barriers), f"recommended: {method} ({reason})", f"page: {path}"]
    print_line("\n".join(lines))


def _print_plan(description: dict[str, Any], json: bool) -> None:
    if json:
        print_json(description)
        return
    if importances := description.get("importance"):
        rows = [
            [number, *(f"{mean:.4f} ({low:.4f} to {high:.4f})" for mean, low, high in layers)]
            for number, layers in enumerate(zip(*(model["layers"] for model in importances), strict=True))
        ]
        names = [f"importance in {Path(model['model']).name}" for model in importances]
        print_table("", ["layer", *names], rows)
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
        f"in about {description['estimated_seconds']:g} s"
    )


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
