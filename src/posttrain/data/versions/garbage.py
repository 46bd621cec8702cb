"""Find and remove what no dataset version needs any more."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.versions.build_version import STAGE
from posttrain.data.versions.version import Version
from posttrain.store.rows import NamedVersion
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class Garbage:
    """Attributes:
    versions: names that are to be forgotten.
    artifacts: ids of datasets and shards that are to be deleted, in the order in which that is safe.
    size: bytes of these artifacts.
    """

    versions: Sequence[NamedVersion]
    artifacts: Sequence[str]
    size: int


def find_garbage(workspace: Workspace, keep: int | None = None) -> Garbage:
    """Old versions, and shards that no version holds.

    Versions with a tag stay, and so does what a run used, as a model's lineage leads to it.

    Args:
        keep: how many of the newest versions of each name stay; None: all.
    """
    metadata = workspace.metadata
    versions: list[NamedVersion] = []
    for name in dict.fromkeys(one.name for one in metadata.names()):
        built = [one for one in metadata.names(name) if one.semantic]
        for one in built[: max(0, len(built) - keep)] if keep is not None else []:
            if not one.tags and not metadata.consumers(one.artifact_id):
                versions.append(one)
    forgotten = {(one.name, one.version) for one in versions}
    named = {one.artifact_id for one in metadata.names() if (one.name, one.version) not in forgotten}
    datasets = [id for id in {one.artifact_id for one in versions} if id not in named]
    dropped = set(datasets)
    held: set[str] = set()
    for row in metadata.artifacts("dataset"):
        if row.id not in dropped and workspace.artifacts.exists(row.id):
            version = Version.open(workspace.artifacts, row.id)
            held.update(id for ids in version.meta.get("phases", []) for id in ids)
    known = {row.id for row in metadata.artifacts()}
    loose = [row.id for row in metadata.artifacts("records") if row.id not in held]
    loose += [id for id in workspace.artifacts.ids() if id.startswith("records-") and id not in known | held]
    sizes = {row.id: row.size for row in metadata.artifacts()}
    artifacts = [*sorted(datasets), *loose]
    return Garbage(versions, artifacts, sum(sizes.get(id, 0) for id in artifacts))


def remove_garbage(workspace: Workspace, garbage: Garbage) -> None:
    """Forget the versions, then delete their artifacts, and what builds that failed could have gone on from."""
    for named in garbage.versions:
        workspace.metadata.forget_version(named.name, named.version)
    for id in garbage.artifacts:
        workspace.metadata.forget_artifact(id)
        workspace.artifacts.delete(id)
    for run in workspace.metadata.runs():
        if run.stage == STAGE and run.status != "done":
            workspace.drop_scratch(run.key)
