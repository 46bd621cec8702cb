"""Resolves dataset versions that the config names where it could name files, and checks their records for leaks."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from posttrain.data.contamination.decontaminate import Decontaminate
from posttrain.data.records.schema import concat
from posttrain.data.split import SplitsConfig
from posttrain.data.split.leaks import require_no_leaks
from posttrain.data.steps.step import RowStep
from posttrain.data.versions.recipe import Recipe
from posttrain.data.versions.version import Version
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.store.workspace import Workspace

RESERVED_NAMES = ("pool", "test", "labelled", "train")
"""Names under which the loop keeps its own sets."""

Versions = Mapping[str, Version]
"""By the name that the config gives them."""

log = logging.getLogger("posttrain")

_NO_TABLES: Mapping[str, pa.Table] = {}

_DEFAULT_NGRAM = 13

_STRICT_STEP = Decontaminate()


def resolve_versions(names: Iterable[str], root: Path, workspace: Workspace | None) -> dict[str, Version]:
    """Opens the dataset versions among ``names``.

    A name is ``support``, ``support@v2``, ``support@v2.3.1``, ``support@tag`` or an id.

    A file of the same name takes precedence, and a name with a suffix and without an ``@`` is a file's. The loop's own
    names stand for many versions, so a version must be given: ``train@v3``.

    Args:
        root: the folder that relative files start from.
        workspace: where versions are looked up; None: there is none yet.

    Raises:
        UserError: a name is neither a file's nor a version's.
    """
    versions = {}
    for name in dict.fromkeys(names):
        if "://" in name or (root / Path(name).expanduser()).exists():
            continue
        id = None if workspace is None or name in RESERVED_NAMES else _dataset_id(workspace, name)
        if id is not None and workspace is not None:
            versions[name] = Version.open(workspace.artifacts, id)
        elif "@" in name or not Path(name).suffix:
            fix = "check the path, or take a version that `posttrain data list` names"
            raise UserError("there is no such file, and no such dataset version", where=name, fix=fix)
    return versions


def _dataset_id(workspace: Workspace, name: str) -> str | None:
    """Id of the dataset version of that name; None if there is none."""
    try:
        id = workspace.metadata.named(name) or workspace.metadata.resolve(name)
    except UserError:
        return None
    row = workspace.metadata.artifact(id)
    return id if row is not None and row.kind == "dataset" else None


def training_side(version: Version, name: str) -> pa.Table:
    """RECORD table of the version's training split, checked for leaks; of all records if nothing is held out.

    Raises:
        UserError: training and held-out records share something, or there are none to learn from.
    """
    return _require_records(training_records(version, name), name, "no training records")


def evaluation_side(version: Version, name: str, learned_from: Collection[str]) -> pa.Table:
    """RECORD table of the version's test split; of all records if nothing is held out.

    Args:
        learned_from: ids of the versions that models train on.

    Raises:
        UserError: it is empty, or it was not split and models train on it.
    """
    if version.whole or len(version.splits) == 1:
        if version.id in learned_from:
            fix = "build it with `data.splits`, or test on another version"
            raise UserError("models train on all its records, as it holds none out", where=name, fix=fix)
        return _require_records(version.records(), name, "no records")
    return _require_records(version.records("test"), name, "no test records")


def _require_records(records: pa.Table, name: str, what: str) -> pa.Table:
    if not records.num_rows:
        raise UserError(
            f"the version holds {what}", where=name, fix="name another, or build one with `data.splits.test`"
        )
    return concat([records])


def ids_processed_by(versions: Iterable[Version], step: RowStep) -> set[str]:
    """Ids of the training records whose version was built with exactly this step."""
    ids: set[str] = set()
    for version in versions:
        # Settings are compared by digest: JSON turns tuples into lists.
        if digest(step.key()) in map(digest, version.meta.get("keys", {}).get("steps", [])):
            for table in version.tables(version.splits[0], ["id"]):
                ids.update(table["id"].to_pylist())
    return ids


def training_records(
    version: Version, name: str, measured: Mapping[str, pa.Table] = _NO_TABLES, step: Decontaminate | None = None
) -> pa.Table:
    """Reads a version's training records, and checks that they leak no evaluation record.

    Args:
        name: what errors call the version.
        measured: RECORD tables of what the loop measures on, by name, which a set of the loop's must not give away.
        step: step that the loop separates them with; None: it does not.

    Raises:
        UserError: training and held-out records share something, or there are no training records.
    """
    if version.whole:
        records = version.records()
        require_no_overlap(records, measured, name, step)
        return records
    held_out = [split for split in version.splits[1:] if version.count(split)]
    records = version.records(version.splits[0])
    # Without held-out records there is nothing that could leak.
    if held_out:
        recipe = Recipe.model_validate(version.meta["recipe"])
        check = LeakCheck.of(recipe.decontamination, recipe.splits)
        _check_leaks(
            [{version.splits[0]: records, **{split: version.records(split) for split in held_out}}], name, check
        )
    return records


def require_no_overlap(
    records: pa.Table, measured: Mapping[str, pa.Table], name: str, step: Decontaminate | None
) -> None:
    """Raises a UserError if the training records share something with records that models are measured on.

    Args:
        records: RECORD table of the training records.
        measured: RECORD tables by name, each compared with the training records only.
        name: what errors call the training records.
        step: step that separated them; None: nothing did.

    Raises:
        UserError: they share something; names both places.
    """
    pairs = [{"train": records, what: table} for what, table in measured.items() if table.num_rows]
    if records.num_rows and pairs:
        _check_leaks(pairs, name, LeakCheck.of(step, None))


@dataclass(frozen=True)
class LeakCheck:
    """Settings of the leak check before training, besides equal inputs and common origins.

    Attributes:
        threshold: Jaccard similarity from which inputs are alike; None: only equal ones are.
        ngram: words in a run that must not be shared.
        group: whether a shared group is a leak.
        fix: advice for the error message.
    """

    threshold: float | None
    ngram: int
    group: bool
    fix: str

    @staticmethod
    def of(step: Decontaminate | None, splits: SplitsConfig | None) -> "LeakCheck":
        """Takes the stricter of the recipe's step and its split; either may be absent."""
        thresholds = [step.threshold if step else None, splits.near_duplicates if splits else None]
        threshold = min((value for value in thresholds if value is not None), default=None)
        # No setting of the step loosens the check: a model must never train on what it is measured on.
        ngram = step.ngram if step and step.ngram is not None else _DEFAULT_NGRAM
        group = splits is None or splits.group
        return LeakCheck(threshold, ngram, group, _suggest_fix(step, threshold, ngram))

    @property
    def left_out(self) -> str | None:
        """Names the checks that the settings switch off; None if there are none."""
        off = [] if self.group else ["shared groups (`splits.group` is false)"]
        off += [] if self.threshold is not None else ["near duplicates (no threshold is set)"]
        return " and ".join(off) or None


