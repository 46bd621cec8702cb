"""The entries of a search space: numbers and choices to draw, values that are fixed, and values derived from others."""

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.store.errors import UserError, suggest

_KINDS = ("float", "int", "choice", "derive", "value")
_EXAMPLE = "such as {float: [0.1, 0.5]}, {int: [1, 8]}, [a, b] or {derive: 2 * rank}"


class Parameter(ABC):
    """A value that is drawn; a subclass maps the unit interval to its values and back.

    Attributes:
        when: formula under which the parameter exists; None: always.
    """

    when: str | None = None

    @abstractmethod
    def check(self, where: str) -> None:
        """Raises a `UserError` if the parameter has no two values to draw from."""

    @abstractmethod
    def from_unit(self, share: float) -> Any:
        """Returns the value at a share of the range, in [0, 1], such that equal shares are equally likely."""

    @abstractmethod
    def to_unit(self, value: Any) -> float:
        """Returns a share that `from_unit` maps to ``value``."""

    @abstractmethod
    def __contains__(self, value: object) -> bool:
        """Returns whether a value can be drawn."""

    @abstractmethod
    def grid(self, points: int) -> list[Any]:
        """Returns at most so many values, evenly spread over the range, its ends included; of a choice all."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns the parameter as a config has it."""

    def _condition(self) -> dict[str, Any]:
        return {} if self.when is None else {"when": self.when}


@dataclass(frozen=True)
class Float(Parameter):
    """A real number.

    Args:
        low, high: the ends of its range, both included.
        log: drawn uniformly on a logarithmic scale.
        when: formula under which it exists.
    """

    low: float
    high: float
    log: bool = False
    when: str | None = None

    def check(self, where: str) -> None:
        _check_range(self.low, self.high, self.log, where)

    def from_unit(self, share: float) -> float:
        if self.log:
            share = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            share = self.low + share * (self.high - self.low)
        # The logarithm and its inverse may leave the range by a bit.
        return min(max(share, self.low), self.high)

    def to_unit(self, value: Any) -> float:
        low, high, value = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return float((value - low) / (high - low))

    def __contains__(self, value: object) -> bool:
        return is_number(value) and self.low <= value <= self.high  # type: ignore[operator]

    def grid(self, points: int) -> list[Any]:
        return (
            [self.from_unit(index / (points - 1)) for index in range(points)] if points > 1 else [self.from_unit(0.5)]
        )

    def to_json(self) -> dict[str, Any]:
        return {"float": [self.low, self.high], **({"log": True} if self.log else {}), **self._condition()}


@dataclass(frozen=True)
class Int(Parameter):
    """An integer.

    Args:
        low, high: the ends of its range, both included.
        log: drawn uniformly on a logarithmic scale, and rounded.
        when: formula under which it exists.
    """

    low: int
    high: int
    log: bool = False
    when: str | None = None

    def check(self, where: str) -> None:
        _check_range(self.low, self.high, self.log, where)
        if max(abs(self.low), abs(self.high)) > _LARGEST_INTEGER:
            raise UserError(f"an end is beyond {_LARGEST_INTEGER:,}", where=where, fix="use `float`")

    def from_unit(self, share: float) -> int:
        # Half a step beyond both ends, so that these are as likely as the integers between them.
        low, high = self._ends()
        value = low + share * (high - low)
        return min(max(round(math.exp(value) if self.log else value), self.low), self.high)

    def to_unit(self, value: Any) -> float:
        low, high = self._ends()
        return ((math.log(value) if self.log else value) - low) / (high - low)

    def _ends(self) -> tuple[float, float]:
        low, high = self.low - 0.5, self.high + 0.5
        return (math.log(low), math.log(high)) if self.log else (low, high)

    def __contains__(self, value: object) -> bool:
        return is_number(value) and value == int(value) and self.low <= value <= self.high  # type: ignore

    def grid(self, points: int) -> list[Any]:
        inner: Parameter = Float(self.low, self.high, self.log)
        return list(dict.fromkeys(round(value) for value in inner.grid(min(points, self.high - self.low + 1))))

    def to_json(self) -> dict[str, Any]:
        return {"int": [self.low, self.high], **({"log": True} if self.log else {}), **self._condition()}


@dataclass(frozen=True)
class Choice(Parameter):
    """One of several values, of any JSON type.

    Args:
        values: the values.
        when: formula under which it exists.
    """

    values: Sequence[Any]
    when: str | None = None

    def check(self, where: str) -> None:
        if len(self.values) < 2:
            raise UserError(f"{len(self.values)} values leave no choice", where=where, fix="fix the value, or add some")
        counts = Counter(json.dumps(value, sort_keys=True) for value in self.values)
        if twice := next((text for text, count in counts.items() if count > 1), None):
            raise UserError(f"{twice} is named twice", where=where, fix="remove one")

    def from_unit(self, share: float) -> Any:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def to_unit(self, value: Any) -> float:
        return (self.index(value) + 0.5) / len(self.values)

    def index(self, value: Any) -> int:
        """Returns the index of a value."""
        # Not by that of the sequence: True equals 1.
        return next(at for at, known in enumerate(self.values) if known == value and type(known) is type(value))

    def __contains__(self, value: object) -> bool:
        return any(known == value and type(known) is type(value) for known in self.values)

    def grid(self, points: int) -> list[Any]:
        return list(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"choice": list(self.values), **self._condition()}


