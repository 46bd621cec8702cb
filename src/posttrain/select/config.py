"""The config section ``select``."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from posttrain.select.strategies import STRATEGIES, nearest_strategy
from posttrain.store.section import Section


class SelectConfig(Section):
    """Which pool records are worth a label."""

    strategy: str = Field(
        default="uncertain_diverse",
        description="How records are chosen: " + ", ".join(sorted(STRATEGIES)) + ".",
    )
    cold_start: str = Field(
        default="diverse",
        description="Strategy while no champion has been trained, so its probabilities say little.",
    )
    pool_sample: int = Field(default=2000, ge=1, description="At most so many pool records are scored, drawn by seed.")
    explore: float = Field(default=0.1, ge=0, le=1, description="Share of the batch that is drawn at random.")
    focus: float = Field(
        default=0.25, ge=0, le=1, description="Share of the batch kept for what evaluation found weakest."
    )

    @field_validator("strategy", "cold_start")
    @classmethod
    def _strategy_is_known(cls, name: str) -> str:
        if name not in STRATEGIES:
            raise ValueError(f"no strategy `{name}`; did you mean `{nearest_strategy(name)}`?")
        return name

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.explore + self.focus > 1:
            raise ValueError("explore and focus together exceed the whole batch (1.0)")
        return self
