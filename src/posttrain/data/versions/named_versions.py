"""Dataset versions that stand where the config could name files."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pyarrow as pa

from posttrain.data.records.schema import concat
from posttrain.data.split.training_records import training_records
from posttrain.data.steps.step import RowStep
from posttrain.data.versions.stored_version import Version
from posttrain.store.errors import UserError
from posttrain.store.hashing import digest
from posttrain.store.workspace import Workspace

OF_THE_LOOP = ("pool", "test", "labelled", "train")
"""Names under which the loop keeps its own sets."""

Versions = Mapping[str, Version]
"""By the name that the config gives them."""


def versions_named(names: Iterable[str], root: Path, workspace: Workspace | None) -> dict[str, Version]:
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
        id = None if workspace is None or name in OF_THE_LOOP else _id(workspace, name)
        if id is not None and workspace is not None:
            found[name] = Version.open(workspace.artifacts, id)
        elif "@" in name or not Path(name).suffix:
            fix = "check the path, or take a version that `posttrain data list` names"
            raise UserError("there is no such file, and no such dataset version", where=name, fix=fix)
    return found


def _id(workspace: Workspace, name: str) -> str | None:
    """The id of the dataset version of that name; None if there is none."""
    try:
        id = workspace.metadata.named(name) or workspace.metadata.resolve(name)
    except UserError:
        return None
    row = workspace.metadata.artifact(id)
    return id if row is not None and row.kind == "dataset" else None


def records_to_learn_from(version: Version, name: str) -> pa.Table:
    """RECORD table of the version's training side, once the split is proven; of all records where nothing is held out.

    Raises:
        UserError: training and held-out records share something, or there are none to learn from.
    """
    return _some(training_records(version, name), name, "no training records")


def records_to_test_on(version: Version, name: str, learned_from: Collection[str]) -> pa.Table:
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
        return _some(version.records(), name, "no records")
    return _some(version.records("test"), name, "no test records")


def _some(records: pa.Table, name: str, what: str) -> pa.Table:
    if not records.num_rows:
        raise UserError(
            f"the version holds {what}", where=name, fix="name another, or build one with `data.splits.test`"
        )
    return concat([records])


def been_through(versions: Iterable[Version], step: RowStep) -> set[str]:
    """Ids of the records to learn from that the making of their version has put through exactly this step."""
    ids: set[str] = set()
    for version in versions:
        if digest(step.key()) in map(digest, version.meta.get("keys", {}).get("steps", [])):
            for table in version.tables(version.splits[0], ["id"]):
                ids.update(table["id"].to_pylist())
    return ids
