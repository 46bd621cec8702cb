"""Searches the numbers of a recipe by the merged model's score on suites."""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.evaluate.bootstrap import Interval, paired_bootstrap, paired_scores
from posttrain.merge.api import merge
from posttrain.merge.engine import MEMORY
from posttrain.merge.output_folder import scratch_folder
from posttrain.merge.recipe import Recipe
from posttrain.merge.search import SearchResult, search
from posttrain.merge.search_space import search_space, with_values
from posttrain.merge.trials import Scores
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.task import TaskConfig
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
