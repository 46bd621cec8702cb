"""The config section ``select``."""

from typing import Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from posttrain.select.selection import select
from posttrain.select.selectors.pool import Column
from posttrain.select.selectors.registry import FIT_FOR_COLD_START, STRATEGIES
from posttrain.store.errors import UserError
from posttrain.store.nearest import did_you_mean
from posttrain.store.section import Section

_FIT_FOR_COLD_START = ", ".join(FIT_FOR_COLD_START[:-1]) + f" or {FIT_FOR_COLD_START[-1]}"


class SelectConfig(Section):
    """Which pool records are worth a label."""

    strategy: str = Field(
        default="uncertain_diverse",
        description="How records are chosen: " + ", ".join(sorted(STRATEGIES)) + ".",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the strategy, such as pool_factor of uncertain_diverse."
    )
    cold_start: str = Field(
        default="diverse",
        description="Strategy while no champion has been trained, so its probabilities say nothing: "
        + _FIT_FOR_COLD_START
        + ".",
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
            raise ValueError(f"no strategy `{name}`; {did_you_mean(name, STRATEGIES)}")
        return name

    @field_validator("cold_start")
    @classmethod
    def _cold_start_asks_no_model(cls, name: str) -> str:
        if name not in FIT_FOR_COLD_START:
            raise ValueError(
                f"strategy `{name}` goes by what the champion is unsure of, and none has been trained yet; "
                f"use {_FIT_FOR_COLD_START}"
            )
        return name

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.explore + self.focus > 1:
            raise ValueError("explore and focus together exceed the whole batch (1.0)")
        return self

    def check(self, has_labels: bool, where: str = "select.strategy") -> None:
        """Raise a UserError if the strategy cannot work on this task, or with its options.

        Args:
            has_labels: whether the task has a closed label set.
            where: what the error names.
        """
        if not has_labels and "margin" in (self.strategy, self.options.get("by")):
            raise UserError(
                "strategy `margin` goes by the two most probable labels, and free text has none",
                where=where,
                fix="use entropy or least_confidence, or set `task.labels`",
            )
        try:
            select(self.strategy, self._example(has_labels), 2, **self.options)
        except UserError as error:
            raise UserError(error.what, where=where, fix=error.fix) from None
        except (TypeError, ValueError) as error:
            raise UserError(
                f"strategy `{self.strategy}` cannot work with these options: {error}", where=where
            ) from None

    def _example(self, has_labels: bool) -> dict[str, Column]:
        """A score table of a few rows, with the columns that the loop's has."""
        rows = 8
        quotas = self.options.get("quotas")
        sources = list(quotas) if isinstance(quotas, dict) and quotas else ["a file"]
        numbers = {
            name: np.linspace(0.1, 0.9, rows) for name in ("entropy", "least_confidence", "margin", "confidence")
        }
        words = {"source": np.resize(np.array(sources, dtype=object), rows), "predicted": np.resize(["a", "b"], rows)}
        probabilities = {"probabilities": np.eye(rows)[:, :4] * 0.8 + 0.05} if has_labels else {}
        return {**numbers, **words, **probabilities, "cost": np.arange(1.0, rows + 1), "embeddings": np.eye(rows)}
