"""The config section ``ema``; loads no torch."""

from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.section import Section


class EmaConfig(Section):
    """The moving average of the weights (Polyak & Juditsky 1992); it takes four bytes a trained weight."""

    decay: float | None = Field(
        None, ge=0, lt=1, description="How much of the average a step leaves; none: no average. 0.999 is usual."
    )
    start: int = Field(0, ge=0, description="Steps before the average begins.")
    every: int = Field(1, ge=1, description="Steps from one update of the average to the next.")
    save: bool = Field(True, description="Save the averaged weights as the model, not the last ones.")

    def check(self, steps: int) -> None:
        """Raise a UserError if an average that is to be saved would not begin in a training of ``steps`` steps."""
        if self.decay is not None and self.save and self.start + self.every > steps:
            raise UserError(
                f"the average would first be updated after {self.start + self.every} steps, and training has {steps}",
                where="train.ema.start",
                fix="begin earlier, train longer, or set train.ema.save=false",
            )
