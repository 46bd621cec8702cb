"""The config sections of the training data: loader, mix, curriculum and phases."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section

Shape = Literal["completion", "pair", "labelled", "class", "teacher"]
"""What a record holds: something to learn as it is, a chosen and a rejected answer, an answer that is desirable
or not, a label of a closed set, or something to learn with a teacher's view of it."""


class LoaderConfig(Section):
    """How examples come to the model."""

    processes: int | None = Field(
        None, ge=1, description="Processes that tokenise a large training set; none: one a core."
    )
    workers: int = Field(1, ge=0, description="Threads that pack batches ahead; 0: the training packs its own.")
    prefetch: int = Field(2, ge=1, description="Optimiser steps that are packed ahead.")


class MixConfig(Section):
    """How the kinds of records are mixed.

    The share of a kind is w^(1/T) over the sum of all kinds' w^(1/T), where w is its weight, or with ``sizes`` the
    smaller of its number of records and ``mix_limit``: examples-proportional and temperature-scaled mixing as in T5
    (Raffel et al. 2020, arXiv:1910.10683, section 3.5.2; mT5, Xue et al. 2021, arXiv:2010.11934, calls 1/T alpha).
    """

    mix: dict[str, float] | Literal["sizes"] | None = Field(
        None,
        description="Weight of each kind of records by name, or `sizes`: every kind by its number of records; "
        "none: all records as they are.",
    )
    mix_by: str = Field("source", description="What those names are: `source`, or another column of the data.")
    mix_temperature: float = Field(
        1.0, gt=0, description="T of w^(1/T): above 1 shares are more alike, mT5's 3.33 is usual with sizes."
    )
    mix_limit: int | None = Field(
        None, ge=1, description="Records of one kind that a pass has, and that sizes count, at most; none: any number."
    )
    mix_epochs: int | None = Field(
        None, ge=1, description="How often the stage meets a record at most; other kinds get the rest. None: any."
    )

    @field_validator("mix", mode="before")
    @classmethod
    def _are_weights(cls, value: Any) -> Any:
        if value is None or value == "sizes":
            return value
        if not isinstance(value, Mapping) or not value:
            raise ValueError("a mix is weights by name, or `sizes`")
        for name, weight in value.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
                raise ValueError(
                    f"the share of `{name}` is `{weight}`; the shares of a mix are above 0: leave out what is not to "
                    "be met"
                )
        return value

    @model_validator(mode="after")
    def _is_a_mix(self) -> Self:
        given = {"mix_temperature", "mix_limit", "mix_epochs"} & self.model_fields_set
        for name in sorted(given):
            if self.mix is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for a mix, and there is none")
        return self


class CurriculumConfig(Section):
    """Train on easy records first (Bengio et al., Curriculum Learning, ICML 2009).

    A model of competence c, a share from 0 to 1, is shown the share c of the records that is easiest, drawn at random
    for each step (Platanios et al. 2019, arXiv:1903.09848, algorithm 1). Once all are open, they come in passes again.
    """

    name: Literal["none", "fixed", "adaptive", "self_paced"] = Field(
        "none",
        description="Records as they come; more of them by a plan; as the loss falls; or those whose own loss is low.",
    )
    difficulty: str = Field(
        "loss", description="How hard records are: their loss before training, or a column of the data with numbers."
    )
    start: float = Field(0.1, gt=0, le=1, description="Share of the records, the easiest, that is open at first.")
    duration: float = Field(0.5, gt=0, le=1, description="Share of the steps after which all records are open.")
    pacing: Literal["linear", "root", "step"] = Field("root", description="How a fixed curriculum opens them.")
    power: float = Field(2.0, gt=0, description="root: which root; a higher one opens more records early.")
    stairs: int = Field(4, ge=1, description="step: in how many equal steps.")
    target: float = Field(0.5, ge=0, lt=1, description="adaptive: share of the first loss at which all are open.")
    every: int = Field(10, ge=1, description="adaptive, self_paced: steps between two looks at the losses.")
    growth: float = Field(1.3, gt=1, description="self_paced: what each look multiplies the highest loss of all by.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.name == "self_paced" and self.difficulty != "loss":
            raise ValueError("self_paced goes by the records' own losses: leave out `difficulty`")
        return self


class PhaseConfig(MixConfig):
    """One part of a training in several."""

    epochs: int | None = Field(None, ge=1, description="Passes over the stage's records; or give `steps`.")
    steps: int | None = Field(None, ge=1, description="Optimiser steps.")
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate; none: the training's.")
    max_length: int | None = Field(None, ge=8, description="Tokens of the longest examples that are met; none: all.")
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="Whether easy records come first.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a stage has either epochs or steps")
        if self.mix is not None and self.curriculum.name != "none":
            raise ValueError("a stage has a mix or a curriculum, not both")
        return self


def curriculum_difficulty(stages: Sequence[PhaseConfig]) -> str | None:
    """What the curricula go by: ``loss`` or a column; None where no stage has one."""
    return next((stage.curriculum.difficulty for stage in stages if stage.curriculum.name != "none"), None)
