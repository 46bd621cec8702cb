"""Reads the results of finished rounds: datasets, evaluations, labels."""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from posttrain.evaluate.suite import read_evaluation
from posttrain.label.quality.config import VALUE_NAMES
from posttrain.label.queue import Queue
from posttrain.loop.adjust import STAGE as ADJUST
from posttrain.loop.adjust import with_adjustments
from posttrain.loop.config import Config
from posttrain.loop.state import RoundState
from posttrain.loop.tuning import Tuning, last_tuned, with_tuning
from posttrain.store.rows import Round
from posttrain.store.workspace import Workspace


def finished_rounds(workspace: Workspace) -> list[Round]:
    """Returns the rounds that are done, in order."""
    return [row for row in workspace.metadata.rounds() if row.status == "done"]


def finished_states(workspace: Workspace) -> list[RoundState]:
    """Returns the states of the rounds that are done, in order."""
    return [RoundState.from_row(row) for row in finished_rounds(workspace)]


def parent_dataset(workspace: Workspace) -> str:
    """Returns the training set that the next round builds on; discarded labels are not in it."""
    return str(finished_states(workspace)[-1].next_parent)


def adjusted_config(workspace: Workspace, config: Config) -> Config:
    """Returns the config as the rules of finished rounds have adjusted it, without the settings that they tuned."""
    states = finished_states(workspace)
    return with_adjustments(config, [record for state in states for record in state.results.get(ADJUST, ())])


def round_config(workspace: Workspace, config: Config) -> Config:
    """Returns the config that the next round begins with, or the one in progress: adjusted, and with tuned settings."""
    return with_tuning(adjusted_config(workspace, config), last_tuning(workspace))


def last_tuning(workspace: Workspace) -> Tuning | None:
    """Returns what the last search of settings in a finished round decided; None before the first."""
    return last_tuned(finished_states(workspace))


def days_since_training(workspace: Workspace) -> float:
    """Returns the days since the last training ended; infinite before the first."""
    ends = [run.finished_at for run in workspace.metadata.runs(stage="train", status="done") if run.finished_at]
    if not ends:
        return float("inf")
    return (datetime.now(UTC) - max(ends)).total_seconds() / 86400


def label_values(workspace: Workspace, config: Config, names: set[str]) -> dict[str, float]:
    """Computes the quality of the labels in the queue for rules that use it.

    Args:
        workspace: The workspace.
        config: Its config.
        names: The values that the rules need.

    Returns:
        The values of `posttrain.label.quality.config.VALUE_NAMES`, NaN where nothing is measured; empty if ``names``
        has none of them.
    """
    if names.isdisjoint(VALUE_NAMES):
        return {}
    # Only here: it imports scipy's statistics, which no other rule needs.
    from posttrain.label.quality.queue_report import queue_values

    return queue_values(Queue(workspace.metadata, config.label.queue))


@dataclass(frozen=True)
class CandidateResult:
    """A model of a round, with the number of labels until then and its score.

    Attributes:
        round: Number of the round.
        labels: Number of labels until the end of the round.
        value: Mean score on the main suite's records.
        evaluation: Id of the evaluation.
    """

    round: int
    labels: int
    value: float
    evaluation: str


def champion_results(workspace: Workspace) -> tuple[CandidateResult, ...]:
    """Returns the result of the model in service after each finished round."""
    evaluations: list[str] = []
    evaluation_of: dict[str | None, str] = {}
    restored = {row.round: row.model_id for row in workspace.metadata.deployments() if row.action == "rollback"}
    for row in finished_rounds(workspace):
        state = RoundState.from_row(row)
        evaluation_of[state.candidate] = str(state.evaluation)
        champion = state.champion_evaluation or ""
        if state.action == "rollback":
            # Neither of the round's two models is in service now, but the one that the rollback restored.
            evaluations.append(evaluation_of.get(restored.get(row.number), champion))
        else:
            evaluations.append(champion if state.action == "refuse" else str(state.evaluation))
    return _results(workspace, evaluations, label_counts(workspace))


def candidate_results(workspace: Workspace) -> tuple[CandidateResult, ...]:
    """Returns the result of the model that each finished round trained, refused ones too."""
    states = finished_states(workspace)
    labels = [state.labels or 0 for state in states]
    return _results(workspace, [str(state.evaluation) for state in states], labels)


def label_counts(workspace: Workspace) -> list[int]:
    """Returns the number of labels until the end of each finished round, discarded ones too."""
    counts, discarded = [], 0
    for state in finished_states(workspace):
        # Training sets hold no discarded labels, but people were paid for them.
        counts.append((state.labels or 0) + discarded)
        discarded += (state.labels_new or 0) if state.discards_labels else 0
    return counts


def _results(workspace: Workspace, evaluations: list[str], labels: list[int]) -> tuple[CandidateResult, ...]:
    results = []
    for row, count, id in zip(finished_rounds(workspace), labels, evaluations, strict=True):
        predictions = next(iter(read_evaluation(workspace.artifacts.path(id)).values())).predictions
        results.append(CandidateResult(row.number, count, float(np.mean(predictions["score"].to_numpy())), id))
    return tuple(results)
