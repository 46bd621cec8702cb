"""Searches the numbers of a recipe by the merged model's score on suites: a study whose trials are merges."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.evaluate.bootstrap import paired_scores
from posttrain.evaluate.paired_interval import Interval, paired_interval
from posttrain.merge.api import merge, planned_merge
from posttrain.merge.engine import MEMORY
from posttrain.merge.output_folder import scratch_folder
from posttrain.merge.recipe import Recipe
from posttrain.models.language_model import load_language_model
from posttrain.models.precision import choose_precision
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError
from posttrain.store.files import remove_tree, write_atomically
from posttrain.store.hashing import digest
from posttrain.tune.api import optimize
from posttrain.tune.context import TrialContext
from posttrain.tune.goal import Goal
from posttrain.tune.merges.data import read_examples
from posttrain.tune.merges.search_space import search_space, with_values
from posttrain.tune.merges.suites import (
    MergeSuite,
    local_models,
    local_recipe,
    read_merge_suites,
    score_suite,
    score_suites,
)
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.runs import open_trials
from posttrain.tune.trial import Trial, TrialState

_PARTS = 4  # in which a suite is read

_LEAST_RECORDS = 8  # of a suite: half of them is searched on

_SCORES_FILE = "scores.json"  # in a trial's folder: for each part that was read, the sum of each suite's scores


@dataclass(frozen=True)
class SearchReport:
    """The outcome of a search of a recipe.

    Attributes:
        recipe: the recipe with the best numbers.
        best: the trial with the highest score.
        trials: all trials, in their order.
        scores: score of the first and of the best recipe by suite, on records that the search has not seen.
        gains: best minus first on these records, with intervals.
    """

    recipe: Recipe
    best: Trial
    trials: Sequence[Trial]
    scores: Mapping[str, Mapping[str, float]]
    gains: Mapping[str, Interval]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form."""
        return {
            "best": dict(self.best.settings),
            "score_searched_on": self.best.latest,
            "trials": len(self.trials),
            "stopped_early": sum(trial.state is not TrialState.FINISHED for trial in self.trials),
            "held_out": {name: {**scores, "gain": vars(self.gains[name])} for name, scores in self.scores.items()},
        }

    def lines(self) -> list[str]:
        """Returns the sentences for people."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.best.settings.items())
        score = f"score {self.best.latest:.4f} on the records searched on"
        lines = [f"best of {len(self.trials)} merges: {numbers}; {score}"]
        for name, gain in self.gains.items():
            scores = self.scores[name]
            lines.append(
                f"{name}, records not searched on: {scores['best']:.4f}, {scores['first']:.4f} as the recipe had it "
                f"({gain.difference:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}])"
            )
        return lines


def search_recipe(
    recipe: Recipe,
    root: Path,
    study: Path,
    suites: Sequence[str | MergeSuite] = (),
    *,
    suites_root: Path | None = None,
    memory: int = MEMORY,
    workers: int | None = None,
) -> SearchReport:
    """Searches the recipe's numbers, as its key ``search`` says.

    Each suite's records are put in an order of their hashes and halved: the trials are scored on the first half, and
    the first and the best recipe on the other, whose scores the choice has not made better than they are. A trial
    merges into a temporary folder, whose inputs stay in the page cache where they fit in memory, and reads the records
    in parts; successive halving (ASHA) ends it after a part where others are better. The score is the mean over the
    suites.

    Args:
        recipe: the recipe, with ``search``.
        root: the folder that its paths are relative to.
        study: folder of the study, from which a killed search resumes.
        suites: in place of ``search.suites``; see `read_merge_suites`.
        suites_root: the folder that ``suites`` are relative to; ``root`` by default.
        memory: see `merge`; ``workers`` too.

    Raises:
        UserError: there is nothing to search, a suite cannot be read, or the study is of another search.
        WorkError: the first trials have all failed.
    """
    config = recipe.search
    assert config is not None, "the caller has checked it"
    files, files_root = (suites, suites_root or root) if suites else (config.suites, root)
    if not files:
        raise UserError("names no suites", where="search.suites", fix="give files of records with answers")
    space, point = search_space(recipe)
    with scratch_folder(study.absolute().parent) as scratch:
        folders = local_models(recipe, root, scratch)
        halves = [_halves(suite) for suite in read_merge_suites(files, files_root, folders)]
        searched, held_out = [half[0] for half in halves], [half[1] for half in halves]
        local, data, precision = local_recipe(recipe, folders), read_examples(recipe, root), choose_precision()
        with planned_merge(with_values(local, point), root, scratch):
            pass  # all that can be wrong is named before the first trial

        def merged(values: Mapping[str, float]) -> Path:
            out = scratch / "trial"
            remove_tree(out)
            merge(with_values(local, values), out, memory=memory, workers=workers, data=data)
            return out

        def measure(trial: TrialContext) -> None:
            file = trial.folder / _SCORES_FILE
            parts: list[list[float]] = json.loads(file.read_text()) if file.exists() else []
            lm = load_language_model(merged(trial.settings), TaskConfig(), precision)
            # A run that continues reports its last part again, as a kill may have come before that report.
            for number in range(max(len(parts), 1), _PARTS + 1):
                if number > len(parts):
                    results = (score_suite(lm, _part(suite, number)) for suite in searched)
                    parts.append([math.fsum(result.predictions["score"].to_pylist()) for result in results])
                    write_atomically(file, json.dumps(parts).encode())
                trial.report(number, _mean_score(parts[:number], searched))

        objectives = Objectives((Objective("score", maximize=True),))
        identity = {
            "recipe": digest(recipe.model_dump(mode="json", exclude={"search"})),
            "suites": digest([suite.digest for suite in searched]),
            "precision": precision,
        }
        result = optimize(
            lambda: open_trials("inline", measure),
            Goal(space, objectives, identity),
            budget=config.trials,
            sampler=config.sampler,
            scheduler={"name": "asha", "max_resource": _PARTS, "eta": 2},
            current=point,
            seed=recipe.seed,
            out=study,
        )
        best = result.best
        assert best is not None, "a study without a value ends in an error"
        ends = {
            name: score_suites(merged(values), held_out, precision)
            for name, values in (("first", point), ("best", best.settings))
        }
    gains, scores = {}, {}
    for suite in held_out:
        tables = {name: results[suite.name] for name, results in ends.items()}
        scores[suite.name] = {name: table.metrics[table.paired] for name, table in tables.items()}
        pair = paired_scores(tables["best"].predictions, tables["first"].predictions)
        gains[suite.name] = paired_interval(*pair, seed=recipe.seed)
    return SearchReport(with_values(recipe, best.settings), best, result.trials, scores, gains)


def _halves(suite: MergeSuite) -> tuple[MergeSuite, MergeSuite]:
    """Returns the half of a suite that is searched on, and the other, each in the order of the records' hashes."""
    ids = suite.records["id"].to_pylist()
    if len(ids) < _LEAST_RECORDS:
        raise UserError(f"has {len(ids)} records", where=suite.name, fix=f"give at least {_LEAST_RECORDS}")
    order = sorted(range(len(ids)), key=lambda row: (hashlib.sha256(ids[row].encode()).digest(), row))
    half = math.ceil(len(ids) / 2)
    return suite.take(order[:half]), suite.take(order[half:])


def _rows(suite: MergeSuite, number: int) -> range:
    """Returns the records of a part, of which the first has the number 1."""
    count = suite.records.num_rows
    return range(count * (number - 1) // _PARTS, count * number // _PARTS)


def _part(suite: MergeSuite, number: int) -> MergeSuite:
    return suite.take(_rows(suite, number))


def _mean_score(parts: Sequence[Sequence[float]], suites: Sequence[MergeSuite]) -> float:
    """Returns the mean over the suites of their mean scores on the parts that were read, given as sums."""
    means = [
        math.fsum(part[column] for part in parts) / _rows(suite, len(parts)).stop for column, suite in enumerate(suites)
    ]
    return math.fsum(means) / len(means)