@dataclass(frozen=True)
class Derived:
    """A value that follows from others; it exists where all of them do.

    Args:
        formula: such as ``2 * lora_rank``, in the grammar of `posttrain.tune.formula`.
        when: formula under which it exists.
    """

    formula: str
    when: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"derive": self.formula} | ({} if self.when is None else {"when": self.when})


@dataclass(frozen=True)
class Fixed:
    """A value that is the same in all trials.

    Args:
        value: of any JSON type.
        when: formula under which it exists.
    """

    value: Any
    when: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value} | ({} if self.when is None else {"when": self.when})


Entry = Parameter | Derived | Fixed


def read_entry(value: Any, where: str) -> Entry:
    """Reads an entry as Python or a config has it.

    Args:
        value: an entry; a mapping with one of the keys ``float``, ``int``, ``choice``, ``derive`` and ``value``, and
            with ``log`` and ``when``; a list, which is a choice; anything else is a fixed value.
        where: the key, named in errors.

    Raises:
        UserError: the value is not an entry, or one without anything to draw from.
    """
    entry = value if isinstance(value, Entry) else _from_config(value, where)
    # As the study's database returns them: a tuple is a list there.
    if isinstance(entry, Choice):
        entry = replace(entry, values=tuple(_to_json(item, where) for item in entry.values))
    elif isinstance(entry, Fixed):
        entry = replace(entry, value=_to_json(entry.value, where))
    if isinstance(entry, Parameter):
        entry.check(where)
    return entry


def _to_json(value: Any, where: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise UserError(
            f"{value!r} is not a JSON value", where=where, fix="use a number, a text, a list or a mapping"
        ) from None


def _from_config(value: Any, where: str) -> Entry:
    if isinstance(value, list | tuple):
        return Choice(tuple(value))
    if not isinstance(value, Mapping):
        return Fixed(value)
    options = dict(value)
    kinds = [kind for kind in _KINDS if kind in options]
    if len(kinds) != 1:
        problem = f"is both {' and '.join(kinds)}" if kinds else "does not say how it is drawn"
        near = [] if kinds else [text for key in options if (text := suggest(str(key), _KINDS, listed=False))]
        raise UserError(problem, where=where, fix=near[0] if near else _EXAMPLE)
    (kind,) = kinds
    content, when = options.pop(kind), options.pop("when", None)
    log = options.pop("log", False) if kind in ("float", "int") else False
    if options:
        name = next(iter(options))
        known = [kind, "when", *(["log"] if kind in ("float", "int") else [])]
        raise UserError(f"unknown key `{name}`", where=where, fix=suggest(str(name), known))
    if when is not None and not isinstance(when, str):
        raise UserError("`when` is not a formula", where=where, fix="such as when: method == 'lora'")
    if kind == "value":
        return Fixed(content, when)
    if kind == "derive":
        return Derived(str(content), when)
    if not isinstance(content, list | tuple) or (kind != "choice" and len(content) != 2):
        raise UserError(f"`{kind}` is not a list{'' if kind == 'choice' else ' of two'}", where=where, fix=_EXAMPLE)
    if kind == "choice":
        return Choice(tuple(content), when)
    if not isinstance(log, bool):
        raise UserError("`log` is true or false", where=where)
    low, high = (_to_number(bound, where) for bound in content)
    if kind == "float":
        return Float(low, high, log, when)
    for bound in (low, high):
        if bound != int(bound):
            raise UserError(f"{bound:g} is not an integer", where=where, fix="use `float`")
    return Int(int(low), int(high), log, when)


def _to_number(value: Any, where: str) -> float:
    # YAML reads 1e-6 as text, as it has no dot.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"`{value}` is not a number", where=where) from None
    if not is_number(value):
        raise UserError(f"`{value}` is not a number", where=where)
    return float(value)


_LARGEST_INTEGER = 2**53
"""A study's database keeps what is drawn as a float, which has no greater integers without gaps."""

_WIDEST = 1e150
"""Samplers square distances, which must not overflow."""


def is_number(value: object) -> bool:
    """Returns whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _check_range(low: float, high: float, log: bool, where: str) -> None:
    if not (is_number(low) and is_number(high)):
        raise UserError("the range has an end that is not a finite number", where=where)
    if not log and high - low > _WIDEST:
        fix = f"give ends that are at most {_WIDEST:g} apart, or a logarithmic range"
        raise UserError(f"{low:g} to {high:g} is too wide to draw from", where=where, fix=fix)
    if low > high:
        raise UserError(f"{low:g} to {high:g} is not a range", where=where, fix="put the greater number last")
    if low == high:
        raise UserError(f"{low:g} to {high:g} holds one value", where=where, fix=f"fix it: {low:g}")
    if log and low <= 0:
        raise UserError(f"a logarithmic range begins above 0, not at {low:g}", where=where)
