"""Dataset versions named where the config could name files, and the records to train and test on, checked for leaks."""

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
    """Those of ``names`` that are dataset versions: ``support``, ``support@v2``, ``support@v2.3.1``, ``support@tag``
    or an id. A file of the same name goes first, and a name with a suffix and without an ``@`` is a file's. What the
    loop keeps under names of its own is one of many versions, which must be named: ``train@v3``.

    Args:
        root: the folder that relative files start from.
        workspace: where versions are looked up; None: there is none yet.

    Raises:
        UserError: a name is neither a file's nor a version's.
    """
    found = {}
    for name in dict.fromkeys(names):
        if "://" in name or (root / Path(name).expanduser()).exists():
            continue
        id = None if workspace is None or name in RESERVED_NAMES else _dataset_id(workspace, name)
        if id is not None and workspace is not None:
            found[name] = Version.open(workspace.artifacts, id)
        elif "@" in name or not Path(name).suffix:
            fix = "check the path, or take a version that `posttrain data list` names"
            raise UserError("there is no such file, and no such dataset version", where=name, fix=fix)
    return found


def _dataset_id(workspace: Workspace, name: str) -> str | None:
    """The id of the dataset version of that name; None if there is none."""
    try:
        id = workspace.metadata.named(name) or workspace.metadata.resolve(name)
    except UserError:
        return None
    row = workspace.metadata.artifact(id)
    return id if row is not None and row.kind == "dataset" else None


def training_side(version: Version, name: str) -> pa.Table:
    """RECORD table of the version's training side, once the split is proven; of all records where nothing is held out.

    Raises:
        UserError: training and held-out records share something, or there are none to learn from.
    """
    return _require_records(training_records(version, name), name, "no training records")


def test_side(version: Version, name: str, learned_from: Collection[str]) -> pa.Table:
    """RECORD table of the version's test side; of all records where nothing is held out.

    Args:
        learned_from: ids of the versions that models learn from.

    Raises:
        UserError: nothing is in it, or it was not split and models learn from it.
    """
    if version.whole or len(version.splits) == 1:
        if version.id in learned_from:
            fix = "build it with `data.splits`, or test on another version"
            raise UserError("models learn from all its records, as it holds none out", where=name, fix=fix)
        return _require_records(version.records(), name, "no records")
    return _require_records(version.records("test"), name, "no test records")


def _require_records(records: pa.Table, name: str, what: str) -> pa.Table:
    if not records.num_rows:
        raise UserError(
            f"the version holds {what}", where=name, fix="name another, or build one with `data.splits.test`"
        )
    return concat([records])


def ids_processed_by(versions: Iterable[Version], step: RowStep) -> set[str]:
    """Ids of the records to learn from that the making of their version has put through exactly this step."""
    ids: set[str] = set()
    for version in versions:
        if digest(step.key()) in map(digest, version.meta.get("keys", {}).get("steps", [])):
            for table in version.tables(version.splits[0], ["id"]):
                ids.update(table["id"].to_pylist())
    return ids


def training_records(
    version: Version, name: str, measured: Mapping[str, pa.Table] = _NO_TABLES, step: Decontaminate | None = None
) -> pa.Table:
    """RECORD table of a version's training records.

    Args:
        name: what errors call the version.
        measured: RECORD tables of what the loop measures on, by name, which a set of the loop's must not give away.
        step: with which the loop keeps them apart; None: it does not.

    Raises:
        UserError: training and held-out records share something, or there are no training records.
    """
    if version.whole:
        records = version.records()
        require_no_overlap(records, measured, name, step)
        return records
    held_out = [split for split in version.splits[1:] if version.count(split)]
    records = version.records(version.splits[0])
    if held_out:
        recipe = Recipe.model_validate(version.meta["recipe"])
        proof = LeakCheck.of(next((one for one in recipe.steps if isinstance(one, Decontaminate)), None), recipe.splits)
        _check_leaks(
            [{version.splits[0]: records, **{split: version.records(split) for split in held_out}}], name, proof
        )
    return records


def require_no_overlap(
    records: pa.Table, measured: Mapping[str, pa.Table], name: str, step: Decontaminate | None
) -> None:
    """Go on only if the training records give nothing away that models are measured on.

    Args:
        records: RECORD table of what is learned from.
        measured: RECORD tables by name, each held against the training records alone.
        name: what errors call the training records.
        step: with which they were taken apart; None: they were not.

    Raises:
        UserError: they share something; names both places.
    """
    pairs = [{"train": records, what: table} for what, table in measured.items() if table.num_rows]
    if records.num_rows and pairs:
        _check_leaks(pairs, name, LeakCheck.of(step, None))


@dataclass(frozen=True)
class LeakCheck:
    """What the proof looks for besides equal inputs and what was made of one record.

    Attributes:
        threshold: Jaccard similarity from which inputs are alike; None: only equal ones are.
        ngram: words in a run that must not be shared.
        group: whether a shared group is a leak.
        fix: what the user can do about a leak.
    """

    threshold: float | None
    ngram: int
    group: bool
    fix: str

    @staticmethod
    def of(step: Decontaminate | None, splits: SplitsConfig | None) -> "LeakCheck":
        """The stricter of what the recipe's step and its split are to keep apart; either may be absent."""
        asked = [step.threshold if step else None, splits.near_duplicates if splits else None]
        threshold = min((one for one in asked if one is not None), default=None)
        ngram = step.ngram if step and step.ngram is not None else _DEFAULT_NGRAM
        group = splits is None or splits.group
        return LeakCheck(threshold, ngram, group, _suggest_fix(step, threshold, ngram))

    @property
    def left_out(self) -> str | None:
        """What the settings have switched off, in words; None: nothing."""
        off = [] if self.group else ["shared groups (`splits.group` is false)"]
        off += [] if self.threshold is not None else ["near duplicates (no threshold is set)"]
        return " and ".join(off) or None


def _check_leaks(splits: Sequence[Mapping[str, pa.Table]], name: str, proof: LeakCheck) -> None:
    for tables in splits:
        require_no_leaks(tables, name, proof.threshold, proof.ngram, group=proof.group, fix=proof.fix)
    if proof.left_out:
        log.warning("%s: the check before training does not look for %s", name, proof.left_out)


def _suggest_fix(step: Decontaminate | None, threshold: float | None, ngram: int) -> str:
    """The settings with which `decontaminate` takes all that the proof finds."""
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
    said = ", ".join(f"{name}: {value:g}" for name, value in wanted.items())
    return f"`decontaminate: {{{said}}}` takes such records from training; its settings let them pass"
