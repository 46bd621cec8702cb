"""What finished rounds leave to later ones: datasets, evaluations, labels."""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from posttrain.evaluate.suite import read_evaluation
from posttrain.loop.state import RoundState
from posttrain.store.rows import Round
from posttrain.store.workspace import Workspace


def finished_rounds(workspace: Workspace) -> list[Round]:
    """Rounds that are done, in order."""
    return [row for row in workspace.metadata.rounds() if row.status == "done"]


def carried_dataset(workspace: Workspace) -> str:
    """The training set that the next round builds on; labels that were set aside are not in it."""
    return str(RoundState.of(finished_rounds(workspace)[-1]).carry)


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
    evaluations: list[str] = []
    evaluation_of: dict[str | None, str] = {}
    restored = {row.round: row.model_id for row in workspace.metadata.deployments() if row.action == "rollback"}
    for row in finished_rounds(workspace):
        state = RoundState.of(row)
        evaluation_of[state.candidate] = str(state.evaluation)
        action = state.decision["action"] if state.decision else None
        champion = state.champion_evaluation or ""
        if action == "rollback":
            evaluations.append(evaluation_of.get(restored.get(row.number), champion))
        else:
            evaluations.append(champion if action == "refuse" else str(state.evaluation))
    return _results(workspace, evaluations, labels_given(workspace))


def candidate_results(workspace: Workspace) -> tuple[CandidateResult, ...]:
    """The model that each finished round trained, refused ones too, and the labels that it learned from."""
    states = [RoundState.of(row) for row in finished_rounds(workspace)]
    labels = [state.labels or 0 for state in states]
    return _results(workspace, [str(state.evaluation) for state in states], labels)


def labels_given(workspace: Workspace) -> list[int]:
    """Labels given until the end of each finished round, those that were set aside too."""
    given, aside = [], 0
    for row in finished_rounds(workspace):
        state = RoundState.of(row)
        given.append((state.labels or 0) + aside)
        aside += (state.labels_new or 0) if state.set_aside else 0
    return given


def _results(workspace: Workspace, evaluations: list[str], labels: list[int]) -> tuple[CandidateResult, ...]:
    results = []
    for row, count, id in zip(finished_rounds(workspace), labels, evaluations, strict=True):
        predictions = next(iter(read_evaluation(workspace.artifacts.path(id)).values())).predictions
        results.append(CandidateResult(row.number, count, float(np.mean(predictions["score"].to_numpy())), id))
    return tuple(results)
