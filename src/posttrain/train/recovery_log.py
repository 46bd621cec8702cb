"""The log beside the checkpoints: rollbacks and smaller micro-batches, so that the next attempt knows them."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.store.files import write_atomically

_LOG_FILE = "notes.json"


@dataclass
class RecoveryLog:
    """What a training's next attempt has to know from the start.

    Whatever a step decides without going back is in the checkpoints alone: an attempt that starts before it decides the
    same again.

    Args:
        auto_budget: tokens of a micro-batch, where they are ``auto``; None before that was decided.
        fitting_budget: tokens of a micro-batch at most since memory ran out; None where it has not.
        course: as JSON, when training last went back; it goes before that of a checkpoint with fewer turns.
        decisions: all that the watch had decided by then, as JSON, oldest first.
        untold: those of them that no line of the metrics tells.
        back_to: the step to go back to; None once that is done.
        ended: all that the watch had decided when it stopped the training, as JSON; empty otherwise.
    """

    auto_budget: int | None = None
    fitting_budget: int | None = None
    course: dict[str, Any] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    untold: list[dict[str, Any]] = field(default_factory=list)
    back_to: int | None = None
    ended: list[dict[str, Any]] = field(default_factory=list)

    def fitting(self, tokens: int) -> int:
        """As many of the tokens of a micro-batch as memory has held."""
        return tokens if self.fitting_budget is None else min(tokens, self.fitting_budget)

    def write(self, folder: Path) -> None:
        """Keep them in a training's folder."""
        write_atomically(folder / _LOG_FILE, json.dumps(asdict(self)).encode())


def read_recovery_log(folder: Path) -> RecoveryLog:
    """What `RecoveryLog.write` kept there; fresh ones where nothing was."""
    file = folder / _LOG_FILE
    return RecoveryLog(**json.loads(file.read_bytes())) if file.exists() else RecoveryLog()
