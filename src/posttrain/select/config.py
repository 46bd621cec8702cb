"""The config section ``select``."""

from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from posttrain.select.hard_cases import ALL_KINDS, HARD_CASE_KINDS, HIGH_LOSS_PERCENTILE
from posttrain.select.scores.config import ScoringConfig
from posttrain.select.scores.registry import (
    BASE_MEASURES,
    SCORES,
    check_score_names,
    check_scores_fit_task,
    requested_scores,
    uncertainty_sign,
)
from posttrain.select.selectors.pool import Column
from posttrain.select.selectors.registry import (
    COLD_START_SELECTORS,
    COVERAGE_SELECTORS,
    SELECTORS,
    select,
    selector_spec,
)
from posttrain.select.stopping import StopConfig
from posttrain.select.strategy import (
    AUTO,
    UNCERTAINTY_STRATEGY,
    WARM_STRATEGY,
    cold_start_strategy,
    warm_options,
    warm_strategy,
)
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section

_TOP = "select.options: {by: entropy}, or another score"
_FIT_FOR_COLD_START = ", ".join(COLD_START_SELECTORS[:-1]) + f" or {COLD_START_SELECTORS[-1]}"


def cold_start_error(strategy: str) -> str:
    """Returns the message that a strategy cannot be used before a model is trained."""
    return (
        f"strategy `{strategy}` uses the champion's uncertainty, and none has been trained yet; "
        f"use {_FIT_FOR_COLD_START}"
    )


class HardConfig(Section):
    """Difficulty: the percentile from which records are hard, and pairs of hard negatives for training."""

    percentile: float = Field(
        default=HIGH_LOSS_PERCENTILE,
        ge=0,
        le=100,
        description="A loss or an entropy above this percentile of all is high: for the hard cases high_loss, "
        "training_loss and high_entropy, and for `posttrain select hard`.",
    )
    negatives: bool = Field(
        default=False,
        description="Train on pairs, for an objective on pairs such as orpo: each record's label against that of its "
        "hard negative, the nearest record of a label that the champion confuses with it.",
    )


