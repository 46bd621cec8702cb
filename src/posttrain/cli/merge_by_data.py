"""``posttrain merge`` with data: searches a recipe's numbers, and measures what the merge kept."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.output import print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, open_workspace
from posttrain.merge.config import SearchConfig
from posttrain.merge.methods.registry import load_method
from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree, write_atomically

if TYPE_CHECKING:
    from posttrain.tune.merges.search import SearchReport
    from posttrain.tune.merges.suites import MergeSuite
    from posttrain.tune.merges.validation import Validation

BY_IMPORTANCE = "by_importance"


def check_options(search: Sequence[str], validate: Sequence[str], writes: bool) -> None:
    """Raises a UserError if an option needs a merged model and none is written.

    Args:
        search: values of ``--search``; ``validate`` likewise.
        writes: whether a merged model is written.
    """
    for option, values in (("--search", search), ("--validate", validate)):
        if values and not writes:
            raise UserError("needs a merged model", where=option, fix="name an --out, and leave out --dry-run")


def check_records(recipe: Recipe, data: Sequence[str]) -> None:
    """Raises a UserError if nothing reads the records."""
    methods = {recipe.method, *(rule.method for rule in recipe.layers if rule.method)}
    reads = recipe.has_auto_weights or any(load_method(name).statistic for name in methods)
    if data and not (reads or recipe.method == BY_IMPORTANCE):
        raise UserError(f"{recipe.method} needs none", where="--data", fix="leave it out")


def with_search(recipe: Recipe, files: Sequence[str], trials: int | None) -> Recipe:
    """Returns the recipe with the search that the options ask for.

    Raises:
        UserError: the trials are given without a search.
    """
    if recipe.search is None and not files:
        if trials is not None:
            fix = "name a file of suites or records with --search"
            raise UserError("there is no search", where="--trials", fix=fix)
        return recipe
    values = recipe.search.model_dump(exclude_unset=True) if recipe.search else {}
    values |= {} if trials is None else {"trials": trials}
    return recipe.model_copy(update={"search": SearchConfig.read(values, "search")})


def search_numbers(
    recipe: Recipe, root: Path, out: Path, search: Sequence[str], workspace: Path, memory: int, workers: int | None
) -> "SearchReport":
    """Searches the numbers of the recipe, in a study beside the folder that the model will be written to.

    Args:
        recipe: the recipe, with ``search``.
        root: the folder that its paths are relative to.
        out: the folder of the model.
        search: suites of the search; those of the recipe by default.
        workspace: the folder of the workspace whose suites may be named.
        memory: see `merge`; ``workers`` too.
    """
    from posttrain.tune.merges.search import search_recipe

    suites = named_suites(search, workspace)
    return search_recipe(
        recipe, root, _study_of(out), suites, suites_root=CURRENT_FOLDER, memory=memory, workers=workers
    )


def write_search(report: "SearchReport", out: Path) -> None:
    """Writes the report and the trials beside the weights, and removes the study."""
    from posttrain.tune.study import TRIALS_FILE

    study = _study_of(out)
    write_atomically(out / "search.json", json.dumps(report.to_dict(), indent=1, ensure_ascii=False).encode())
    write_atomically(out / "search.jsonl", (study / TRIALS_FILE).read_bytes())
    remove_tree(study)


def _study_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.search")


def check_validation(suites: "Sequence[str | MergeSuite]", recipe: Recipe, root: Path) -> None:
    """Raises a UserError where suites cannot be read, before any work."""
    from posttrain.tune.merges.suites import check_merge_suites

    check_merge_suites(suites, recipe, root, CURRENT_FOLDER)


def validate(recipe: Recipe, root: Path, out: Path, suites: "Sequence[str | MergeSuite]", quiet: bool) -> "Validation":
    """Measures what the merge kept, and prints it."""
    from posttrain.tune.merges.validation import validate_merge

    validation = validate_merge(recipe, root, out, suites, suites_root=CURRENT_FOLDER)
    if not quiet:
        print_table("", *validation.table())
        print_line("\n".join(validation.lines()))
    return validation


def named_suites(items: Sequence[str], workspace: Path) -> "list[str | MergeSuite]":
    """Returns files as they are, and for the name of a suite of the workspace's config that suite with its records."""
    files: list[str | MergeSuite] = []
    for item in items:
        is_file = Path(item).exists() or not re.fullmatch(r"[a-z][a-z0-9_]*", item)
        if is_file or not (workspace / ".posttrain" / "format.json").is_file():
            files.append(item)
        else:
            files.append(_workspace_suite(item, workspace))
    return files


def _workspace_suite(name: str, workspace: Path) -> "MergeSuite":
    from posttrain.loop.context import RoundContext
    from posttrain.loop.stages.collect import collect
    from posttrain.loop.suites import suite_records
    from posttrain.tune.merges.suites import MergeSuite

    with open_workspace(workspace, write=True) as (store, config), store.work():
        if name not in config.evaluate.suites:
            known = ", ".join(config.evaluate.suites)
            raise UserError(f"there is no file and no suite `{name}`", where=str(workspace), fix=f"one of {known}")
        context = RoundContext(store, config, len(store.metadata.rounds()), in_round=False)
        suite = config.evaluate.suites[name]
        records = suite_records(context, suite, collect(context).test.id)
        return MergeSuite(name, suite, config.task, records)
