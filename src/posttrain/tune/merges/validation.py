"""Measures what a merged model kept of each model that it is made of, and writes it beside ``merge.json``."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.evaluate.bootstrap import (
    RatioInterval,
    paired_scores,
    resampled_ratios,
)
from posttrain.evaluate.paired_interval import Interval, paired_interval
from posttrain.evaluate.retention import suite_retention
from posttrain.evaluate.suite import SuiteResult
from posttrain.merge.inputs import Key, model_keys
from posttrain.merge.output_folder import scratch_folder
from posttrain.merge.recipe import Recipe
from posttrain.models.precision import choose_precision
from posttrain.store.files import write_atomically
from posttrain.store.text_files import finite_json
from posttrain.tune.merges.suites import MergeSuite, local_models, read_merge_suites, score_suites, short_name

VALIDATION_FILE = "validation.json"

MERGED, BASE = "merged", "base"


@dataclass(frozen=True)
class SuiteValidation:
    """One suite's comparison.

    Attributes:
        metric: the metric that is the mean of the records' scores.
        records: number of records.
        scores: that metric by model, the base first and the merged one last.
        specialists: models that were trained for the suite; empty where none was.
        retention: merged / the best specialist's, or the base's where there is none, which tells what the merge kept of
            what no specialist was trained for; None where that model scores nothing, and for scores below 0
            (log-likelihoods), whose ratio means nothing.
        retention_of: the model that it is relative to; None without a base.
        over_best: merged minus the best of all single models; above 0 with its interval, the merge can do what none of
            them can (emergence). The best is chosen on the same records, which is to the merge's disadvantage.
        best: that model.
    """

    metric: str
    records: int
    scores: Mapping[str, float]
    specialists: Sequence[str]
    retention: RatioInterval | None
    retention_of: str | None
    over_best: Interval
    best: str

    @property
    def emerged(self) -> bool:
        """Returns whether the merged model is better than every single one, beyond the interval."""
        return self.over_best.low > 0


@dataclass(frozen=True)
class Validation:
    """The shares of its models' scores that a merge keeps.

    Attributes:
        suites: by name.
        average_retention: mean retention of the suites with a specialist, with the interval of its mean; None without.
        preservation: the same over suites without a specialist, relative to the base.
        precision: that all were measured in.
    """

    suites: Mapping[str, SuiteValidation]
    average_retention: RatioInterval | None
    preservation: RatioInterval | None
    precision: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form; infinite values become null."""
        suites = {name: asdict(suite) | {"emerged": suite.emerged} for name, suite in self.suites.items()}
        values: dict[str, Any] = finite_json({**asdict(self), "suites": suites})
        return values

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Returns columns and rows of a table for people."""
        models = list(next(iter(self.suites.values())).scores)
        rows = [
            [name, *suite.scores.values(), _format(suite.retention), _of(suite), _gain(suite)]
            for name, suite in self.suites.items()
        ]
        return ["suite", *models, "kept", "of", "over the best"], rows

    def lines(self) -> list[str]:
        """Returns the sentences below the table."""
        lines = []
        if self.average_retention:
            lines.append(f"kept of the specialists on average: {_format(self.average_retention)}")
        if self.preservation:
            lines.append(f"kept of the base where nobody was trained: {_format(self.preservation)}")
        lines += [f"{name}: better than every single model" for name, suite in self.suites.items() if suite.emerged]
        return lines


def validate_merge(
    recipe: Recipe,
    root: Path,
    merged: Path,
    suites: Sequence[str | MergeSuite],
    *,
    suites_root: Path | None = None,
) -> Validation:
    """Measures base, single models and the merged model on suites, and writes ``validation.json`` beside the weights.

    Args:
        recipe: the recipe that ``merged`` was made by.
        root: the folder that its paths are relative to.
        merged: the merged model.
        suites: see `read_merge_suites`.
        suites_root: the folder that the suites' files are relative to; ``root`` by default.

    Raises:
        UserError: a suite or a model cannot be read.
    """
    with scratch_folder(merged.absolute().parent) as scratch:
        folders = local_models(recipe, root, scratch)
        read = read_merge_suites(suites, suites_root or root, folders)
        precision = choose_precision()
        names = model_names(recipe)
        models = {names[key]: folder for key, folder in folders.items()}
        # The base first, and the merged model last, as in the tables of papers.
        ordered = {BASE: models.pop(BASE)} if BASE in models else {}
        ordered |= models | {MERGED: merged}
        results = {name: score_suites(folder, read, precision) for name, folder in ordered.items()}
    specialists = {suite.name: [names[key] for key in suite.specialists] for suite in read}
    validation = compare_results(results, specialists, precision)
    content = json.dumps(validation.to_dict(), indent=1, ensure_ascii=False, allow_nan=False).encode()
    write_atomically(merged / VALIDATION_FILE, content)
    return validation


def model_names(recipe: Recipe) -> dict[Key, str]:
    """Returns a name for each model of a recipe: ``base``, and the last part of the others' paths where it is theirs
    alone."""
    keys = model_keys(recipe)
    short = [short_name(key) for key in keys]
    names: dict[Key, str] = {}
    for key, name in zip(keys, short, strict=True):
        if key == (recipe.base, None):
            names[key] = BASE
        else:
            own = short.count(name) == 1 and name not in (BASE, MERGED)
            names[key] = name if own else "+".join(part for part in key if part)
    return names


def compare_results(
    results: Mapping[str, Mapping[str, SuiteResult]],
    specialists: Mapping[str, Sequence[str]],
    precision: str,
    seed: int = 0,
) -> Validation:
    """Compares the merged model with the others.

    Args:
        results: results by model and suite; ``merged`` is the merged one, ``base`` the base.
        specialists: for each suite, the models that were trained for it.
        precision: that all were measured in.
        seed: of the resamples.
    """
    suites: dict[str, SuiteValidation] = {}
    ratios: dict[str, np.ndarray] = {}
    for number, (name, trained) in enumerate(specialists.items()):
        by_model = {model: suites_of[name] for model, suites_of in results.items()}
        scores = {model: float(np.mean(result.predictions["score"].to_numpy())) for model, result in by_model.items()}
        singles = [model for model in scores if model != MERGED]
        best = max(singles, key=lambda model: scores[model])
        reference = max(trained, key=lambda model: scores[model]) if trained else BASE if BASE in scores else None
        retention = suite_retention(by_model[MERGED], by_model[reference], seed + number) if reference else None
        if reference and retention:
            pair = paired_scores(by_model[MERGED].predictions, by_model[reference].predictions)
            ratios[name] = resampled_ratios(*pair, seed=seed + number)
        suites[name] = SuiteValidation(
            metric=by_model[MERGED].paired,
            records=by_model[MERGED].predictions.num_rows,
            scores=scores,
            specialists=list(trained),
            retention=retention,
            retention_of=reference,
            over_best=paired_interval(
                *paired_scores(by_model[MERGED].predictions, by_model[best].predictions), seed=seed + number
            ),
            best=best,
        )
    trained_for = [name for name, suite in suites.items() if suite.specialists and suite.retention]
    others = [name for name, suite in suites.items() if not suite.specialists and suite.retention]
    return Validation(suites, _average(suites, ratios, trained_for), _average(suites, ratios, others), precision)


def _average(
    suites: Mapping[str, SuiteValidation], ratios: Mapping[str, np.ndarray], names: Sequence[str]
) -> RatioInterval | None:
    """Returns the mean of retentions; suites are resampled apart, as their records are others."""
    values = [retention for name in names if (retention := suites[name].retention) is not None]
    if not values:
        return None
    means = np.mean([ratios[name] for name in names], axis=0)
    low, high = np.quantile(means, [0.025, 0.975], method="nearest")
    total = math.fsum(value.ratio for value in values) / len(values)
    return RatioInterval(total, min(float(low), total), max(float(high), total), sum(value.n for value in values))


def _format(value: RatioInterval | None) -> str:
    return "" if value is None else f"{value.ratio:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _of(suite: SuiteValidation) -> str:
    return suite.retention_of or ""


def _gain(suite: SuiteValidation) -> str:
    gain = suite.over_best
    return f"{gain.difference:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