class SelectConfig(Section):
    """The choice of pool records to label."""

    strategy: str | list[str] = Field(
        default=AUTO,
        description="How records are chosen: " + ", ".join(sorted(SELECTORS)) + "; a list names one a round, the last "
        f"for all that follow; {AUTO}: cold_start until the champion's uncertainty predicts its errors, then "
        f"{WARM_STRATEGY} weighted by it, or {UNCERTAINTY_STRATEGY} where neighbours do not share labels.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the strategy, such as pool_factor of uncertain_diverse; where there is more than one "
        "strategy, by its name.",
    )
    cold_start: str = Field(
        default=AUTO,
        description="Strategy while no champion has been trained, so its probabilities say nothing: "
        + _FIT_FOR_COLD_START
        + f"; {AUTO}: {cold_start_strategy()}, or random where test records that lie near each other do not share "
        "labels.",
    )
    pool_sample: int = Field(
        default=2000,
        ge=1,
        description="The champion scores at most so many pool records, drawn by seed, and the batch.",
    )
    pool_embedded: int = Field(
        default=10_000,
        ge=0,
        description="Strategies that cover the pool ("
        + ", ".join(COVERAGE_SELECTORS)
        + ") choose from at most so many, which are embedded; the scores of those that the champion has not scored are "
        "imputed from their nearest neighbours. 0: no more than are scored.",
    )
    cost: str | None = Field(
        default=None,
        description="Column of the data with the cost of labelling a record, in any unit, for cost_aware; "
        "null: the letters of its input.",
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
    hard: HardConfig = Field(default=HardConfig(), description="What is hard, and hard negatives.")

    scores: list[str] = Field(
        default_factory=list,
        description="Scores to compute besides those that the strategy uses: " + ", ".join(SCORES) + ".",
    )
    scoring: ScoringConfig = Field(default=ScoringConfig(), description="Settings of the scores.")

    @field_validator("strategy", "cold_start")
    @classmethod
    def _strategies_are_known(cls, names: str | list[str]) -> str | list[str]:
        if not names:
            raise ValueError("name a strategy")
        for name in [names] if isinstance(names, str) else names:
            if name == AUTO != names:
                raise ValueError(f"`{AUTO}` stands alone, not in a list")
            if name not in SELECTORS and names != AUTO:
                raise ValueError(f"no strategy `{name}`; {suggest(name, [*SELECTORS, AUTO])}")
            if name != AUTO:
                SELECTORS.check(name)
        return names

    @field_validator("cold_start")
    @classmethod
    def _cold_start_needs_no_model(cls, name: str) -> str:
        if name != AUTO and selector_spec(name).needs_scores:
            raise ValueError(cold_start_error(name))
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

    @model_validator(mode="after")
    def _options_are_by_strategy(self) -> Self:
        names = {AUTO: [WARM_STRATEGY, UNCERTAINTY_STRATEGY]}.get(str(self.strategy), self.strategy)
        if isinstance(names, list):
            for name, options in self.options.items():
                if name not in names or not isinstance(options, dict):
                    raise ValueError(f"options are by strategy here, and `{name}` is none of {', '.join(names)}")
        return self

    @property
    def varies_by_round(self) -> bool:
        """Whether rounds may have different strategies."""
        return isinstance(self.strategy, list) or self.strategy == AUTO

    def for_round(self, number: int, has_labels: bool = True, neighbours_share_labels: bool = True) -> Self:
        """Returns the section with the strategy of one round, that of its cold start, and its options.

        Args:
            number: number of the round, from 1.
            has_labels: the task has a closed label set.
            neighbours_share_labels: records that lie near each other share labels, which decides what ``auto`` is.
        """
        start = cold_start_strategy(neighbours_share_labels) if self.cold_start == AUTO else self.cold_start
        if isinstance(self.strategy, str):
            name = warm_strategy(neighbours_share_labels) if self.strategy == AUTO else self.strategy
        else:
            name = self.strategy[min(max(number, 1), len(self.strategy)) - 1]
            start = start if selector_spec(name).needs_scores else name
        options = self.options.get(name, {}) if self.varies_by_round else self.options
        if self.strategy == AUTO and name == WARM_STRATEGY:
            options = warm_options(has_labels) | options
        return self.model_copy(update={"strategy": name, "options": options, "cold_start": start})

    def embedding_limit(self, number: int, cold: bool, neighbours_share_labels: bool = True) -> int:
        """Returns the most pool records that a round embeds: more than it scores where the strategy covers the pool."""
        strategies = {self._strategy_in(number, cold, neighbours_share_labels)}
        # With `auto` a trained champion's uncertainty may still predict nothing, and the round covers the pool then.
        if self.strategy == AUTO:
            strategies.add(self._strategy_in(number, True, neighbours_share_labels))
        covers = any(selector_spec(name).covers for name in strategies)
        return max(self.pool_sample, self.pool_embedded) if covers else self.pool_sample

    def depends_on_neighbours(self, number: int, cold: bool) -> bool:
        """Returns whether a round's strategy depends on whether neighbours share labels."""
        return self._strategy_in(number, cold, True) != self._strategy_in(number, cold, False)

    def _strategy_in(self, number: int, cold: bool, neighbours_share_labels: bool) -> str:
        section = self.for_round(number, neighbours_share_labels=neighbours_share_labels)
        return section.cold_start if cold else str(section.strategy)

    def wanted_scores(self) -> list[str]:
        """Returns the scores that are computed: those of the config, and those that the strategies' options use."""
        sections = self._for_all_rounds(True)
        names = [name for section in sections for name in requested_scores(self.scores, section.options)]
        return list(dict.fromkeys(names))

    def _for_all_rounds(self, has_labels: bool) -> list[Self]:
        count = len(self.strategy) if isinstance(self.strategy, list) else 1
        either = (True, False) if self.strategy == AUTO and has_labels else (True,)
        return [self.for_round(number + 1, has_labels, share) for number in range(count) for share in either]

    def check(self, has_labels: bool, where: str = "select.strategy") -> None:
        """Raises a UserError if the strategy cannot work on this task, or with its options.

        Args:
            has_labels: the task has a closed label set.
            where: the config key that the error names.
        """
        if self.varies_by_round:
            for section in self._for_all_rounds(has_labels):
                section.check(has_labels, where)
            return
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
            raise UserError("strategy `top` takes the greatest of a score, and none is named", where=where, fix=_TOP)
        check_scores_fit_task(self.wanted_scores(), has_labels, self.options)
        # On a few made-up rows, so that a mistake in a selector's options shows before any work.
        try:
            select(str(self.strategy), self._example(has_labels), 2, **self.options)
        except UserError as error:
            raise UserError(error.what, where=where, fix=error.fix) from None
        except (TypeError, ValueError) as error:
            raise UserError(
                f"strategy `{self.strategy}` cannot work with these options: {error}", where=where
            ) from None

    def check_models(self, root: Path) -> None:
        """Raises a UserError if a model that the scores use besides the champion is missing."""
        self.scoring.check_models(self.wanted_scores(), root)

    def _example(self, has_labels: bool) -> dict[str, Column]:
        """Returns a score table of a few rows, with the columns of the loop's."""
        rows = 8
        quotas = self.options.get("quotas")
        sources = list(quotas) if isinstance(quotas, dict) and quotas else ["a file"]
        scores = [name for name in self.wanted_scores() if uncertainty_sign(name)]
        numbers = {name: np.linspace(0.1, 0.9, rows) for name in (*BASE_MEASURES, *scores)}
        texts = {"source": np.resize(np.array(sources, dtype=object), rows), "predicted": np.resize(["a", "b"], rows)}
        probabilities = {"probabilities": np.eye(rows)[:, :4] * 0.8 + 0.05} if has_labels else {}
        return {**numbers, **texts, **probabilities, "cost": np.arange(1.0, rows + 1), "embeddings": np.eye(rows)}
