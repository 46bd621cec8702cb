"""The gate: the rules by which a candidate is deployed, refused, or the champion rolled back."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, field_validator

from posttrain.label.quality.config import VALUE_NAMES as LABEL_VALUES
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES
from posttrain.store.errors import UserError, suggest
from posttrain.store.expression import Rule, Values, parse
from posttrain.store.section import Section

_RULES = ("deploy", "rollback", "collect_more")


class GateConfig(Section):
    """Rules over metrics of the candidate (bare names), of the ``champion.`` and of the ``baseline.``.

    In ``collect_more`` bare names are those of the model that is in service after the decision.
    """

    deploy: list[str] = Field(
        [],
        description="All must hold for a candidate to become champion; empty: gain.METRIC.low > 0 on the main suite.",
    )
    rollback: list[str] = Field(
        [],
        description="If one holds for the champion, the newest earlier one for which none holds returns; if for a "
        "candidate, it is refused.",
    )
    collect_more: list[str] = Field(
        [],
        description="Rounds continue while one holds, or after a rollback; empty: all rounds run.",
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

    @property
    def names(self) -> set[str]:
        """The values that the rules need."""
        return {name for section in _RULES for text in getattr(self, section) for name in parse(text, "gate").names}

    def with_default(self, gain: str) -> "GateConfig":
        """Returns the gate, with the default rule for deployment if it has none: ``gain.low > 0``."""
        # The lower end, since the gain itself is above 0 about every second time where nothing was learned.
        return self if self.deploy else self.model_copy(update={"deploy": [f"{gain}.low > 0"]})

    def check(self, metrics: Collection[str]) -> None:
        """Raises a UserError if a rule names no metric, or one that is not measured.

        The values of drift and of the quality of labels may be used besides ``metrics``.
        """
        metrics = (*metrics, *LABEL_VALUES, *DRIFT_VALUES)
        for section in _RULES:
            for text in getattr(self, section):
                rule = parse(text, f"gate.{section}")
                if not rule.names:
                    raise UserError(f"rule `{text}` names no metric", where=f"gate.{section}")
                for name in rule.names:
                    if name not in metrics:
                        raise UserError(
                            f"rule `{text}`: no metric `{name}`",
                            where=f"gate.{section}",
                            fix=suggest(name, metrics),
                        )


@dataclass(frozen=True)
class RuleResult:
    """A rule of the gate with the values of its names; ``holds`` is True if it holds."""

    section: str
    rule: str
    values: str
    holds: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return {"section": self.section, "rule": self.rule, "values": self.values, "holds": self.holds}


@dataclass(frozen=True)
class GateDecision:
    """The outcome of the gate.

    Attributes:
        action: ``deploy``, ``refuse`` or ``rollback``.
        collect_more: False if the champion is good enough to run no further round.
        rules: Every rule that was evaluated.
    """

    action: str
    collect_more: bool
    rules: list[RuleResult]


def decide(gate: GateConfig, candidate: Values, champion: Values, baseline: Values, gains: Values) -> GateDecision:
    """Applies the gate.

    Args:
        gate: The rules, checked.
        candidate: The candidate's metrics by bare name.
        champion: The champion's metrics.
        baseline: The base model's metrics.
        gains: Intervals of candidate minus champion by their full names (``gain.accuracy.low``), the quality of labels
            (``label.alpha``) and drift (``drift.psi``).

    A metric that a model was not measured by counts as not a number, so that a rule with it does not hold.
    """
    of_candidate = _named(candidate, champion, baseline, gains)
    of_champion = _named(champion, champion, baseline, gains)
    deploy = _evaluate(gate, "deploy", of_candidate)
    # A rule for rolling back is about any model in service: a candidate that it would remove at once is not deployed.
    unfit = _evaluate(gate, "rollback", of_candidate)
    deploys = all(rule.holds for rule in deploy) and not any(rule.holds for rule in unfit)
    if deploys:
        action, rules = "deploy", [*deploy, *unfit]
    else:
        rollback = _evaluate(gate, "rollback", of_champion)
        action = "rollback" if any(rule.holds for rule in rollback) else "refuse"
        rules = [*deploy, *[rule for rule in unfit if rule.holds], *rollback]
    more = _evaluate(gate, "collect_more", of_candidate if deploys else of_champion)
    # A rollback restores a model that was replaced before: its successor still has to be trained.
    collect_more = action == "rollback" or not more or any(rule.holds for rule in more)
    return GateDecision(action, collect_more, [*rules, *more])


def broken_rules(
    gate: GateConfig, model: Values, champion: Values, baseline: Values, gains: Values
) -> list[RuleResult]:
    """Returns the rules of ``gate.rollback`` by which a model must not be in service; arguments as in `decide`."""
    return [rule for rule in _evaluate(gate, "rollback", _named(model, champion, baseline, gains)) if rule.holds]


def _named(model: Values, champion: Values, baseline: Values, gains: Values) -> dict[str, float]:
    """Returns the values under their names in rules, those of ``model`` under their bare names."""
    others = {f"champion.{name}": value for name, value in champion.items()}
    others |= {f"baseline.{name}": value for name, value in baseline.items()}
    return {**model, **others, **gains}


def _evaluate(gate: GateConfig, section: str, values: Mapping[str, float]) -> list[RuleResult]:
    rules: list[Rule] = [parse(text, f"gate.{section}") for text in getattr(gate, section)]
    # NaN for a metric that was not measured: the rule is unknown then and does not hold, but the round goes through.
    values = {**dict.fromkeys((name for rule in rules for name in rule.names), math.nan), **values}
    return [RuleResult(section, rule.text, rule.format_values(values), rule.holds(values)) for rule in rules]
