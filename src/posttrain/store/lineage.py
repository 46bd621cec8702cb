"""Walks from an artifact to its ancestors and descendants."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from posttrain.store.metadata import Metadata
from posttrain.store.rows import ArtifactRow, Run


@dataclass(frozen=True)
class Relative:
    """An artifact some steps away.

    Attributes:
        depth: steps between it and the artifact asked for, by the shortest way; 0 is the artifact itself.
        run: the first finished run that made it; None if none is known.
    """

    depth: int
    artifact: ArtifactRow
    run: Run | None


def ancestors(metadata: Metadata, id: str) -> list[Relative]:
    """The artifact and all that it was made from, nearest first; each once.

    What lies outside the store, such as a file known by its digest, is seen only in the runs' ``inputs``.
    """

    def parents(artifact_id: str) -> list[str]:
        return [input for run in metadata.producers(artifact_id) for input in run.inputs.values()]

    return _breadth_first(metadata, id, parents)


def descendants(metadata: Metadata, id: str) -> list[Relative]:
    """The artifact and all that was made from it, nearest first; each once."""

    def children(artifact_id: str) -> list[str]:
        return [run.output for run in metadata.consumers(artifact_id) if run.status == "done" and run.output]

    return _breadth_first(metadata, id, children)


def _breadth_first(metadata: Metadata, id: str, step: Callable[[str], Iterable[str]]) -> list[Relative]:
    relatives: list[Relative] = []
    seen = {id}
    level = [id]
    depth = 0
    while level:
        following: list[str] = []
        for artifact_id in level:
            artifact = metadata.artifact(artifact_id)
            if artifact is None:
                continue
            producers = metadata.producers(artifact_id)
            relatives.append(Relative(depth, artifact, producers[0] if producers else None))
            for other in step(artifact_id):
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        level, depth = following, depth + 1
    return relatives
