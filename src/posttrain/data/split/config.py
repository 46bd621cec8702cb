"""Defines the config section ``data.splits``, and parses the timestamps that it names."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from posttrain.store.section import Section

SPLITS = ("train", "validation", "test")
"""Names of the splits by their index."""

Share = Annotated[float, Field(ge=0, le=1)]

_ROUNDING = 1e-6  # 0.7 + 0.2 + 0.1 is not exactly 1 in binary

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_MILLISECONDS = 1e11  # as seconds this lies in the year 5138, as milliseconds in 1973


class SplitsConfig(Section):
    """Configures how records are split into train, validation and test."""

    train: Share | None = Field(None, description="Share of training records; null: the rest.")
    validation: Share = Field(0.0, description="Share of the records that decide during training.")
    test: Share = Field(0.1, description="Share of the records that models are measured on.")
    by: Literal["hash", "time"] = Field(
        "hash", description="`hash`: a hash of each record decides; `time`: its time does (later ones are held out)."
    )
    stratify: Literal["label", "source"] | None = Field(
        None, description="Keep the shares within every label or source, not only overall."
    )
    group: bool = Field(True, description="Keep the records of a group in one split.")
    time: str | None = Field(None, description="Column with each record's time: ISO 8601, or seconds since 1970.")
    since: dict[Literal["validation", "test"], str] | None = Field(
        None, description="Times from which records are validation or test; null: the first version's shares decide."
    )
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = Field(
        0.8, description="Jaccard similarity from which inputs stay in one split; null: equal inputs only."
    )
    seed: int = Field(0, description="Seed of the hash.")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of train, validation and test; they add up to 1."""
        held_out = self.validation + self.test
        return max(0.0, 1 - held_out), self.validation, self.test

    @field_validator("since")
    @classmethod
    def _moments(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        moments = {name: parse_timestamp(text) for name, text in (value or {}).items()}
        if len(moments) == 2 and moments["validation"] > moments["test"]:
            raise ValueError("validation must begin before test")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        total = (0 if self.train is None else self.train) + self.validation + self.test
        if total > 1 + _ROUNDING or (self.train is not None and total < 1 - _ROUNDING):
            raise ValueError(f"the shares of train, validation and test add up to {total:g}, not to 1")
        if self.by == "time" and self.time is None:
            raise ValueError("`by: time` needs `time`, the column with the moment of each record")
        if self.by == "time" and self.stratify is not None:
            raise ValueError("`stratify` is for `by: hash`; time decides by itself")
        if self.by == "hash" and (self.time is not None or self.since is not None):
            raise ValueError("`time` and `since` are for `by: time`")
        return self


class FrozenSplits(SplitsConfig):
    """Holds the split's settings with all that the first version's records decided; stored in every later recipe."""

    thresholds: dict[str, tuple[Share, Share]] | None = Field(
        None, description="By stratum the draws below which a record is test, and test or validation."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_config(cls, value: Any) -> Any:
        return value.model_dump() if type(value) is SplitsConfig else value


def parse_timestamp(value: Any) -> int:
    """Parses a moment to microseconds since 1970, UTC.

    Args:
        value: ISO 8601, in UTC where it names no zone; or seconds, or milliseconds, since 1970.

    Raises:
        ValueError: it is neither.
    """
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value.strip())
            # UTC, not the local zone: a record must fall into the same split on every machine.
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            return (moment - _EPOCH) // timedelta(microseconds=1)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return round(value * (1_000 if abs(value) >= _MILLISECONDS else 1_000_000))
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"`{value}` is not a timestamp; write it like 2026-01-31 or 2026-01-31T12:00:00Z")


def format_timestamp(microseconds: int) -> str:
    """Formats a moment as ISO 8601 in UTC, which `parse_timestamp` reads back."""
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat()
