"""Defines the config section ``data``."""

from typing import Any

from pydantic import Field, field_validator

from posttrain.data.contamination.decontaminate import Decontaminate
from posttrain.data.reading.conversion import TARGETS
from posttrain.data.split import SplitsConfig
from posttrain.data.steps.drop import Drop
from posttrain.data.versions.recipe import DEFAULT_STEPS, Files, Steps
from posttrain.store.section import Section


class DataConfig(Section):
    """Files are relative to the workspace; one may stand without a list, and a dataset version where a file could."""

    pool: Files = Field(
        default=[],
        description="files of inputs that have no label yet (answers in them are hidden), or dataset versions such as "
        "support@v1, whose training side counts",
    )
    labelled: Files = Field(
        default=[], description="files of labelled records, or dataset versions, part of training from round 1"
    )
    test: float | Files | None = Field(
        default=None,
        description="file(s) of labelled test records, dataset version(s), whose test side counts, or the share of "
        "`labelled` to hold out",
    )
    columns: dict[str, str] | None = Field(
        default=None,
        description="which column holds what, such as {prompt: text, completion: category, group: user}; where that "
        "alone makes no record, such as {group: user}, other columns count by their own names",
    )
    steps: Steps = Field(
        default=DEFAULT_STEPS,
        description="what records go through; see docs/data.md. Pool and test records meet those that are for them",
    )
    splits: SplitsConfig | None = Field(
        default=None, description="what `posttrain data add --name` holds out of a dataset, and how; null: nothing"
    )
    split_seed: int = Field(
        default=0, description="seed of the hash that draws the test records when `test` is a share"
    )

    @property
    def decontamination(self) -> Decontaminate | None:
        """The step that removes training records that give test records away; None if the config leaves it out."""
        return next((step for step in self.steps if isinstance(step, Decontaminate)), None)

    @property
    def drops(self) -> list[Drop]:
        """The steps that remove the records that a file names, including labelled ones of earlier rounds."""
        return [step for step in self.steps if isinstance(step, Drop)]

    @property
    def files(self) -> list[str]:
        """Names every file and folder once, the pool's first."""
        return list(dict.fromkeys([*self.pool, *self.answered_files]))

    @property
    def answered_files(self) -> list[str]:
        """Names the files whose answers are used: labelled and test records."""
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
