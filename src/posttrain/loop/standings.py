"""How good models were, round by round, and how many labels they took."""

from dataclasses import dataclass

import numpy as np

from posttrain.evaluate.artifact import read_evaluation
from posttrain.loop.history import finished_rounds
from posttrain.store.workspace import Workspace


@dataclass(frozen=True)
class Standing:
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


def standings(workspace: Workspace) -> tuple[Standing, ...]:
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
    return _standings(workspace, found, labels_given(workspace))


def candidates(workspace: Workspace) -> tuple[Standing, ...]:
    """The model that each finished round trained, refused ones too, and the labels that it learned from."""
    rounds = finished_rounds(workspace)
    learned = [entry.detail["labels"] for entry in rounds]
    return _standings(workspace, [entry.detail["evaluation"] for entry in rounds], learned)


def labels_given(workspace: Workspace) -> list[int]:
    """Labels that had been given until the end of each finished round, those that were set aside too."""
    found, aside = [], 0
    for entry in finished_rounds(workspace):
        found.append(entry.detail["labels"] + aside)
        aside += entry.detail["labels_new"] if entry.detail.get("set_aside") else 0
    return found


def _standings(workspace: Workspace, evaluations: list[str], labels: list[int]) -> tuple[Standing, ...]:
    found = []
    for entry, count, id in zip(finished_rounds(workspace), labels, evaluations, strict=True):
        predictions = next(iter(read_evaluation(workspace.artifacts.path(id)).values())).predictions
        found.append(Standing(entry.number, count, float(np.mean(predictions["score"].to_numpy())), id))
    return tuple(found)
