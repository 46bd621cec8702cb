"""Shards as artifacts of the store, which versions share."""

import logging
import os
from pathlib import Path

from posttrain.data.versions.shard import Shard
from posttrain.data.versions.stored_version import Version
from posttrain.store.errors import DamagedArtifact
from posttrain.store.workspace import Workspace

log = logging.getLogger("posttrain")


def shards_of(version: Version | None) -> dict[str, Path]:
    """Folders of a version's shards by their keys; without those that are damaged, which are made again."""
    if version is None or version.whole:
        return {}
    found = {}
    for id in dict.fromkeys(id for ids in version.meta["phases"] for id in ids):
        try:
            shard = Shard.open(version.path(id))
        except DamagedArtifact as error:
            log.warning("%s; making it again", error)
            continue
        found[shard.key] = shard.folder
    return found


def commit_shard(workspace: Workspace, shard: Shard) -> str:
    """The artifact that holds a shard."""
    if shard.folder.name != shard.key:
        return shard.folder.name
    with workspace.artifacts.stage() as folder:
        for file in sorted(shard.folder.iterdir()):
            os.link(file, folder / file.name)
        meta = {"rows": shard.rows, "piece": shard.piece}
        artifact = workspace.artifacts.commit(folder, "records", meta)
    workspace.metadata.add_artifact(artifact)
    return artifact.id
