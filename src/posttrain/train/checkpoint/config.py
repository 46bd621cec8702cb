"""The config section for checkpoints."""

from typing import Literal

from pydantic import Field

from posttrain.store.section import Section


class CheckpointConfig(Section):
    """Checkpoints of a training: when they are saved, how they are written, and which are kept."""

    every_seconds: float | None = Field(
        60.0, gt=0, description="Seconds between checkpoints: the most work a kill can cost; null: not by the clock."
    )
    every_steps: int | None = Field(None, ge=1, description="Optimiser steps between checkpoints; null: by the clock.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: bool = Field(False, description="Also keep the one with the best metric.")
    mode: Literal["min", "max"] = Field("min", description="Best metric: the lowest or the highest.")
    keep_every: int | None = Field(None, ge=1, description="Also keep every checkpoint whose step this divides.")
    background: bool = Field(True, description="Write in the background, from a copy of the state in memory.")
    when_busy: Literal["wait", "skip"] = Field(
        "wait", description="Wait for a checkpoint that is still being written, or skip the new one."
    )

    @property
    def enabled(self) -> bool:
        """True if checkpoints are to be written."""
        return self.every_seconds is not None or self.every_steps is not None
