"""Defines the config section ``data``."""

from typing import Any

from pydantic import Field, field_validator

from posttrain.data.reading.conversion import TARGETS
from posttrain.data.split import SplitsConfig
from posttrain.data.steps.resources import Files
from posttrain.data.steps.step import DataStep
from posttrain.data.versions.recipe import DEFAULT_STEPS, Steps
from posttrain.store.section import Section


class DataConfig(Section):
    """Files are relative to the workspace; one file needs no list, and a dataset version may replace a file."""

    pool: Files = Field(
        default=[],
        description="Files of inputs without a label (answers in them are hidden), or dataset versions such as "
        "support@v1, whose training split counts.",
    )
    labelled: Files = Field(
        default=[], description="Files of labelled records, or dataset versions; part of training from round 1."
    )
    test: float | Files | None = Field(
        default=None,
        description="Files of labelled test records, dataset versions, whose test split counts, or the share of "
        "`labelled` to hold out.",
    )
    columns: dict[str, str] | None = Field(
        default=None,
        description="Columns of the files, such as {prompt: text, completion: category, group: user}; if these alone "
        "make no record, such as {group: user}, other columns count by their own names.",
    )
    steps: Steps = Field(
        default=DEFAULT_STEPS,
        description="Steps that records go through, in order; see docs/data.md.",
    )
    splits: SplitsConfig | None = Field(
        default=None, description="Splits that `posttrain data add --name` holds out of a dataset; null: none."
    )
    split_seed: int = Field(default=0, description="Seed of the hash that draws the test records if `test` is a share.")

    @property
    def every_round_steps(self) -> list[DataStep]:
        """The steps that every round applies to its whole training set, including labels of earlier rounds."""
        return [step for step in self.steps if step.every_round]

    @property
    def files(self) -> list[str]:
        """All files and folders, each once, the pool's first."""
        return list(dict.fromkeys([*self.pool, *self.answered_files]))

    @property
    def answered_files(self) -> list[str]:
        """The files whose answers are used: labelled and test records."""
        return [*self.labelled, *(self.test if isinstance(self.test, list) else [])]

    @field_validator("test")
    @classmethod
    def _share(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("a share of the labelled records must lie between 0 and 1")
        return value

    @field_validator("columns")
    @classmethod
    def _targets(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for target in value or {}:
            if target not in TARGETS:
                raise ValueError(f"`{target}` is none of {', '.join(TARGETS)}")
        return value
