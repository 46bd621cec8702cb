"""Adjustments: rules by which a finished round changes keys of the config for the rounds after it."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from posttrain.label.quality.config import VALUE_NAMES as LABEL_VALUES
from posttrain.loop.drift import VALUE_NAMES as DRIFT_VALUES
from posttrain.store.errors import UserError, suggest
from posttrain.store.expression import Rule, Values, parse
from posttrain.store.message import Message
from posttrain.train.objectives.config import ObjectiveConfig

if TYPE_CHECKING:
    from posttrain.loop.config import Config

VALUE_NAMES = {
    "loss_variance": "variance of the loss over the last quarter of the training's steps, nats²",
    "loss_fall": "fall of the mean loss from the third to the last quarter of the steps, as a share of the former",
    "last_loss": "mean loss of the last epoch, nats a supervised token",
    "plateau": "rounds in a row, this one included, after which no new model was deployed",
    "round": "number of the round",
}
"""Names in the rules besides those of the gate; a value is not a number where a training was too short for it."""

_WHERE = "adjust"

STAGE = "adjust"
"""Name of the stage, under which a round's state has its adjustments."""

_SECTIONS = ("train", "select", "label", "evaluate")
"""Sections whose keys rules may change: those of how the next round chooses, labels, trains and weighs."""

_CHANGE = re.compile(r"\s*([a-z_]+(?:\.[a-z_0-9]+)+)\s*([*/+=-])\s*(.+?)\s*")

_ARITHMETIC = {
    "*": lambda value, operand: value * operand,
    "/": lambda value, operand: value / operand,
    "+": lambda value, operand: value + operand,
    "-": lambda value, operand: value - operand,
}

Adjust = list[dict[str, str | list[str]]]
"""The section: each entry one rule with its change or changes, such as ``{plateau >= 2: train.epochs + 2}``."""


@dataclass(frozen=True)
class Change:
    """A change of one key: ``train.learning_rate * 0.5``, ``train.epochs + 2`` or ``select.strategy = margin``."""

    key: str
    operator: str
    operand: Any

    @classmethod
    def parse(cls, text: str) -> "Change":
        """Parses a change.

        Raises:
            UserError: it names no key, no operation, or a value that is not a number where one is needed.
        """
        match = _CHANGE.fullmatch(text)
        if match is None:
            fix = "write KEY * NUMBER, KEY + NUMBER or KEY = VALUE, such as train.learning_rate * 0.5"
            raise UserError(f"`{text}` names no key and its change", where=_WHERE, fix=fix)
        key, operator, operand = match.groups()
        if key.split(".")[0] not in _SECTIONS:
            fix = f"change keys of {', '.join(_SECTIONS)}"
            raise UserError(f"`{text}`: `{key}` is not for rules to change", where=_WHERE, fix=fix)
        value = yaml.safe_load(operand)
        if operator != "=" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"`{text}`: a number follows `{operator}`", where=_WHERE)
        if operator == "/" and value == 0:
            raise UserError(f"`{text}` divides by 0", where=_WHERE)
        return cls(key, operator, value)

    def apply(self, value: Any) -> Any:
        """Returns the key's value after the change.

        Raises:
            UserError: the value is not a number, and the change is arithmetic.
        """
        if self.operator == "=":
            return self.operand
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"`{self.key}` is {value!r}, and no number", where=_WHERE, fix=f"{self.key} = VALUE")
        result = _ARITHMETIC[self.operator](value, self.operand)
        # A count stays one: half of 5 epochs is 2, and the key would refuse 2.5.
        return int(result) if isinstance(value, int) else result


