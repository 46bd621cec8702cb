"""Checks the champion's files where users read them, behind its link, and reports the roll-back that restored it."""

from dataclasses import dataclass
from typing import Any

from posttrain.loop.history import finished_rounds
from posttrain.store.artifacts import MANIFEST, find_damage, parse_manifest
from posttrain.store.errors import DamagedArtifactError
from posttrain.store.message import Message
from posttrain.store.workspace import Workspace

MEND = (
    "posttrain restore BACKUP --damaged, or put an earlier model in service: posttrain models rollback; "
    "a base model: posttrain run fetches it again"
)


@dataclass(frozen=True)
class RollbackReport:
    """A roll-back after which no other model was put in service.

    Attributes:
        round: The round whose gate decided it; None if somebody did by hand.
        source: Id of the model that went out of service, and ``source_round`` the round that trained it; 0 for the
            base model, None for a model of no finished round.
        target: Id of the model that was restored; ``target_round`` likewise.
        reason: Why, in words.
        at: When, ISO 8601.
    """

    round: int | None
    source: str
    source_round: int | None
    target: str
    target_round: int | None
    reason: str
    at: str

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values, with the sentence."""
        return {**vars(self), "sentence": self.sentence}

    @property
    def sentence(self) -> Message:
        """Says who rolled back from which model to which, and why."""
        models = {"source": (self.source_round, self.source), "target": (self.target_round, self.target)}
        values = {role: _model_name(number, id) for role, (number, id) in models.items()}
        template = "Rolled back by hand, from {source} to {target}"
        if self.round is not None:
            template = "The gate rolled back in round {round}, from {source} to {target}"
        sentence = Message(template, round=self.round, **values)
        return Message("{sentence}: {reason}", sentence=sentence, reason=self.reason) if self.reason else sentence


def _model_name(number: int | None, id: str) -> str:
    if number is None:
        return id
    return Message("the model of round {number}", number=number) if number else Message("the base model")


def last_rollback(workspace: Workspace) -> RollbackReport | None:
    """Returns the roll-back that restored the champion; None if the model was put in service otherwise."""
    deployments = workspace.metadata.deployments()
    if len(deployments) < 2 or deployments[-1].action != "rollback":
        return None
    source, target = deployments[-2:]
    rounds = {row.candidate: row.number for row in finished_rounds(workspace)}
    return RollbackReport(
        round=target.round,
        source=source.model_id,
        source_round=rounds.get(source.model_id),
        target=target.model_id,
        target_round=rounds.get(target.model_id),
        # Said already by the round that is missing.
        reason="" if target.reason == "by hand" else target.reason,
        at=target.created_at.isoformat(timespec="seconds"),
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