def _check_leaks(splits: Sequence[Mapping[str, pa.Table]], name: str, check: LeakCheck) -> None:
    for tables in splits:
        require_no_leaks(tables, name, check.threshold, check.ngram, group=check.group, fix=check.fix)
    if check.left_out:
        log.warning("%s: the check before training does not look for %s", name, check.left_out)


def _suggest_fix(step: Decontaminate | None, threshold: float | None, ngram: int) -> str:
    """Names the settings with which `decontaminate` removes all that the check finds."""
    if step is None:
        return "the step `decontaminate` takes such records from training"
    wanted: dict[str, float] = {}
    if threshold is not None and (step.threshold is None or step.threshold > threshold):
        wanted["threshold"] = threshold
    if step.ngram is None:
        wanted["ngram"] = ngram
    if step.share > 0:
        wanted["share"] = 0
    if step.ignore_above is not None and step.ignore_above < (_STRICT_STEP.ignore_above or 0):
        wanted["ignore_above"] = _STRICT_STEP.ignore_above or 0
    if not wanted:
        return "`decontaminate` takes such records from training where the version is built again"
    settings = ", ".join(f"{name}: {value:g}" for name, value in wanted.items())
    return f"`decontaminate: {{{settings}}}` takes such records from training; its settings let them pass"
