"""The gate: rules by which a candidate becomes the champion, and what they found."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from posttrain.loop.expression import Rule, Values, parse
from posttrain.store.errors import UserError, suggest
from posttrain.store.section import Section

_RULES = ("deploy", "rollback", "collect_more")


class GateConfig(Section):
    """Rules over metrics of the candidate (bare names), the ``champion.`` and the ``baseline.``.

    In ``collect_more`` bare names are those of the model that is in service after the decision.
    """

    deploy: list[str] = Field(
        [],
        description="All must hold for a candidate to become champion; empty: gain.METRIC.low > 0 on the main suite.",
    )
    rollback: list[str] = Field(
        [],
        description="If one holds for the champion, the one before returns; for a candidate, it is refused.",
    )
    collect_more: list[str] = Field(
        [],
        description="While one holds, or after a roll-back, rounds go on; empty: all rounds are turned.",
    )

    @field_validator(*_RULES)
    @classmethod
    def _rules_parse(cls, rules: list[str]) -> list[str]:
        for rule in rules:
            try:
                parse(rule, "gate")
            except UserError as error:
                raise ValueError(error.what) from None
        return rules

    def with_default(self, gain: str) -> "GateConfig":
        """The same gate; without a rule for deployment, the lower end of the main suite's ``gain`` must be positive.

        The gain itself is above 0 by luck about every second time where nothing was learned.
        """
        return self if self.deploy else self.model_copy(update={"deploy": [f"{gain}.low > 0"]})

    def check(self, known: Collection[str]) -> None:
        """Raise a UserError if a rule names no metric, or one that is not measured."""
        for section in _RULES:
            for text in getattr(self, section):
                rule = parse(text, f"gate.{section}")
                if not rule.names:
                    raise UserError(f"rule `{text}` names no metric", where=f"gate.{section}")
                for name in rule.names:
                    if name not in known:
                        raise UserError(
                            f"rule `{text}`: no metric `{name}`",
                            where=f"gate.{section}",
                            fix=suggest(name, known),
                        )


@dataclass(frozen=True)
class Verdict:
    """One rule and what it found."""

    section: str
    rule: str
    values: str
    holds: bool

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {"section": self.section, "rule": self.rule, "values": self.values, "holds": self.holds}


@dataclass(frozen=True)
class Decision:
    """action: ``deploy``, ``refuse`` or ``rollback``; collect_more: whether more rounds are worth it."""

    action: str
    collect_more: bool
    verdicts: list[Verdict]


def decide(gate: GateConfig, candidate: Values, champion: Values, baseline: Values, gains: Values) -> Decision:
    """Apply the gate.

    Args:
        gate: the rules, checked.
        candidate: the candidate's metrics by bare name; ``champion`` and ``baseline`` likewise.
        gains: the intervals of candidate minus champion by their full names (``gain.accuracy.low``).

    A metric that a model was not measured by counts as not a number, so that a rule with it does not hold.
    """
    others = {f"champion.{name}": value for name, value in champion.items()}
    others |= {f"baseline.{name}": value for name, value in baseline.items()}
    others |= dict(gains)
    judged = _judge(gate, "deploy", {**candidate, **others})
    unfit = _judge(gate, "rollback", {**candidate, **others})
    deploys = all(verdict.holds for verdict in judged) and not any(verdict.holds for verdict in unfit)
    if deploys:
        action, verdicts = "deploy", [*judged, *unfit]
    else:
        in_service = _judge(gate, "rollback", {**champion, **others})
        action = "rollback" if any(verdict.holds for verdict in in_service) else "refuse"
        verdicts = [*judged, *[verdict for verdict in unfit if verdict.holds], *in_service]
    more = _judge(gate, "collect_more", {**(candidate if deploys else champion), **others})
    # What a roll-back puts in service was left behind before: its successor still has to be found.
    collect_more = action == "rollback" or not more or any(verdict.holds for verdict in more)
    return Decision(action, collect_more, [*verdicts, *more])


def _judge(gate: GateConfig, section: str, values: Mapping[str, float]) -> list[Verdict]:
    rules: list[Rule] = [parse(text, f"gate.{section}") for text in getattr(gate, section)]
    known = {**dict.fromkeys((name for rule in rules for name in rule.names), math.nan), **values}
    return [Verdict(section, rule.text, rule.shown(known), rule.holds(known)) for rule in rules]
