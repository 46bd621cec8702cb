"""Triggers: when a new round starts."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from posttrain.loop.expression import Values, parse
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section

NAMES = {
    "new_records": "pool records that came since the last round",
    "new_labels": "labelled records that came since the last round",
    "days_since_training": "days since the last training ended",
    "degradation": "how far the champion's main metric has fallen since it was deployed",
    "urgent": "1 when `posttrain run --urgent` asks for a round",
}


class TriggerConfig(Section):
    """Rules over new_records, new_labels, days_since_training, degradation and urgent."""

    any: list[str] = Field([], description="A round starts when one of these holds.")
    all: list[str] = Field([], description="A round starts only when all of these hold.")

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
class Verdict:
    """starts: whether a round starts; why: the rules that say so or are waited for, with their values."""

    starts: bool
    why: str


def judge(triggers: TriggerConfig, values: Values) -> Verdict:
    """Whether a round starts. Without rules it always does."""
    if not triggers.any and not triggers.all:
        return Verdict(True, "")
    some = [(rule, rule.holds(values)) for rule in (parse(text, "triggers.any") for text in triggers.any)]
    every = [(rule, rule.holds(values)) for rule in (parse(text, "triggers.all") for text in triggers.all)]
    starts = (not some or any(holds for _, holds in some)) and all(holds for _, holds in every)
    shown = [(rule, holds) for rule, holds in (*some, *every) if holds == starts]
    return Verdict(starts, "; ".join(f"{rule.text} ({rule.shown(values)})" for rule, _ in shown))