@dataclass(frozen=True)
class Adjustment:
    """A change that a rule made, as the round's state records it.

    Attributes:
        rule: Text of the rule; ``values`` that it was decided by.
        key: Key that changes; ``configured`` its value in ``posttrain.yaml`` at that time.
        before: Value until then; ``after`` from the next round on.
        problem: Reason why the value stays, such as one that is out of its range; None if it changes.
    """

    rule: str
    values: str
    key: str
    configured: Any
    before: Any
    after: Any
    problem: str | None = None

    @property
    def sentence(self) -> str:
        """Says in a line what changes and why."""
        template = "{key} stays {before}: {problem}; {rule} ({values})"
        return Message(template if self.problem else "{key} {before} → {after}: {rule} ({values})", **self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return asdict(self)


def adjustment_rules(section: Adjust) -> list[tuple[Rule, list[Change]]]:
    """Parses the section.

    Raises:
        UserError: a rule or a change cannot be read.
    """
    rules = []
    for entry in section:
        for text, changes in entry.items():
            listed = [changes] if isinstance(changes, str) else changes
            rules.append((parse(text, _WHERE), [Change.parse(change) for change in listed]))
    return rules


def check_adjustments(config: "Config", metrics: Collection[str]) -> None:
    """Checks rules and changes before any work.

    Args:
        config: The config.
        metrics: Names that the gate's rules may use.

    Raises:
        UserError: a rule names nothing that is measured, or a change no key, no number, or a value that the key
            refuses.
    """
    names = (*metrics, *VALUE_NAMES, *LABEL_VALUES, *DRIFT_VALUES)
    for rule, changes in adjustment_rules(config.adjust):
        for name in rule.names:
            if name not in names:
                what = f"rule `{rule.text}`: no value `{name}`"
                raise UserError(what, where=_WHERE, fix=suggest(name, names))
        if not rule.names or not changes:
            raise UserError(f"rule `{rule.text}` names no value, or changes no key", where=_WHERE)
        for change in changes:
            value = change.apply(config_value(config, change.key))
            with_value(config, change.key, value)


def adjust(config: "Config", configured: "Config", values: Values) -> list[Adjustment]:
    """Applies the rules that hold to the config of a round.

    Args:
        config: The config that the round ran with.
        configured: The config as ``posttrain.yaml`` has it.
        values: The values of the names in rules; one that is missing is not a number.
    """
    adjustments: list[Adjustment] = []
    for rule, changes in adjustment_rules(config.adjust):
        measured = {name: values.get(name, float("nan")) for name in rule.names}
        if not rule.holds(measured):
            continue
        for change in changes:
            before, problem = config_value(config, change.key), None
            try:
                after = change.apply(before)
                # In the order of the list: a later rule starts from what an earlier one set.
                config = with_value(config, change.key, after)
            except UserError as error:
                after, problem = before, error.what
            if problem or after != before:
                text = rule.format_values(measured)
                original = config_value(configured, change.key)
                adjustments.append(Adjustment(rule.text, text, change.key, original, before, after, problem))
    return adjustments


def with_adjustments(config: "Config", records: Iterable[Mapping[str, Any]]) -> "Config":
    """Returns the config with the adjustments of earlier rounds.

    One whose rule is gone, or whose key the user has set again since, counts no more.

    Args:
        config: The config as ``posttrain.yaml`` has it.
        records: `Adjustment.as_dict` of all rounds, in order.
    """
    rules = {text for entry in config.adjust for text in entry}
    changed: dict[str, Any] = {}
    for record in records:
        key = record["key"]
        if not record["problem"] and record["rule"] in rules and record["configured"] == config_value(config, key):
            changed[key] = record["after"]
    for key, value in changed.items():
        config = with_value(config, key, value)
    return config


def with_value(config: "Config", key: str, value: Any) -> "Config":
    """Returns the config with one key set.

    Raises:
        UserError: there is no such key, or it refuses the value.
    """
    section, *rest = key.split(".")
    old = getattr(config, section)
    values = old.model_dump(exclude_unset=True)
    inner = values
    for part in rest[:-1]:
        inner = inner.setdefault(part, {})
    inner[rest[-1]] = value
    try:
        new = type(old).model_validate(values)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"`{key}` cannot be {value!r}: {message}", where=_WHERE) from None
    return config.model_copy(update={section: new})


def config_value(config: "Config", key: str) -> Any:
    """Returns the value of a key.

    Raises:
        UserError: there is no such key.
    """
    at: Any = config
    for part in key.split("."):
        if isinstance(at, BaseModel) and part not in type(at).model_fields:
            fix = suggest(key, _keys(config))
            raise UserError(f"there is no key `{key}`", where=_WHERE, fix=fix)
        at = getattr(at, part, None) if isinstance(at, BaseModel) else (at or {}).get(part)
    if isinstance(at, ObjectiveConfig):
        return at.name
    return at.model_dump(mode="json") if isinstance(at, BaseModel) else at


def _keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yields the names of all plain keys."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
