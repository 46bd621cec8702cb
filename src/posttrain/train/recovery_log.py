"""The log beside the checkpoints: rollbacks and smaller micro-batches, so that the next attempt knows them."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.store.files import write_atomically

_LOG_FILE = "notes.json"


# The fields are names on disk: a training that an older version began resumes from them.
@dataclass
class RecoveryLog:
    """Everything the next attempt of a training has to know before it reads a checkpoint.

    Decisions without a rollback are in the checkpoints alone: an attempt that starts before them decides the same.

    Args:
        auto_budget: tokens of a micro-batch where the config says ``auto``; None before that was decided.
        fitting_budget: the most tokens of a micro-batch since memory ran out; None if it has not.
        course: the interventions at the last rollback, as JSON; they override a checkpoint with fewer rollbacks.
        decisions: all decisions up to then, as JSON, oldest first.
        untold: those of them that no line of the metrics file reports.
        back_to: the step to roll back to; None once that is done.
        ended: all decisions when the monitor stopped the training, as JSON; empty otherwise.
    """

    auto_budget: int | None = None
    fitting_budget: int | None = None
    course: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    untold: list[dict[str, Any]] = field(default_factory=list)
    back_to: int | None = None
    ended: list[dict[str, Any]] = field(default_factory=list)

    def limit_tokens(self, tokens: int) -> int:
        """Limit the tokens of a micro-batch to what memory has held."""
        return tokens if self.fitting_budget is None else min(tokens, self.fitting_budget)

    def write(self, folder: Path) -> None:
        """Write the log into a training's folder."""
        write_atomically(folder / _LOG_FILE, json.dumps(asdict(self)).encode())


def read_recovery_log(folder: Path) -> RecoveryLog:
    """Read the log of a training's folder; a fresh one if there is none."""
    file = folder / _LOG_FILE
    return RecoveryLog(**json.loads(file.read_bytes())) if file.exists() else RecoveryLog()
