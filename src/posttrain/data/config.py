"""What the user says about the data."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from posttrain.data.shapes import TARGETS
from posttrain.store.section import Section


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Files = Annotated[list[str], BeforeValidator(_as_list)]
Threshold = Annotated[float, Field(gt=0, le=1)]


class DataConfig(Section):
    """Files are relative to the workspace; one file may stand without a list."""

    pool: Files = Field(default=[], description="files of inputs that have no label yet (answers in them are hidden)")
    labelled: Files = Field(default=[], description="files of labelled records, part of training from round 1")
    test: float | Files | None = Field(
        default=None, description="file(s) of labelled test records, or the share of `labelled` to hold out"
    )
    columns: dict[str, str] | None = Field(
        default=None,
        description="which column holds what, such as {prompt: text, completion: category, group: user}",
    )
    near_duplicates: Threshold | None = Field(
        default=0.9,
        description="Jaccard similarity of inputs from which one counts as a near duplicate; null: keep all",
    )
    leak: Threshold | None = Field(
        default=0.9,
        description="Jaccard similarity to a test input from which a record is a leak; null: equal ones only",
    )
    split_seed: int = Field(
        default=0, description="seed of the hash that draws the test records when `test` is a share"
    )

    @property
    def files(self) -> list[str]:
        """Every file and folder that is named, once each, the pool's first."""
        return list(dict.fromkeys([*self.pool, *self.answered_files]))

    @property
    def answered_files(self) -> list[str]:
        """Those whose answers are used: labelled and test records."""
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
