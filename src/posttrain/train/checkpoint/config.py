"""The config section for checkpoints."""

from pydantic import Field

from posttrain.store.section import Section


class CheckpointConfig(Section):
    """Checkpoints of a training: when they are saved, how they are written, and which are kept."""

    every_seconds: float | None = Field(
        60.0, gt=0, description="Seconds between checkpoints: the most work a kill can cost; null: not by the clock."
    )
    every_steps: int | None = Field(None, ge=1, description="Optimiser steps between checkpoints; null: by the clock.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    background: bool = Field(True, description="Write in the background, from a copy of the state in memory.")

    @property
    def enabled(self) -> bool:
        """True if checkpoints are written."""
        return self.every_seconds is not None or self.every_steps is not None
