"""``posttrain merge``: merges models into one, by a recipe or by the options."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli import merge_by_data as by_data
from posttrain.cli.merge_call import absolute_name, read_bytes, read_data, read_numbers, read_settings, recipe_of_call
from posttrain.cli.merge_tables import print_adapter, print_plan
from posttrain.cli.output import JsonOption, print_json, print_line
from posttrain.cli.workspace import CURRENT_FOLDER, WorkspaceOption
from posttrain.merge.methods.registry import METHODS
from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError
from posttrain.store.message import counted

if TYPE_CHECKING:
    from posttrain.merge.conflicts import ConflictReport
    from posttrain.tune.merges.importance import ModelImportance
    from posttrain.tune.merges.validation import Validation


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            help="One recipe (YAML, mergekit's too), or models: folders, Hub ids, .gguf files, MODEL+ADAPTER, s3:// "
            "folders, or names of models in the workspace, such as champion."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the merged model; required, but for --dry-run and --conflicts.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help=f"Merge method: {', '.join(METHODS.builtin)}; linear by default.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The model that all were trained from.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="One weight per model, such as 0.3,0.7, or auto to compute them from scores and Fisher norms."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Records for methods that need data and for --weights auto; repeatable, a file per model."),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of records read from each file; 256 by default.")
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            help="Score of each model for --weights auto, such as 0.85,0.90; computed from --data by default."
        ),
    ] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="An option of the method, such as density=0.5; repeatable.")
    ] = None,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Write the merged task vector as a LoRA adapter on the base.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the base's by default.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of methods that draw; 0 by default.")] = None,
    align: Annotated[
        str | None,
        typer.Option(
            help="`weights` permutes hidden units to match before merging, for models of different initialisation."
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Upper limit of the weights in memory, such as 2GiB or 500MB.")] = "2GiB",
    workers: Annotated[int | None, typer.Option(min=1, help="Parallel processes; one per core by default.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with an estimate, and write nothing.")
    ] = False,
    conflicts: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page about the weights in which the models conflict; needs --base."),
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            help="Search for the settings that score highest on suites or records, FILE or NAME=FILE; repeatable."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Merges that a search measures; 30 by default.")] = None,
    validate: Annotated[
        list[str] | None,
        typer.Option(help="Measure what the merge kept on suites or records, FILE or NAME=FILE; repeatable."),
    ] = None,
    workspace: WorkspaceOption = CURRENT_FOLDER,
    json: JsonOption = False,
) -> None:
    """Merge models into one, by a recipe or by options: posttrain merge A B --method ties --base C --out DIR."""
    limit = read_bytes(memory, "--memory")
    if out is None and not dry_run and conflicts is None:
        raise UserError("say where to write the model", where="--out")
    by_data.check_options(search or [], validate or [], out is not None and not dry_run)
    changes: dict[str, Any] = {"dtype": dtype, "seed": seed, "as_adapter": as_adapter or None, "align": align}
    changes["statistics"] = None if examples is None else {"examples": examples}
    changes["scores"] = None if scores is None else read_numbers(scores, "--scores")
    recipe, root = recipe_of_call(models, method, base, weights, read_settings(set or []), changes, workspace)
    recipe = by_data.with_search(recipe, search or [], trials)
    by_data.check_records(recipe, data or [])
    measures_importance = recipe.method == by_data.BY_IMPORTANCE and bool(data)
    if data and not measures_importance:
        from posttrain.tune.merges.data import with_data

        # A recipe's own paths are relative to its folder.
        recipe = with_data(recipe, data if root == CURRENT_FOLDER else [absolute_name(name) for name in data])
    # After the checks: a mistake in an option is reported before torch is loaded.
    from posttrain.merge.adapter_writer import estimate_adapter_seconds
    from posttrain.merge.api import describe, merge, planned_merge
    from posttrain.merge.engine import estimate_seconds
    from posttrain.merge.output_folder import check_new_folder
    from posttrain.merge.plan import writes_adapter
    from posttrain.merge.plan_statistics import needs_statistics

    measured = None
    if conflicts is not None:
        measured = _write_conflicts(conflicts, recipe, root, limit, workers)
        if out is None or not json:
            _print_conflicts(conflicts, measured, json)
        if out is None:
            return
    importances: list[ModelImportance] = []
    if measures_importance:
        from posttrain.tune.merges.importance import measured_recipe

        if out is not None and not dry_run:
            check_new_folder(out)  # before the work of measuring
        parent = None if out is None else out.absolute().parent
        recipe, importances = measured_recipe(recipe, root, data or [], parent)
    if dry_run:
        with planned_merge(recipe, root, Path(tempfile.gettempdir())) as (plan, _):
            description = describe(plan)
            # The seconds of a merge follow from its weights alone, and not those of a model on its data.
            if not needs_statistics(plan):
                estimate = estimate_adapter_seconds if writes_adapter(plan.recipe) else estimate_seconds
                description["estimated_seconds"] = round(estimate(plan, limit, workers), 1)
        if importances:
            description["importance"] = [importance.to_dict() for importance in importances]
        print_plan(description, json)
        return
    assert out is not None
    suites = by_data.named_suites(validate or [], workspace)
    check_new_folder(out)
    if suites:
        by_data.check_validation(suites, recipe, root)
    searched = None
    if recipe.search is not None:
        searched = by_data.search_numbers(recipe, root, out, search or [], workspace, limit, workers)
        recipe = searched.recipe
    result = merge(recipe, out, memory=limit, workers=workers, root=root, data=read_data(recipe, root))
    if searched is not None:
        by_data.write_search(searched, out)
        if not json:
            print_line("\n".join(searched.lines()))
    kept = by_data.validate(recipe, root, out, suites, quiet=json) if suites else None
    if conflicts is not None and measured is not None and kept is not None:
        _write_page(conflicts, measured, kept)
    if json:
        print_json(
            {
                "model": str(result.folder),
                "tensors": result.tensors,
                "bytes": result.bytes,
                "seconds": result.seconds,
                "peak_memory": result.peak_memory,
            }
            | ({"search": searched.to_dict()} if searched else {})
            | ({"validation": kept.to_dict()} if kept else {})
            | ({"adapter": dict(result.adapter)} if result.adapter else {})
        )
        return
    if result.adapter:
        print_adapter(result.adapter)
    rate = result.bytes / 1e9 / max(result.seconds, 1e-9)
    print_line(
        f"{counted(result.tensors, 'tensor')}, {result.bytes / 1e9:.2f} GB in {result.seconds:.1f} s "
        f"({rate:.2f} GB/s), peak memory {result.peak_memory / 2**30:.2f} GiB\n"
        f"{'adapter' if result.adapter else 'model'}: {result.folder}"
    )


def _write_conflicts(path: Path, recipe: Recipe, root: Path, memory: int, workers: int | None) -> "ConflictReport":
    from posttrain.merge.conflicts import recipe_conflicts
    from posttrain.web.page import check_page_file

    check_page_file(path)
    if recipe.base is None or recipe.slices:
        fix = "name the model that all were trained from" if not recipe.slices else "leave out the slices"
        raise UserError("compares task vectors of whole models", where="--conflicts", fix=fix)
    report = recipe_conflicts(recipe, root, memory, workers)
    _write_page(path, report)
    return report


def _write_page(path: Path, report: "ConflictReport", validation: "Validation | None" = None) -> None:
    from posttrain.tune.merges.report import merge_page
    from posttrain.web.page import write_page

    write_page(path, lambda detail: merge_page(report, validation))


def _print_conflicts(path: Path, report: "ConflictReport", json: bool) -> None:
    from posttrain.merge.recommendation import describe_conflicts, recommend, warnings_of

    if json:
        print_json(describe_conflicts(report))
        return
    method, reason = recommend(report)
    print_line("\n".join([*warnings_of(report), f"recommended: {method} ({reason})", f"page: {path}"]))
