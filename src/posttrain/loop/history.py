"""What finished rounds leave to later ones: datasets, evaluations, labels."""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from posttrain.evaluate.suite import read_evaluation
from posttrain.store.rows import Round
from posttrain.store.workspace import Workspace


def finished_rounds(workspace: Workspace) -> list[Round]:
    """Rounds that are done, in order."""
    return [entry for entry in workspace.metadata.rounds() if entry.status == "done"]


def carried_dataset(workspace: Workspace) -> str:
    """The training set that the next round builds on; labels that were set aside are not in it."""
    return str(finished_rounds(workspace)[-1].detail["carry"])


def days_since_training(workspace: Workspace) -> float:
    """Days since the last training ended; infinite before the first."""
    ends = [run.finished_at for run in workspace.metadata.runs(stage="train", status="done") if run.finished_at]
    if not ends:
        return float("inf")
    return (datetime.now(UTC) - max(ends)).total_seconds() / 86400


@dataclass(frozen=True)
class CandidateResult:
    """A model of a round.

    Attributes:
        labels: how many it took.
        value: mean score on the main suite's records.
        evaluation: id of the artifact.
    """

    round: int
    labels: int
    value: float
    evaluation: str


def champion_results(workspace: Workspace) -> tuple[CandidateResult, ...]:
    """The model in service after each finished round."""
    found = []
    measured: dict[str | None, str] = {}
    back = {one.round: one.model_id for one in workspace.metadata.deployments() if one.action == "rollback"}
    for entry in finished_rounds(workspace):
        measured[entry.candidate] = entry.detail["evaluation"]
        action = entry.decision["action"] if entry.decision else None
        before = entry.detail.get("champion_evaluation", "")
        if action == "rollback":
            found.append(measured.get(back.get(entry.number), before))
        else:
            found.append(before if action == "refuse" else entry.detail["evaluation"])
    return _results(workspace, found, labels_given(workspace))


def candidate_results(workspace: Workspace) -> tuple[CandidateResult, ...]:
    """The model that each finished round trained, refused ones too, and the labels that it learned from."""
    rounds = finished_rounds(workspace)
    learned = [entry.detail["labels"] for entry in rounds]
    return _results(workspace, [entry.detail["evaluation"] for entry in rounds], learned)


def labels_given(workspace: Workspace) -> list[int]:
    """Labels that had been given until the end of each finished round, those that were set aside too."""
    found, aside = [], 0
    for entry in finished_rounds(workspace):
        found.append(entry.detail["labels"] + aside)
        aside += entry.detail["labels_new"] if entry.detail.get("set_aside") else 0
    return found


def _results(workspace: Workspace, evaluations: list[str], labels: list[int]) -> tuple[CandidateResult, ...]:
    found = []
    for entry, count, id in zip(finished_rounds(workspace), labels, evaluations, strict=True):
        predictions = next(iter(read_evaluation(workspace.artifacts.path(id)).values())).predictions
        found.append(CandidateResult(entry.number, count, float(np.mean(predictions["score"].to_numpy())), id))
    return tuple(found)
