"""Resolves dataset versions that the config names where it could name files."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from posttrain.data.records.record import concat
from posttrain.data.steps.step import RowStep
from posttrain.data.versions.leaks import training_records
from posttrain.data.versions.version import Version
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.store.paths import locate_path
from posttrain.store.workspace import Workspace

RESERVED_NAMES = ("pool", "test", "labelled", "train")
"""Names under which the loop keeps its own sets."""

Versions = Mapping[str, Version]
"""By the name that the config gives them."""


def resolve_versions(names: Iterable[str], root: Path, workspace: Workspace | None) -> dict[str, Version]:
    """Opens the dataset versions among ``names``.

    A name is ``support``, ``support@v2``, ``support@v2.3.1``, ``support@tag`` or an id. A file of the same name takes
    precedence, and a name with a suffix and without an ``@`` is a file's. The loop's own names stand for many versions,
    so a version must be given: ``train@v3``.

    Args:
        root: The folder that relative files start from.
        workspace: Workspace of the versions; None: there is none yet.

    Raises:
        UserError: a name is neither a file's nor a version's.
    """
    versions = {}
    for name in dict.fromkeys(names):
        if "://" in name or locate_path(root, name).exists():
            continue
        id = None if workspace is None or name in RESERVED_NAMES else _dataset_id(workspace, name)
        if id is not None and workspace is not None:
            versions[name] = Version.open(workspace.artifacts, id)
        # A missing file is reported by its reader, which knows more about it.
        elif "@" in name or not Path(name).suffix:
            fix = "check the path, or take a version that `posttrain data list` names"
            raise UserError("there is no such file, and no such dataset version", where=name, fix=fix)
    return versions


def _dataset_id(workspace: Workspace, name: str) -> str | None:
    """Returns the id of the dataset version of that name; None if there is none."""
    try:
        id = workspace.metadata.named(name) or workspace.metadata.resolve(name)
    except UserError:
        return None
    row = workspace.metadata.artifact(id)
    return id if row is not None and row.kind == "dataset" else None


def training_split(version: Version, name: str) -> pa.Table:
    """Reads the version's training split, checked for leaks, as a RECORD table; all records if nothing is held out.

    Raises:
        UserError: training and held-out records share something, or there are none to learn from.
    """
    return _require_records(training_records(version, name), name, "no training records")


def evaluation_split(version: Version, name: str, learned_from: Collection[str]) -> pa.Table:
    """Reads the version's test split as a RECORD table; all records if nothing is held out.

    Args:
        learned_from: Ids of the versions that models train on.

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
    """Returns the ids of the training records whose version was built with exactly this step."""
    ids: set[str] = set()
    for version in versions:
        # Settings are compared by digest: JSON turns tuples into lists.
        if digest(step.key()) in map(digest, version.meta.get("keys", {}).get("steps", [])):
            for table in version.tables(version.splits[0], ["id"]):
                ids.update(table["id"].to_pylist())
    return ids
