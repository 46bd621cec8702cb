"""Triggers: the rules by which a new round starts."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from posttrain.label.quality.config import VALUE_NAMES
from posttrain.loop.expression import Values, parse
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section

NAMES = {
    "new_records": "pool records added since the last round",
    "new_labels": "labelled records added since the last round",
    "days_since_training": "days since the last training ended",
    "degradation": "the fall of the champion's main metric since it was deployed",
    "urgent": "1 when `posttrain run --urgent` asks for a round",
    **VALUE_NAMES,
}


class TriggerConfig(Section):
    """Rules over new_records, new_labels, days_since_training, degradation, urgent and the quality of labels."""

    any: list[str] = Field([], description="A round starts when one of these holds.")
    all: list[str] = Field([], description="A round starts only when all of these hold.")

    @property
    def names(self) -> set[str]:
        """The values that the rules need."""
        return {name for text in (*self.any, *self.all) for name in parse(text, "triggers").names}

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


def evaluate_triggers(triggers: TriggerConfig, values: Values) -> TriggerResult:
    """Decides if a round starts. Without rules it always does."""
    if not triggers.any and not triggers.all:
        return TriggerResult(True, "")
    either = [(rule, rule.holds(values)) for rule in (parse(text, "triggers.any") for text in triggers.any)]
    every = [(rule, rule.holds(values)) for rule in (parse(text, "triggers.all") for text in triggers.all)]
    starts = (not either or any(holds for _, holds in either)) and all(holds for _, holds in every)
    decisive = [rule for rule, holds in (*either, *every) if holds == starts]
    return TriggerResult(starts, "; ".join(f"{rule.text} ({rule.format_values(values)})" for rule in decisive))
