"""What finished rounds left behind for the next one."""

from datetime import UTC, datetime

from posttrain.loop.turn import Turn
from posttrain.store.records import Round
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


def known_inputs(turn: Turn, dataset: str) -> set[str]:
    """Input ids of a dataset version."""
    return set(turn.dataset(dataset).records["input_id"].to_pylist())
