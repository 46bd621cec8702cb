"""Finds and removes what no dataset version needs any more."""

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.versions.build_version import STAGE
from posttrain.data.versions.version import Version
from posttrain.store.rows import NamedVersion
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class Garbage:
    """Lists what can be removed.

    Attributes:
        versions: names to forget.
        artifacts: ids of datasets and shards to delete, in a safe order.
        size: bytes of these artifacts.
    """

    versions: Sequence[NamedVersion]
    artifacts: Sequence[str]
    size: int


def find_garbage(workspace: Workspace, keep: int | None = None) -> Garbage:
    """Finds old versions, and shards that no version holds.

    Tagged versions stay, and so do versions that a run used: a model's lineage leads to them.

    Args:
        keep: how many of the newest versions of each name stay; None: all.
    """
    metadata = workspace.metadata
    versions: list[NamedVersion] = []
    for name in dict.fromkeys(version.name for version in metadata.names()):
        built = [version for version in metadata.names(name) if version.semantic]
        for version in built[: max(0, len(built) - keep)] if keep is not None else []:
            if not version.tags and not metadata.consumers(version.artifact_id):
                versions.append(version)
    forgotten = {(version.name, version.version) for version in versions}
    named = {version.artifact_id for version in metadata.names() if (version.name, version.version) not in forgotten}
    datasets = [id for id in {version.artifact_id for version in versions} if id not in named]
    dropped = set(datasets)
    held: set[str] = set()
    for row in metadata.artifacts("dataset"):
        if row.id not in dropped and workspace.artifacts.exists(row.id):
            dataset = Version.open(workspace.artifacts, row.id)
            held.update(id for ids in dataset.meta.get("phases", []) for id in ids)
    known = {row.id for row in metadata.artifacts()}
    loose = [row.id for row in metadata.artifacts("records") if row.id not in held]
    loose += [id for id in workspace.artifacts.ids() if id.startswith("records-") and id not in known | held]
    sizes = {row.id: row.size for row in metadata.artifacts()}
    # Datasets go before the shards that they refer to.
    artifacts = [*sorted(datasets), *loose]
    return Garbage(versions, artifacts, sum(sizes.get(id, 0) for id in artifacts))


def remove_garbage(workspace: Workspace, garbage: Garbage) -> None:
    """Forgets the versions, then deletes their artifacts and the scratch folders of failed builds."""
    for named in garbage.versions:
        # Names go first: a kill leaves artifacts without a name, never a name without its artifact.
        workspace.metadata.forget_version(named.name, named.version)
    for id in garbage.artifacts:
        workspace.metadata.forget_artifact(id)
        workspace.artifacts.delete(id)
    for run in workspace.metadata.runs():
        if run.stage == STAGE and run.status != "done":
            workspace.drop_scratch(run.key)
