"""A search space: named parameters, the conditions under which they exist, constraints, derived and fixed values."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Self

import numpy as np

from posttrain.store.errors import UserError, suggest
from posttrain.tune.formula import FUNCTIONS, Formula, parse_formula
from posttrain.tune.parameters import Derived, Entry, Fixed, Parameter, read_entry

Settings = Mapping[str, Any]
"""Values by name: what a trial is run with, or of it only what was drawn."""

_CHECKED_POINTS = 2_000  # drawn to find out whether the conditions and the constraints can hold

_LEAST_FEASIBLE = 10  # of them: where the constraints hold more rarely, a search would draw for ever

MAX_DRAWS = 5_000
"""Draws of one point, until the constraints hold."""


@dataclass(frozen=True)
class _Named:
    """An entry with its name, its condition and its parsed formula."""

    name: str
    entry: Entry
    when: Formula | None
    formula: Formula | None


def point_key(drawn: Settings) -> str:
    """Returns a text that equal points share, and no others: in Python ``1`` and ``True`` are equal, too."""
    numbers = {name: float(value) if type(value) is int else value for name, value in drawn.items()}
    return repr(sorted(numbers.items()))


class Space:
    """The values that a study may try.

    A point of the space is a mapping from names to values. It lacks parameters whose condition does not hold, and
    values that are derived from those. A condition that names such a parameter does not hold; a constraint that names
    one is not asked. A derived value without a fraction is an integer.

    Args:
        entries: a `Parameter`, `Derived` or `Fixed`, or one as a config has it (`read_entry`), by name. Names may have
            dots.
        constraints: formulas that hold for every point.
        where: the key that the space comes from, named in errors.

    Attributes:
        parameters: those that are drawn, by name, in an order in which each comes after those that its condition names.
        constraints: the constraints.

    Raises:
        UserError: there is nothing to draw; a range is empty; a name is unknown; values depend on each other in a
            circle; a condition or the constraints never hold.
    """

    def __init__(self, entries: Mapping[str, Any], constraints: Sequence[str] = (), where: str = "space") -> None:
        if not isinstance(entries, Mapping):
            raise UserError("is not a mapping of names to parameters", where=where)
        read = {str(name): read_entry(value, f"{where}.{name}") for name, value in entries.items()}
        self._where = where
        # Beside the space, as a config and the arguments have it.
        self._constraints_key = where.removesuffix("space") + "constraints"
        self._entries = read
        self._items = _in_order({name: _parse(name, entry, f"{where}.{name}") for name, entry in read.items()}, where)
        self.parameters: Mapping[str, Parameter] = {
            item.name: item.entry for item in self._items if isinstance(item.entry, Parameter)
        }
        self._formulas = {item.name: item.formula for item in self._items if item.formula is not None}
        self.constraints = tuple(constraints)
        self._constraints = [parse_formula(text, self._constraints_key) for text in constraints]
        for formula in self._constraints:
            _check_names(formula, read)
        if not self.parameters:
            raise UserError("has no parameter to search", where=where, fix="give one a range or a choice")
        self._check_conditions()

    @classmethod
    def of(cls, value: Any, where: str = "space") -> Self:
        """Returns a space as it is, or reads one from a mapping of entries or from what `to_json` returns."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and value.keys() == {"entries", "constraints"}:
            return cls(value["entries"], value["constraints"], where)
        return cls(value, (), where)

    @property
    def varying(self) -> list[str]:
        """The names whose values differ between points: parameters, derived values, and those with a condition."""
        return [name for name, entry in self._entries.items() if not isinstance(entry, Fixed) or entry.when is not None]

    @property
    def used_names(self) -> set[str]:
        """The names that conditions, constraints and derived values need."""
        formulas = [formula for item in self._items for formula in (item.when, item.formula) if formula is not None]
        return {name for formula in (*formulas, *self._constraints) for name in formula.names}

    def to_json(self) -> dict[str, Any]:
        """Returns the space as JSON values, from which `of` makes it again."""
        entries = {name: entry.to_json() for name, entry in self._entries.items()}
        return {"entries": entries, "constraints": list(self.constraints)}

    def replace(self, name: str, entry: Entry) -> "Space":
        """Returns a copy in which an entry is another one."""
        return Space({**self._entries, name: entry}, self.constraints, self._where)

    def complete(self, drawn: Settings) -> dict[str, Any]:
        """Returns a whole point, in the order of the entries.

        Args:
            drawn: a value for each parameter, or for those that exist; others are left out. A derived value that has
                none there, such as the logarithm of 0, is NaN.
        """
        values: dict[str, Any] = {}
        for item in self._items:
            if not _exists(item, values):
                continue
            if isinstance(item.entry, Parameter):
                if item.name in drawn:
                    values[item.name] = drawn[item.name]
            elif isinstance(item.entry, Fixed):
                values[item.name] = item.entry.value
            else:
                assert item.formula is not None
                value = item.formula.value(values)
                values[item.name] = int(value) if isinstance(value, float) and value.is_integer() else value
        return {name: values[name] for name in self._entries if name in values}

    def exists(self, name: str, drawn: Settings) -> bool:
        """Returns whether a parameter exists, given the values of those before it."""
        values = self.complete({other: value for other, value in drawn.items() if other != name})
        return _exists(next(item for item in self._items if item.name == name), values)

    def is_feasible(self, point: Settings) -> bool:
        """Returns whether a whole point meets the constraints, and all values that are derived are numbers there."""
        if any(_is_undefined(point.get(name)) for name in self._formulas):
            return False
        return all(
            formula.holds(point) for formula in self._constraints if all(name in point for name in formula.names)
        )

    def __contains__(self, point: object) -> bool:
        """Returns whether a mapping is a whole point of the space, constraints included."""
        if not isinstance(point, Mapping):
            return False
        drawn = {name: value for name, value in point.items() if name in self.parameters}
        if any(value not in self.parameters[name] for name, value in drawn.items()):
            return False
        whole = self.complete(drawn)
        # A point that lacks a parameter is completed without it: it then lacks one that exists.
        if any(self.exists(name, drawn) for name in self.parameters if name not in drawn):
            return False
        return whole == dict(point) and self.is_feasible(whole)

    def from_unit(self, shares: Sequence[float] | np.ndarray) -> dict[str, Any]:
        """Returns the drawn values at a point of the unit cube, one coordinate for each of ``parameters``.

        Coordinates of parameters that do not exist have no effect.
        """
        cube = {
            name: parameter.from_unit(float(share))
            for (name, parameter), share in zip(self.parameters.items(), shares, strict=True)
        }
        point = self.complete(cube)
        return {name: point[name] for name in self.parameters if name in point}

    def to_unit(self, drawn: Settings) -> np.ndarray:
        """Returns the point of the unit cube, float64 of shape (parameters,); NaN for parameters that do not exist."""
        return np.array(
            [
                parameter.to_unit(drawn[name]) if name in drawn else math.nan
                for name, parameter in self.parameters.items()
            ]
        )

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """Draws values that meet the constraints, uniformly over the unit cube.

        Raises:
            UserError: none of 5,000 points meets them.
        """
        for _ in range(MAX_DRAWS):
            drawn = self.from_unit(generator.random(len(self.parameters)))
            if self.is_feasible(self.complete(drawn)):
                return drawn
        raise self.hardly_feasible(MAX_DRAWS)

    def hardly_feasible(self, drawn: int, feasible: int = 0) -> UserError:
        """Returns the error of a space that has hardly a feasible point, of so many that were drawn."""
        return UserError(
            f"hardly a point meets the constraints: {feasible or 'none'} of {drawn:,} drawn",
            where=self._constraints_key,
            fix="narrow the ranges, or derive one value from the others",
        )

    def grid(self, points: int) -> Iterator[dict[str, Any]]:
        """Yields the drawn values of every feasible point of a grid, each once, in the order of the entries.

        Args:
            points: values of each number, its ends included; choices have all theirs.
        """
        seen = set()
        for values in itertools.product(*(parameter.grid(points) for parameter in self.parameters.values())):
            point = self.complete(dict(zip(self.parameters, values, strict=True)))
            drawn = {name: point[name] for name in self.parameters if name in point}
            # Points that differ in parameters that do not exist are one point.
            if (key := repr(drawn)) not in seen and self.is_feasible(point):
                seen.add(key)
                yield drawn

    def _check_conditions(self) -> None:
        """Raises a `UserError` if a condition holds at none of many points, or the constraints at hardly any."""
        generator = np.random.default_rng(0)
        missing = {item.name: item.when for item in self._items if item.when is not None}
        undefined = dict(self._formulas)
        feasible = 0
        for _ in range(_CHECKED_POINTS):
            point = self.complete(self.from_unit(generator.random(len(self.parameters))))
            missing = {name: when for name, when in missing.items() if name not in point}
            undefined = {name: formula for name, formula in undefined.items() if _is_undefined(point.get(name, 0))}
            feasible += self.is_feasible(point)
            if feasible >= _LEAST_FEASIBLE and not missing:
                return
        for name, when in missing.items():
            raise UserError(f"never exists, as `{when.text}` never holds", where=f"{self._where}.{name}")
        for name, formula in undefined.items():
            raise UserError(f"`{formula.text}` has no value at any point", where=f"{self._where}.{name}")
        if feasible:
            raise self.hardly_feasible(_CHECKED_POINTS, feasible)
        listed = ", ".join(f"`{text}`" for text in self.constraints) or "the formulas"
        raise UserError(
            f"no point meets {listed} ({_CHECKED_POINTS:,} drawn)",
            where=self._constraints_key,
            fix="widen the ranges, or remove a constraint",
        )


