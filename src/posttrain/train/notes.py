"""What a training decided on its way that no kill may undo, and that its next attempt has to know from the start."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.store.files import write_atomically

_FILE = "notes.json"


@dataclass
class Notes:
    """Decisions of one training.

    Args:
        left_out: steps whose gradients are dropped.
        rate_factor: what every learning rate is multiplied by.
        token_budget: tokens of a micro-batch; None before it was decided.
        decisions: all that the watch decided, as JSON, oldest first.
    """

    left_out: list[int] = field(default_factory=list)
    rate_factor: float = 1.0
    token_budget: int | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def leave_out(self, steps: Iterable[int]) -> None:
        """Drop the gradients of these steps, whenever they are met."""
        self.left_out = sorted({*self.left_out, *steps})

    def write(self, folder: Path) -> None:
        """Keep them in a training's folder."""
        write_atomically(folder / _FILE, json.dumps(asdict(self)).encode())


def read_notes(folder: Path) -> Notes:
    """What `Notes.write` kept there; fresh ones where nothing was."""
    file = folder / _FILE
    return Notes(**json.loads(file.read_bytes())) if file.exists() else Notes()
