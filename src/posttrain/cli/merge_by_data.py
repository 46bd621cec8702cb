"""``posttrain merge`` with data: searches a recipe's numbers, and measures what the merge kept."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.output import print_line, print_table
from posttrain.cli.workspace import CURRENT_FOLDER, open_workspace
from posttrain.merge.config import SearchConfig
from posttrain.merge.methods.registry import load_method
from posttrain.merge.recipe import Recipe
from posttrain.store.errors import UserError
from posttrain.store.files import write_atomically

if TYPE_CHECKING:
    from posttrain.tune.merges.suites import MergeSuite
    from posttrain.tune.merges.validation import Validation

BY_IMPORTANCE = "by_importance"

_MEASURES = ("gradient", "ablation")


@dataclass(frozen=True)
class ChosenRecipe:
    """A recipe whose numbers were searched.

    Attributes:
        recipe: the recipe, which gives the same model without the data.
        report: for JSON and for the file beside the model, whose name is ``name``.
        lines: for people.
        journal: file of the trials, which moves into the model's folder.
    """

    recipe: Recipe
    name: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    journal: Path | None = None

    def write(self, out: Path) -> None:
        """Writes the report and the trials beside the weights."""
        if self.name:
            content = json.dumps(self.report, indent=1, ensure_ascii=False).encode()
            write_atomically(out / f"{self.name}.json", content)
        if self.journal is not None:
            write_atomically(out / "search.jsonl", self.journal.read_bytes())
            self.journal.unlink()


def check_options(search: Sequence[str], validate: Sequence[str], writes: bool) -> None:
    """Raises a UserError if an option needs a merged model and none is written.

    Args:
        search: values of ``--search``; ``validate`` likewise.
        writes: whether a merged model is written.
    """
    for option, values in (("--search", search), ("--validate", validate)):
        if values and not writes:
            raise UserError("needs a merged model", where=option, fix="name an --out, and leave out --dry-run")


def check_records(recipe: Recipe, data: Sequence[str], measure: str | None, conflicts: Path | None) -> None:
    """Raises a UserError if nothing reads the records, or importance is to be measured in an unknown way."""
    methods = {recipe.method, *(rule.method for rule in recipe.layers if rule.method)}
    reads = recipe.has_auto_weights or any(load_method(name).statistic for name in methods)
    if data and not (reads or recipe.method == BY_IMPORTANCE or conflicts):
        raise UserError(f"{recipe.method} needs none", where="--data", fix="leave it out, or add --conflicts")
    if measure not in (None, *_MEASURES):
        raise UserError(f"is no `{measure}`", where="--measure", fix=f"one of {', '.join(_MEASURES)}")
    if measure and not (recipe.method == BY_IMPORTANCE and data):
        raise UserError("nothing is measured", where="--measure", fix=f"add --method {BY_IMPORTANCE} and --data")


def with_search(recipe: Recipe, files: Sequence[str], method: str | None, trials: int | None) -> Recipe:
    """Returns the recipe with the search that the options ask for.

    Raises:
        UserError: an option of the search is given without one.
    """
    if recipe.search is None and not files:
        if method is not None or trials is not None:
            where = "--search-method" if method is not None else "--trials"
            raise UserError("there is no search", where=where, fix="name a file of suites or records with --search")
        return recipe
    changes = {"method": method, "trials": trials}
    values = recipe.search.model_dump(exclude_unset=True) if recipe.search else {}
    values |= {name: value for name, value in changes.items() if value is not None}
    return recipe.model_copy(update={"search": SearchConfig.read(values, "search")})


def choose_numbers(
    recipe: Recipe,
    root: Path,
    out: Path,
    search: Sequence[str],
    workspace: Path,
    memory: int,
    workers: int | None,
) -> ChosenRecipe:
    """Searches the numbers of the recipe, where it is asked for.

    Args:
        recipe: the recipe, with ``search`` or without.
        root: the folder that its paths are relative to.
        out: the folder that the model will be written to.
        search: suites of the search; those of the recipe by default.
        workspace: the folder of the workspace whose suites may be named.
        memory: see `merge`; ``workers`` too.
    """
    if recipe.search is not None:
        from posttrain.tune.merges.search import search_recipe

        journal = out.with_name(f"{out.name}.search.jsonl")
        report = search_recipe(
            *(recipe, root, journal, named_suites(search, workspace)),
            suites_root=CURRENT_FOLDER,
            memory=memory,
            workers=workers,
        )
        numbers = ", ".join(f"{name} {value:g}" for name, value in report.result.best.values.items())
        lines = [
            f"best of {len(report.result.trials)} merges ({report.result.end}): {numbers}",
            f"score {report.result.best.score:.4f} on the records searched on, "
            f"{report.result.trials[0].score:.4f} as the recipe had it",
        ]
        for name, gain in report.gains.items():
            scores = report.scores[name]
            lines.append(
                f"{name}, records not searched on: {scores['best']:.4f}, {scores['first']:.4f} as the recipe had it "
                f"({gain.difference:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}])"
            )
        return ChosenRecipe(report.recipe, "search", report.to_dict(), lines, journal)
    return ChosenRecipe(recipe)


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

    with open_workspace(workspace, write=True) as (store, config), store.lock():
        if name not in config.evaluate.suites:
            known = ", ".join(config.evaluate.suites)
            raise UserError(f"there is no file and no suite `{name}`", where=str(workspace), fix=f"one of {known}")
        context = RoundContext(store, config, len(store.metadata.rounds()), in_round=False)
        suite = config.evaluate.suites[name]
        records = suite_records(context, suite, collect(context).test.id)
        return MergeSuite(name, suite, config.task, records)