def _is_undefined(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def changes(before: Space, now: Space) -> list[str]:
    """Lists the differences of two spaces, one line each; empty if they are equal."""
    old, new = before.to_json(), now.to_json()
    lines = [f"`{name}` is new" for name in new["entries"] if name not in old["entries"]]
    lines += [f"`{name}` is gone" for name in old["entries"] if name not in new["entries"]]
    lines += [
        f"`{name}` was {_brief(old['entries'][name])} and is {_brief(new['entries'][name])}"
        for name in new["entries"]
        if name in old["entries"] and old["entries"][name] != new["entries"][name]
    ]
    if not lines and (order := list(new["entries"])) != list(old["entries"]):
        lines.append(f"the order is {', '.join(order)}")  # points are drawn and numbered by it
    lines += [f"the constraint `{text}` is new" for text in new["constraints"] if text not in old["constraints"]]
    lines += [f"the constraint `{text}` is gone" for text in old["constraints"] if text not in new["constraints"]]
    return lines


def _brief(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in entry.items())


def _parse(name: str, entry: Entry, where: str) -> _Named:
    when = None if entry.when is None else parse_formula(entry.when, f"{where}.when")
    formula = parse_formula(entry.formula, where) if isinstance(entry, Derived) else None
    return _Named(name, entry, when, formula)


def _in_order(items: dict[str, _Named], where: str) -> list[_Named]:
    """Sorts entries so that each comes after those that its formulas name."""
    graph: TopologicalSorter[str] = TopologicalSorter()
    for name, item in items.items():
        graph.add(name)
        for formula in (item.when, item.formula):
            if formula is not None:
                _check_names(formula, items)
                graph.add(name, *formula.names)
    try:
        return [items[name] for name in graph.static_order()]
    except CycleError as error:
        circle = " → ".join(f"`{name}`" for name in error.args[1])
        raise UserError(f"values depend on each other: {circle}", where=where, fix="give one a range") from None


def _check_names(formula: Formula, known: Mapping[str, Any]) -> None:
    for name in formula.names:
        if name not in known:
            fix = suggest(name, [*known, *FUNCTIONS], listed=False) or f"put a text in quotes: '{name}'"
            raise UserError(f"`{formula.text}`: there is no parameter `{name}`", where=formula.where, fix=fix)


def _exists(item: _Named, values: Settings) -> bool:
    """Returns whether an entry exists, given the values of the entries before it."""
    if item.formula is not None and any(name not in values for name in item.formula.names):
        return False
    if item.when is None:
        return True
    return all(name in values for name in item.when.names) and item.when.holds(values)
