"""The config sections of the training data: loader, mix, curriculum and phases."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section

RecordShape = Literal["completion", "pair", "labelled", "class", "teacher"]
"""The contents of a record: a text to learn, a chosen and a rejected answer, a desirable or undesirable answer, a
label of a closed set, or a text to learn from a teacher."""


class LoaderConfig(Section):
    """Loading of examples."""

    processes: int | None = Field(
        None, ge=1, description="Processes that tokenise a large training set; null: one per core."
    )
    workers: int = Field(1, ge=0, description="Threads that pack batches ahead; 0: the training packs its own.")
    prefetch: int = Field(2, ge=1, description="Optimiser steps that are packed ahead.")


class MixConfig(Section):
    """Mixes kinds of records.

    The share of a kind is w^(1/T) over the sum of all kinds' w^(1/T), where w is its weight, or with ``sizes`` the
    smaller of its number of records and ``mix_limit``: examples-proportional and temperature-scaled mixing as in T5
    (Raffel et al. 2020, arXiv:1910.10683, section 3.5.2; mT5, Xue et al. 2021, arXiv:2010.11934, calls 1/T alpha).
    """

    mix: dict[str, float] | Literal["sizes"] | None = Field(
        None,
        description="Weight of each kind of records by name, or `sizes`: every kind by its number of records; "
        "null: all records as they are.",
    )
    mix_by: str = Field("source", description="Column that names the kinds: `source`, or another column of the data.")
    mix_temperature: float = Field(
        1.0, gt=0, description="T of w^(1/T): above 1 shares are more alike, mT5's 3.33 is usual with sizes."
    )
    mix_limit: int | None = Field(
        None, ge=1, description="Largest number of records of one kind in a pass and in sizes; null: any number."
    )
    mix_epochs: int | None = Field(
        None,
        ge=1,
        description="Largest number of times that the phase uses a record; other kinds get the rest. Null: any number.",
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
                    f"the share of `{name}` is `{weight}`; the shares of a mix are above 0: leave out what is not "
                    "to be used"
                )
        return value

    @model_validator(mode="after")
    def _is_a_mix(self) -> Self:
        options = {"mix_temperature", "mix_limit", "mix_epochs"} & self.model_fields_set
        for name in sorted(options):
            if self.mix is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for a mix, and there is none")
        return self


class CurriculumConfig(Section):
    """Trains on easy records first (Bengio et al., Curriculum Learning, ICML 2009).

    At competence c, from 0 to 1, each step draws from the easiest share c of the records (Platanios et al. 2019,
    arXiv:1903.09848, algorithm 1). Once all are open, they come in passes again.
    """

    name: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="Opens more records by a plan, or as the loss falls.",
    )
    difficulty: str = Field(
        "loss", description="Difficulty of a record: its loss before training, or a column of the data with numbers."
    )
    start: float = Field(0.1, gt=0, le=1, description="Share of the records, the easiest, that is open at first.")
    duration: float = Field(0.5, gt=0, le=1, description="Share of the steps after which all records are open.")
    every: int = Field(10, ge=1, description="adaptive: steps between two looks at the losses.")
    target: float = Field(0.5, ge=0, lt=1, description="adaptive: share of the first loss at which all are open.")


class PhaseConfig(MixConfig):
    """One phase of a training."""

    epochs: int | None = Field(None, ge=1, description="Passes over the phase's records; or give `steps`.")
    steps: int | None = Field(None, ge=1, description="Optimiser steps.")
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate; null: the training's.")
    max_length: int | None = Field(None, ge=8, description="Tokens of the longest examples that are used; null: all.")
    curriculum: CurriculumConfig | None = Field(None, description="Easy records first; null: all from the start.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a phase has either epochs or steps")
        if self.mix is not None and self.curriculum is not None:
            raise ValueError("a phase has a mix or a curriculum, not both")
        return self


DIFFICULTY_KEY = "train.phases.N.curriculum.difficulty"


def curriculum_difficulty(phases: Sequence[PhaseConfig]) -> str | None:
    """Returns the curricula's measure of difficulty: ``loss`` or a column; None without a curriculum."""
    return next((phase.curriculum.difficulty for phase in phases if phase.curriculum is not None), None)
