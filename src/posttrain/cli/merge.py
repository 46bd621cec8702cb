"""``posttrain merge``: merges models into one, by a recipe or by the options."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.cli import merge_by_data as by_data
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
        typer.Option(help="Records, for methods that read some, auto and adamerging; repeatable, one a model."),
    ] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Most records of a file; 256 by default.")] = None,
    scores: Annotated[
        str | None, typer.Option(help="With --weights auto, one a model, such as 0.85,0.90; by default of the data.")
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="An option of the method, such as density=0.5; repeatable.")
    ] = None,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Write the merged task vector as a LoRA adapter on the base.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the base's by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of methods that draw; 0 by default.")] = None,
    memory: Annotated[str, typer.Option(help="Weights held at once, such as 2GiB or 500MB.")] = "2GiB",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes side by side; one a core by default.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with an estimate, and write nothing.")
    ] = False,
    conflicts: Annotated[
        Path | None, typer.Option(help="Write a page about what the models contradict each other in; needs --base.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(help="Search the numbers with the highest score on suites or [NAME=]records; repeatable."),
    ] = None,
    search_method: Annotated[str | None, typer.Option(help="coordinate, bayesian (default) or evolutionary.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Merges that a search measures; 30 by default.")] = None,
    validate: Annotated[
        list[str] | None,
        typer.Option(help="Measure what the merge kept on suites or [NAME=]records; repeatable."),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Merge models into one, by a recipe or by options."""
    limit = read_bytes(memory, "--memory")
    if out is None and not dry_run and conflicts is None:
        raise UserError("say where the model is to be written", where="--out")
    by_data.check_options(method, data or [], search or [], validate or [], out is not None and not dry_run)
    learns = method == by_data.ADAMERGING
    settings = _settings(set or [])
    changes: dict[str, Any] = {"dtype": dtype, "seed": seed, "as_adapter": as_adapter or None}
    changes["statistics"] = None if examples is None else {"examples": examples}
    changes["scores"] = None if scores is None else _numbers(scores, "--scores")
    recipe, root = _recipe(
        *(models, "task_arithmetic" if learns else method, base, weights),
        *({} if learns else settings, changes, workspace),
    )
    recipe = by_data.with_search(recipe, search or [], search_method, trials)
    if data and not learns:
        from posttrain.loop.merge_data import with_data

        # A recipe's own paths are relative to its folder.
        recipe = with_data(recipe, data if root == CURRENT_FOLDER else [_absolute(name) for name in data])
    # After the checks: a mistake in an option is reported before torch is loaded.
    from posttrain.merge.adapter_writer import estimate_adapter_seconds
    from posttrain.merge.api import check_new_folder, describe, merge, planned_merge
    from posttrain.merge.engine import estimate_seconds
    from posttrain.merge.plan import writes_adapter
    from posttrain.merge.statistics_files import needs_statistics

    if conflicts is not None:
        _write_conflicts(conflicts, recipe, root, limit, workers, json and out is None)
        if out is None:
            return
    if dry_run:
        with planned_merge(recipe, root, Path(tempfile.gettempdir())) as (plan, _):
            description = describe(plan)
            # The seconds of a merge follow from its weights alone, and not those of a model on its data.
            if not needs_statistics(plan):
                estimate = estimate_adapter_seconds if writes_adapter(plan.recipe) else estimate_seconds
                description["estimated_seconds"] = round(estimate(plan, limit, workers), 1)
        _print_plan(description, json)
        return
    assert out is not None
    suites = by_data.named_suites(validate or [], workspace)
    check_new_folder(out)
    if suites:
        by_data.check_validation(suites, recipe, root)
    learning = data or [] if learns else []
    chosen = by_data.choose_numbers(*(recipe, root, out, learning, search or [], settings), workspace, limit, workers)
    examples_of = _read_data(chosen.recipe, root)
    result = merge(chosen.recipe, out, memory=limit, workers=workers, root=root, data=examples_of)
    chosen.write(out)
    if not json and chosen.lines:
        print_line("\n".join(chosen.lines))
    kept = by_data.validate(chosen.recipe, root, out, suites, quiet=json) if suites else None
    if json:
        print_json(
            {
                "model": str(result.folder),
                "tensors": result.tensors,
                "bytes": result.bytes,
                "seconds": result.seconds,
                "peak_memory": result.peak_memory,
            }
            | ({chosen.name: chosen.report} if chosen.name else {})
            | ({"validation": kept} if kept else {})
            | ({"adapter": dict(result.adapter)} if result.adapter else {})
        )
        return
    if result.adapter:
        _print_adapter(result.adapter)
    rate = result.bytes / 1e9 / max(result.seconds, 1e-9)
    print_line(
        f"{result.tensors} tensors, {result.bytes / 1e9:.2f} GB in {result.seconds:.1f} s ({rate:.2f} GB/s), "
        f"peak memory {result.peak_memory / 2**30:.2f} GiB\n"
        f"{'adapter' if result.adapter else 'model'}: {result.folder}"
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


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise UserError(f"`{setting}` is no setting", where="--set", fix="key=value, such as density=0.5")
        values[key] = parse_yaml(text, f"--set {key}")
    return values


def _recipe(
    models: Sequence[str],
    method: str | None,
    base: str | None,
    weights: str | None,
    settings: Mapping[str, Any],
    changes: Mapping[str, Any],
    workspace: Path,
) -> tuple[Recipe, Path]:
    """Returns the recipe of the call, and the folder that its paths are relative to."""
    parameters = dict(settings)
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
    adapter = any("adapter" in tensor for tensor in tensors)
    for tensor in tensors:
        values = tensor["options"] | tensor.get("adapter", {})
        options = ", ".join(f"{name} {_short(value)}" for name, value in values.items())
        line = f"{tensor['method']}: {options}" if options else tensor["method"]
        methods[line] = methods.get(line, 0) + 1
    print_table("", ["tensors", "method"], [[count, line] for line, count in methods.items()])
    print_line(
        f"{len(tensors)} tensors of {len(description['models'])} models: reads "
        f"{description['bytes_read'] / 1e9:.2f} GB, writes {'at most ' if adapter else ''}"
        f"{description['bytes'] / 1e9:.2f} GB, "
        + (
            f"in about {description['estimated_seconds']:g} s"
            if "estimated_seconds" in description
            else "after the statistics of the models on their data"
        )
    )


def _print_adapter(adapter: Mapping[str, Any]) -> None:
    """Prints what an adapter keeps: by the kind of matrix, over all layers, and overall."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for module, matrix in adapter["matrices"].items():
        kinds.setdefault(module.rpartition(".")[2], []).append(matrix)
    rows = []
    for kind, matrices in kinds.items():
        ranks = sorted(matrix["rank"] for matrix in matrices)
        energies = sorted(matrix["energy"] for matrix in matrices)
        errors = sorted(matrix["relative_error"] for matrix in matrices)
        rows.append([kind, len(matrices), _span(ranks, "d"), _span(energies, ".4f"), _span(errors, ".3g")])
    print_table("", ["matrix", "layers", "rank", "energy", "relative error"], rows)
    print_line(
        f"energy {adapter['energy']:.4f}, relative error {adapter['relative_error']:.3g} overall, "
        f"{adapter['parameters']:,} parameters; {adapter['unchanged']} tensors unchanged, "
        f"{len(adapter['saved_whole'])} saved whole, {len(adapter['dropped'])} dropped"
    )


def _span(values: Sequence[float], format: str) -> str:
    low, high = f"{values[0]:{format}}", f"{values[-1]:{format}}"
    return low if low == high else f"{low} to {high}"


def _short(value: Any) -> str:
    return "[" + ", ".join(f"{item:g}" for item in value) + "]" if isinstance(value, list | tuple) else str(value)
