"""Chooses the numbers of a recipe by data: by the merged model's score on suites, or by AdaMerging without answers."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.evaluate.bootstrap import Interval, paired_bootstrap, paired_scores
from posttrain.merge.adamerging import (
    AdaMergingConfig,
    LearnedCoefficients,
    UnlabelledTask,
    elected_task_vectors,
    learn_coefficients,
)
from posttrain.merge.api import merge, planned_merge
from posttrain.merge.engine import MEMORY
from posttrain.merge.output_folder import scratch_folder
from posttrain.merge.recipe import Recipe
from posttrain.merge.search import SearchResult, search
from posttrain.merge.search_space import search_space, with_values
from posttrain.merge.trials import Scores
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.task import TaskConfig, record_turns
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree
from posttrain.tune.merges.data import read_examples
from posttrain.tune.merges.suites import (
    MergeSuite,
    local_models,
    local_recipe,
    read_merge_suites,
    score_suite,
    score_suites,
)

log = logging.getLogger("posttrain")

_PARTS = 4  # in which a suite is read

_LEAST_RECORDS = 8  # of a suite: half of them is searched on


@dataclass(frozen=True)
class SearchReport:
    """The outcome of a search of a recipe.

    Attributes:
        recipe: the recipe with the best numbers.
        result: all trials.
        scores: score of the first and of the best recipe by suite, on records that the search has not seen.
        gains: best minus first on these records, with intervals.
    """

    recipe: Recipe
    result: SearchResult
    scores: Mapping[str, Mapping[str, float]]
    gains: Mapping[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        best = self.result.best
        return {
            "best": best.values,
            "score_searched_on": best.score,
            "first_score_searched_on": self.result.trials[0].score,
            "trials": len(self.result.trials),
            "stopped_early": sum(trial.stopped for trial in self.result.trials),
            "end": self.result.end,
            "held_out": {name: {**scores, "gain": vars(self.gains[name])} for name, scores in self.scores.items()},
        }


def search_recipe(
    recipe: Recipe,
    root: Path,
    journal: Path,
    suites: Sequence[str | MergeSuite] = (),
    *,
    suites_root: Path | None = None,
    memory: int = MEMORY,
    workers: int | None = None,
) -> SearchReport:
    """Searches the recipe's numbers, as its key ``search`` says.

    Each suite's records are put in an order of their hashes and halved: the trials are scored on the first half, and
    the first and the best recipe on the other, whose scores the choice has not made better than they are. Each trial
    is merged into a temporary folder, whose inputs stay in the page cache where they fit in memory, and read in parts
    (see `search` for when it is stopped). The score is the mean over the suites.

    Args:
        recipe: the recipe, with ``search``.
        root: the folder that its paths are relative to.
        journal: file of the finished trials, from which a killed search resumes.
        suites: in place of ``search.suites``; see `read_merge_suites`.
        suites_root: the folder that ``suites`` are relative to; ``root`` by default.
        memory: see `merge`; ``workers`` too.

    Raises:
        UserError: there is nothing to search, a suite cannot be read, or the journal is of another search.
    """
    config = recipe.search
    assert config is not None, "the caller has checked it"
    files, files_root = (suites, suites_root or root) if suites else (config.suites, root)
    if not files:
        raise UserError("names no suites", where="search.suites", fix="give files of records with answers")
    variables = search_space(recipe)
    with scratch_folder(journal.absolute().parent) as scratch:
        folders = local_models(recipe, root, scratch)
        halves = [_halves(suite) for suite in read_merge_suites(files, files_root, folders)[0]]
        searched, held_out = [half[0] for half in halves], [half[1] for half in halves]
        local, data = local_recipe(recipe, folders), read_examples(recipe, root)
        precision = choose_precision()

        def merged(values: Mapping[str, float]) -> Path:
            out = scratch / "trial"
            remove_tree(out)
            merge(with_values(local, values), out, memory=memory, workers=workers, data=data)
            return out

        def evaluate(values: Mapping[str, float]) -> Iterator[Scores]:
            log.info("  %s", ", ".join(f"{name} {value:g}" for name, value in values.items()))
            lm = load_language_model(merged(values), TaskConfig(), precision)
            for part in range(_PARTS):
                yield [
                    score_suite(lm, piece).predictions["score"].to_pylist() if piece.records.num_rows else []
                    for piece in (_part(suite, part) for suite in searched)
                ]

        result = search(
            evaluate,
            variables,
            [suite.records.num_rows for suite in searched],
            method=config.method,
            trials=config.trials,
            patience=config.patience,
            seed=recipe.seed,
            journal=journal,
            settings={
                "recipe": recipe.model_dump(mode="json", exclude={"search"}),
                "suites": [suite.digest for suite in searched],
                "precision": precision,
            },
        )
        ends = {
            name: score_suites(merged(trial.values), held_out, precision)
            for name, trial in (("first", result.trials[0]), ("best", result.best))
        }
    gains, scores = {}, {}
    for suite in held_out:
        tables = {name: results[suite.name] for name, results in ends.items()}
        scores[suite.name] = {name: table.metrics[table.paired] for name, table in tables.items()}
        pair = paired_scores(tables["best"].predictions, tables["first"].predictions)
        gains[suite.name] = paired_bootstrap(*pair, seed=recipe.seed)
    return SearchReport(with_values(recipe, result.best.values), result, scores, gains)


def adamerge(
    recipe: Recipe,
    root: Path,
    scratch: Path,
    data: Sequence[str | MergeSuite],
    config: AdaMergingConfig,
    *,
    data_root: Path | None = None,
) -> tuple[Recipe, LearnedCoefficients]:
    """Learns the coefficients of task vectors from prompts without answers; see `learn_coefficients`.

    Args:
        recipe: a recipe of task arithmetic, with the models and the base.
        root: the folder that its paths are relative to.
        scratch: the folder in which temporary files may lie.
        data: records or suites, whose answers are not read; see `read_merge_suites`.
        config: steps and the like.
        data_root: the folder that ``data`` is relative to; ``root`` by default.

    Returns:
        The recipe that has the coefficients, of task arithmetic or, for AdaMerging++, of TIES; and what was learned.

    Raises:
        UserError: models or data cannot be used.
    """
    if not data:
        raise UserError("learns from data", where="adamerging", fix="name a file of records with --data")
    if recipe.slices:
        raise UserError("merges whole models", where="adamerging", fix="leave out the slices")
    # As the merge that follows: all that can be wrong is named before minutes of steps.
    with planned_merge(recipe, root, scratch):
        pass
    with scratch_folder(scratch) as temporary:
        folders = local_models(recipe, root, temporary)
        tasks = [
            UnlabelledTask(
                suite.name, suite.task, [turns for row in suite.records.to_pylist() if (turns := record_turns(row))]
            )
            for suite in read_merge_suites(data, data_root or root, folders)[0]
        ]
        assert recipe.base is not None, "task arithmetic has one, or planning had failed"
        base = folders[recipe.base, None]
        models = [folder for key, folder in folders.items() if key != (recipe.base, None)]
        if config.density is not None:
            models = elected_models(base, models, config.density, temporary)
        learned = learn_coefficients(base, models, tasks, config, recipe.seed)
    log.info("  entropy %.4f at the start, %.4f at the end", learned.first, learned.last)
    return learned.recipe(recipe, config.density), learned


def elected_models(base: Path, models: Sequence[Path], density: float, scratch: Path) -> list[Path]:
    """Writes the base plus what TIES leaves of each model's task vector, in float32; see `elected_task_vectors`.

    Args:
        base: folder of the model that all were trained from.
        models: folders of the models.
        density: share of a task vector's elements that stay.
        scratch: an existing folder, which the models are written into.
    """
    values = elected_task_vectors(density)
    folders = []
    for number in range(len(models)):
        weight = [float(other == number) for other in range(len(models))]
        values["parameters"] |= {"weight": weight}
        names = {"base": str(base.absolute()), "models": [str(model.absolute()) for model in models]}
        folders.append(scratch / f"elected-{number}")
        merge(Recipe.read({**values, **names, "dtype": "float32"}, "adamerging"), folders[-1])
    return folders


def _halves(suite: MergeSuite) -> tuple[MergeSuite, MergeSuite]:
    """Returns the half of a suite that is searched on, and the other, each in the order of the records' hashes."""
    ids = suite.records["id"].to_pylist()
    if len(ids) < _LEAST_RECORDS:
        raise UserError(f"has {len(ids)} records", where=suite.name, fix=f"give at least {_LEAST_RECORDS}")
    order = sorted(range(len(ids)), key=lambda row: (hashlib.sha256(ids[row].encode()).digest(), row))
    half = math.ceil(len(ids) / 2)
    return suite.take(order[:half]), suite.take(order[half:])


def _part(suite: MergeSuite, number: int) -> MergeSuite:
    count = suite.records.num_rows
    return suite.take(range(count * number // _PARTS, count * (number + 1) // _PARTS))
