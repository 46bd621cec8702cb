"""Checks from the records alone that no split leaks another, whatever code made the splits."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Self

import pyarrow as pa

from posttrain.data.records.provenance import origin_ids
from posttrain.data.records.record import locations
from posttrain.data.similarity.evaluation_index import EvaluationIndex, Match
from posttrain.data.similarity.overlap_sketch import overlap_sketch
from posttrain.data.split import SplitsConfig
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.step import DataStep
from posttrain.data.versions.recipe import Recipe
from posttrain.data.versions.version import Version
from posttrain.store.errors import UserError

log = logging.getLogger("posttrain")

_TRAIN = "train"
_ROWS_A_CHUNK = 4096  # whose n-grams are held in memory


_NO_TABLES: Mapping[str, pa.Table] = {}


_DEFAULT_NGRAM = 13


@dataclass(frozen=True)
class Leak:
    """Names a record of one split that overlaps with one of another.

    Attributes:
        reason: Category of what is shared.
        splits: Names of the two.
        locations: ``file:line`` of the two records, in the order of the splits.
        detail: The beginning of a sentence that ends with the second record.
    """

    reason: str
    splits: tuple[str, str]
    locations: tuple[str, str]
    detail: str

    def __str__(self) -> str:
        (first, second), (location, other) = self.splits, self.locations
        return f"{location} ({first}): {self.detail} {other} ({second})"


def find_leaks(
    tables: Mapping[str, pa.Table], threshold: float | None = 0.8, ngram: int | None = 13, *, group: bool = True
) -> list[Leak]:
    """Finds every record that shares something with a record of another split, and the first or closest such one.

    The check reads nothing but the records, by the rules of `posttrain.data.steps.decontaminate.Decontaminate`; derived
    records also share their origin. Between two held-out splits runs of words do not count.

    Args:
        tables: RECORD table of each split by its name.
        threshold: Jaccard similarity from which inputs are alike; None: only equal ones are.
        ngram: Words in a run; None: runs are not looked for.
        group: True if a shared group is a leak.
    """
    # Training first, so that it is the searched side of every pair.
    order = sorted(tables, key=lambda name: name != _TRAIN)
    leaks = []
    for first, second in combinations(order, 2):
        # Two held-out splits may share wording; no model learns from it.
        runs = ngram if first == _TRAIN else None
        index = EvaluationIndex.from_records(tables[second], threshold, runs)
        index = index if group else replace(index, groups={})
        families = {family: row for row, family in reversed([*enumerate(_origin_ids(tables[second]))])}
        for start in range(0, tables[first].num_rows, _ROWS_A_CHUNK):
            chunk = tables[first].slice(start, _ROWS_A_CHUNK)
            sketches = overlap_sketch(chunk, threshold, runs)
            matches = index.search(sketches, chunk.take, exact=True).best
            for row, family in enumerate(_origin_ids(chunk)):
                if family in families:
                    matches.setdefault(row, Match(families[family], "origin", "has an origin in common with"))
            where = locations(chunk)
            leaks += [
                Leak(match.reason, (first, second), (where[row], index.where[match.other]), match.detail)
                for row, match in sorted(matches.items())
            ]
    return leaks


def require_no_leaks(
    tables: Mapping[str, pa.Table],
    version: str,
    threshold: float | None = 0.8,
    ngram: int | None = 13,
    *,
    group: bool = True,
    fix: str = "the step `decontaminate` removes such records from training",
) -> None:
    """Raises a UserError if a split is empty or overlaps with another.

    Args:
        version: Name of the records in errors.
        fix: Advice in the error about a leak.

    Raises:
        UserError: an empty split, or a leak: how many there are, and the first.
    """
    for name, table in tables.items():
        if not table.num_rows:
            raise UserError(f"the split `{name}` is empty", where=version, fix="give it a share, or more records")
    leaks = find_leaks(tables, threshold, ngram, group=group)
    if leaks:
        (leaking, other), first = leaks[0].splits, leaks[0]
        # Records, not leaks: one record may overlap with several others.
        count = len({leak.locations[0] for leak in leaks if leak.splits == first.splits})
        records = f"1 record of {leaking} overlaps" if count == 1 else f"{count:,} records of {leaking} overlap"
        raise UserError(f"{records} with {other}, the first: {first}", where=version, fix=fix)


def _origin_ids(table: pa.Table) -> list[str]:
    """Returns the id of the record that each row was derived from; its own if there is none."""
    origins = origin_ids(table).to_pylist()
    return [origin or id for origin, id in zip(origins, table["id"].to_pylist(), strict=True)]


def training_records(
    version: Version, name: str, evaluation: Mapping[str, pa.Table] = _NO_TABLES, steps: Sequence[DataStep] = ()
) -> pa.Table:
    """Reads a version's training records, and checks that they leak no evaluation record.

    Args:
        name: Name of the version in errors.
        evaluation: RECORD tables of the loop's evaluation records, by name, which a set of the loop must not leak.
        steps: The loop's steps, one of which may separate the two.

    Raises:
        UserError: training and held-out records share something, or there are no training records.
    """
    if version.whole:
        records = version.records()
        require_no_overlap(records, evaluation, name, steps)
        return records
    held_out = [split for split in version.splits[1:] if version.count(split)]
    records = version.records(version.splits[0])
    # Without held-out records there is nothing that could leak.
    if held_out:
        recipe = Recipe.model_validate(version.meta["recipe"])
        check = LeakCheck.from_steps(recipe.steps, recipe.splits)
        _check_leaks(
            [{version.splits[0]: records, **{split: version.records(split) for split in held_out}}], name, check
        )
    return records


def require_no_overlap(
    records: pa.Table, evaluation: Mapping[str, pa.Table], name: str, steps: Sequence[DataStep]
) -> None:
    """Raises a UserError if the training records share something with records that models are measured on.

    Args:
        records: RECORD table of the training records.
        evaluation: RECORD tables by name, each compared with the training records only.
        name: Name of the training records in errors.
        steps: The steps that they went through, one of which may have separated the two.

    Raises:
        UserError: they share something; names both places.
    """
    pairs = [{"train": records, source: table} for source, table in evaluation.items() if table.num_rows]
    if records.num_rows and pairs:
        _check_leaks(pairs, name, LeakCheck.from_steps(steps, None))


@dataclass(frozen=True)
class LeakCheck:
    """Settings of the leak check before training, besides equal inputs and common origins.

    Attributes:
        threshold: Jaccard similarity from which inputs are alike; None: only equal ones are.
        ngram: Words in a run that must not be shared.
        group: True if a shared group is a leak.
        fix: Advice for the error message.
    """

    threshold: float | None
    ngram: int
    group: bool
    fix: str

    @classmethod
    def from_steps(cls, steps: Sequence[DataStep], splits: SplitsConfig | None) -> Self:
        """Takes the stricter of the recipe's `decontaminate` and its split; either may be absent."""
        step = next((step for step in steps if isinstance(step, Decontaminate)), None)
        thresholds = [step.threshold if step else None, splits.near_duplicates if splits else None]
        threshold = min((value for value in thresholds if value is not None), default=None)
        # No setting of the step loosens the check: a model must never train on what it is measured on.
        ngram = step.ngram if step and step.ngram is not None else _DEFAULT_NGRAM
        group = splits is None or splits.group
        return cls(threshold, ngram, group, _suggest_fix(step, threshold, ngram))

    @property
    def disabled_checks(self) -> str | None:
        """The checks that the settings switch off; None if there are none."""
        checks = [] if self.group else ["shared groups (`splits.group` is false)"]
        checks += [] if self.threshold is not None else ["near duplicates (no threshold is set)"]
        return " and ".join(checks) or None


def _check_leaks(splits: Sequence[Mapping[str, pa.Table]], name: str, check: LeakCheck) -> None:
    for tables in splits:
        require_no_leaks(tables, name, check.threshold, check.ngram, group=check.group, fix=check.fix)
    if check.disabled_checks:
        log.warning("%s: the check before training does not look for %s", name, check.disabled_checks)


def _suggest_fix(step: Decontaminate | None, threshold: float | None, ngram: int) -> str:
    """Names the settings with which `decontaminate` removes all that the check finds."""
    if step is None:
        return "the step `decontaminate` removes such records from training"
    changes: dict[str, float] = {}
    if threshold is not None and (step.threshold is None or step.threshold > threshold):
        changes["threshold"] = threshold
    if step.ngram is None:
        changes["ngram"] = ngram
    if not changes:
        return "`decontaminate` removes such records from training when the version is built again"
    settings = ", ".join(f"{name}: {value:g}" for name, value in changes.items())
    return f"`decontaminate: {{{settings}}}` removes such records from training; its settings let them pass"
