"""Checks the champion's files where users of the model read them: behind its link."""

from posttrain.store.artifacts import MANIFEST, find_damage, parse_manifest
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.workspace import Workspace

MEND = (
    "posttrain restore BACKUP --damaged, or put an earlier model in service: posttrain models rollback; "
    "a base model: posttrain run fetches it again"
)


def champion_problems(workspace: Workspace, model: str, *, checksums: bool = False) -> list[str]:
    """Compares what the champion's link leads to with the model that should be there.

    Args:
        workspace: The workspace.
        model: Id of the champion.
        checksums: False compares sizes only, which takes no time.
    """
    path = workspace.champion_path
    if not path.exists():
        return ["leads nowhere" if path.is_symlink() else "is missing"]
    folder = path.resolve()
    try:
        # Beside the files, so that a remote store need not be reached; a store of one's own may have it elsewhere.
        manifest = folder / MANIFEST
        artifact = parse_manifest(manifest.read_bytes()) if manifest.exists() else workspace.artifacts.get(model)
    except (ValueError, DamagedArtifactError):
        return [f"{MANIFEST} of {model} cannot be read"]
    if artifact.id != model:
        return [f"leads to {artifact.id}, and the champion is {model}"]
    return find_damage(folder, artifact, checksums=checksums)
