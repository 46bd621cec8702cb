"""The config section ``select``."""

from typing import Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from posttrain.select.hard_cases import ALL_KINDS, HARD_CASE_KINDS
from posttrain.select.scores.registry import (
    BASE_MEASURES,
    SCORES,
    check_score_names,
    check_scores_fit_task,
    requested_scores,
    uncertainty_sign,
)
from posttrain.select.selectors.pool import Column
from posttrain.select.selectors.registry import SELECTORS, select, selector_spec
from posttrain.select.stopping import StopConfig
from posttrain.select.strategy import AUTO, BatchStrategy, batch_strategy
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section

CHAMPION = "champion"
"""The value of ``select.embeddings`` that stands for the champion's hidden states."""


class SelectConfig(Section):
    """The choice of pool records to label."""

    strategy: str = Field(
        default=AUTO,
        description="How records are chosen: " + ", ".join(sorted(SELECTORS)) + f"; {AUTO}: coverage of the pool "
        "(facility_location) until the champion's uncertainty predicts its errors, then weighted by it; where test "
        "records that lie near each other do not share labels, random until then, and margin.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the strategy, such as pool_factor of uncertain_diverse; of auto those of "
        "facility_location.",
    )
    pool_sample: int = Field(
        default=2000,
        ge=1,
        description="The champion scores at most so many pool records, drawn by seed, and the batch.",
    )
    pool_embedded: int = Field(
        default=10_000,
        ge=0,
        description="Strategies that cover the pool (auto, facility_location, typiclust, diverse) choose from at most "
        "so many, which are embedded; the scores of those that the champion has not scored are imputed from their "
        "nearest neighbours. 0: no more than are scored.",
    )
    explore: float = Field(
        default=0.1, ge=0, le=1, description="Share of the batch drawn at random, once a model is trained."
    )
    near_duplicate: float | None = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Records as near as this (cosine of whitened embeddings) to one of the batch, or to one with a "
        "label, are chosen last; null: never.",
    )
    stop: StopConfig = Field(default=StopConfig(), description="When more labels no longer pay off.")
    focus: float = Field(default=0.25, ge=0, le=1, description="Share of the batch for what evaluation found weakest.")
    hard_cases: list[str] = Field(
        default=["wrong"],
        description="Test records whose neighbours in the pool are part of that: "
        + ", ".join(HARD_CASE_KINDS)
        + "; regressions are against the champion before, disagreement with the model it was last compared with. "
        "training_loss: the same of training records. high_entropy: pool records themselves. boundary: those that are "
        "about as near to one label as to another that the champion confuses with it.",
    )
    hard_negatives: bool = Field(
        default=False,
        description="Train on pairs, for an objective on pairs such as orpo: each record's label against that of its "
        "hard negative, the nearest record of a label that the champion confuses with it.",
    )
    scores: list[str] = Field(
        default_factory=list,
        description="Scores to compute besides those that the strategy uses: " + ", ".join(SCORES) + ".",
    )
    embeddings: str = Field(
        default=CHAMPION,
        description="Embeddings of the records: the champion's hidden states, or a sentence model, as a folder, a Hub "
        "id or `minilm`.",
    )

    @field_validator("strategy")
    @classmethod
    def _strategy_is_known(cls, name: str) -> str:
        if name != AUTO:
            if name not in SELECTORS:
                raise ValueError(f"no strategy `{name}`; {suggest(name, [*SELECTORS, AUTO])}")
            SELECTORS.check(name)
        return name

    @field_validator("hard_cases")
    @classmethod
    def _kinds_are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in ALL_KINDS:
                raise ValueError(f"no kind of hard case `{name}`; {suggest(name, ALL_KINDS)}")
        return names

    @field_validator("scores")
    @classmethod
    def _scores_are_known(cls, names: list[str]) -> list[str]:
        check_score_names(names)
        return names

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.explore + self.focus > 1:
            raise ValueError("explore and focus together exceed the whole batch (1.0)")
        return self

    def batch_strategy(self, *, cold: bool, **conditions: bool) -> BatchStrategy:
        """Returns what a batch is chosen by; see `posttrain.select.strategy.batch_strategy`."""
        return batch_strategy(self.strategy, self.options, cold=cold, **conditions)

    def embedding_limit(self, cold: bool, neighbours_share_labels: bool = True) -> int:
        """Returns the most pool records that a round embeds: more than it scores where the strategy covers the pool."""
        # A trained champion's uncertainty may still predict nothing, and `auto` covers the pool then.
        strategies = [
            self.batch_strategy(cold=cold, predicts_errors=predicts, neighbours_share_labels=neighbours_share_labels)
            for predicts in (True, False)
        ]
        covers = any(selector_spec(strategy.name).covers for strategy in strategies)
        return max(self.pool_sample, self.pool_embedded) if covers else self.pool_sample

    def wanted_scores(self) -> list[str]:
        """Returns the scores that are computed: those of the config, and the one that the strategy's options use."""
        return requested_scores(self.scores, self.options)

    def check(self, has_labels: bool, where: str = "select.strategy") -> None:
        """Raises a UserError if the strategy cannot work on this task, or with its options.

        Args:
            has_labels: the task has a closed label set.
            where: the config key that the error names.
        """
        if not has_labels and "boundary" in self.hard_cases:
            raise UserError(
                "`boundary` is between two labels, and free text has none",
                where="select.hard_cases",
                fix="leave it out, or set `task.labels`",
            )
        if not has_labels and "margin" in (self.strategy, self.options.get("by")):
            raise UserError(
                "strategy `margin` compares the two most probable labels, and free text has none",
                where=where,
                fix="use entropy or least_confidence, or set `task.labels`",
            )
        if self.strategy == "top" and "by" not in self.options:
            fix = "select.options: {by: entropy}, or another score"
            raise UserError("strategy `top` takes the greatest of a score, and none is named", where=where, fix=fix)
        check_scores_fit_task(self.wanted_scores(), has_labels, self.options)
        strategy = self.batch_strategy(cold=False, has_labels=has_labels)
        # On a few made-up rows, so that a mistake in a selector's options shows before any work.
        try:
            select(strategy.name, self._example(has_labels), 2, **strategy.options)
        except UserError as error:
            raise UserError(error.what, where=where, fix=error.fix) from None
        except (TypeError, ValueError) as error:
            message = f"strategy `{strategy.name}` cannot work with these options: {error}"
            raise UserError(message, where=where) from None

    def check_models(self) -> None:
        """Raises a UserError if the sentence model is missing; loads none."""
        if self.embeddings != CHAMPION:
            from posttrain.models.embedder_source import find_embedder

            try:
                find_embedder(self.embeddings)
            except UserError as error:
                raise UserError(str(error), where="select.embeddings") from None

    def _example(self, has_labels: bool) -> dict[str, Column]:
        """Returns a score table of a few rows, with the columns of the loop's."""
        rows = 8
        scores = [name for name in self.wanted_scores() if uncertainty_sign(name)]
        numbers = {name: np.linspace(0.1, 0.9, rows) for name in (*BASE_MEASURES, *scores)}
        probabilities = {"probabilities": np.eye(rows)[:, :4] * 0.8 + 0.05} if has_labels else {}
        return {**numbers, "predicted": np.resize(["a", "b"], rows), **probabilities, "embeddings": np.eye(rows)}
