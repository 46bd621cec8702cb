"""Triggers: the rules and the schedule by which a new round starts."""

from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import Field, field_validator, model_validator

from posttrain.label.quality.config import VALUE_NAMES as LABEL_VALUES
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES
from posttrain.store.errors import UserError, suggest
from posttrain.store.expression import Values, parse
from posttrain.store.section import Section

NAMES = {
    "new_records": "pool records added since the last round",
    "new_labels": "labelled records added since the last round",
    "days_since_training": "days since the last training ended",
    "degradation": "the fall of the champion's main metric since it was deployed",
    "urgent": "1 when `posttrain run --urgent` asks for a round",
    **LABEL_VALUES,
    **DRIFT_VALUES,
}


class TriggerConfig(Section):
    """Rules over new_records, new_labels, days_since_training, degradation, drift, urgent and the quality of labels."""

    any: list[str] = Field([], description="A round starts when one of these holds.")
    all: list[str] = Field([], description="A round starts only when all of these hold.")
    schedule: str | None = Field(
        None,
        description="Times at which a round starts as if a rule of `any` held, as in a crontab: minute, hour, day of "
        "the month, month, day of the week, such as `0 3 * * mon`; a time that passes during a round starts no second.",
    )
    time_zone: str | None = Field(
        None, description="Time zone of the schedule, such as Europe/Berlin; null: the machine's."
    )
    feedback: bool = Field(
        True,
        description="`posttrain run --watch` takes in the feedback that `posttrain serve` collected; false: only "
        "`posttrain data add --inbox` does.",
    )

    @property
    def is_set(self) -> bool:
        """True if a round waits for a rule or a time."""
        return bool(self.any or self.all or self.schedule)

    def next_time(self, after: datetime) -> datetime | None:
        """Returns the first time of the schedule after a time; None without a schedule.

        Args:
            after: A time with its zone.
        """
        if self.schedule is None:
            return None
        return next(CronSim(self.schedule, after.astimezone(ZoneInfo(self.time_zone) if self.time_zone else None)))

    @property
    def names(self) -> set[str]:
        """The values that the rules need."""
        return {name for text in (*self.any, *self.all) for name in parse(text, "triggers").names}

    @field_validator("time_zone")
    @classmethod
    def _zone_exists(cls, name: str | None) -> str | None:
        try:
            if name is not None:
                ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"there is no time zone `{name}`; use a name such as Europe/Berlin") from None
        return name

    @field_validator("schedule")
    @classmethod
    def _schedule_comes(cls, text: str | None) -> str | None:
        try:
            if text is not None:
                # Looks 50 years ahead: the 29th of a February that is a Monday comes, the 31st of April never does.
                next(CronSim(text, datetime(2026, 1, 1)))
        except CronSimError as error:
            fields = "minute, hour, day of the month, month and day of the week, such as `0 3 * * mon`"
            raise ValueError(f"`{text}` names no time that comes ({error}); give {fields}") from None
        except StopIteration:
            raise ValueError(f"the schedule `{text}` never comes") from None
        return text

    @model_validator(mode="after")
    def _rules_are_known(self) -> "TriggerConfig":
        for text in (*self.any, *self.all):
            try:
                rule = parse(text, "triggers")
            except UserError as error:
                raise ValueError(error.what) from None
            for name in rule.names:
                if name not in NAMES:
                    raise ValueError(f"rule `{text}`: nothing is called `{name}`; {suggest(name, NAMES)}")
        return self


@dataclass(frozen=True)
class TriggerResult:
    """The decision to start a round or to wait.

    Attributes:
        starts: True if the round starts.
        reason: The rules that hold if it starts, those that do not if it waits, with their values.
    """

    starts: bool
    reason: str


def evaluate_triggers(
    triggers: TriggerConfig, values: Values, since: datetime | None = None, now: datetime | None = None
) -> TriggerResult:
    """Decides if a round starts. Without rules and schedule it always does.

    Args:
        triggers: The rules.
        values: The values of the names in them.
        since: End of the last round, from which the schedule counts; needed with a schedule, as ``now`` is.
    """
    if not triggers.is_set:
        return TriggerResult(True, "")
    either = [(rule, rule.holds(values)) for rule in (parse(text, "triggers.any") for text in triggers.any)]
    every = [(rule, rule.holds(values)) for rule in (parse(text, "triggers.all") for text in triggers.all)]
    time = triggers.next_time(since) if since else None
    due = time is not None and now is not None and time <= now
    alternatives = [holds for _, holds in either] + ([due] if triggers.schedule else [])
    starts = (not alternatives or any(alternatives)) and all(holds for _, holds in every)
    reasons = [f"{rule.text} ({rule.format_values(values)})" for rule, holds in (*either, *every) if holds == starts]
    if time is not None and due == starts:
        reasons.append(f"schedule {triggers.schedule} ({'due' if due else 'next'} {time:%Y-%m-%d %H:%M})")
    return TriggerResult(starts, "; ".join(reasons))
