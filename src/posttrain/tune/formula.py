"""Formulas over the values of a search space, such as ``2 * rank`` or ``method == 'lora'``: parsed, never run as
Python.

The grammar is that of `posttrain.store.expression`, with text in quotes and functions::

    factor = ... | "'" TEXT "'" | FUNCTION "(" disjunction ("," disjunction)* ")"
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.store.errors import UserError
from posttrain.store.expression import ExpressionParser, Node, is_unknown

_FUNCTIONS: dict[str, tuple[Callable[..., float], int, int | None]] = {
    "sqrt": (math.sqrt, 1, 1),
    "log": (math.log, 1, 1),
    "exp": (math.exp, 1, 1),
    "round": (round, 1, 1),
    "min": (min, 2, None),
    "max": (max, 2, None),
}
"""Function, its least number of arguments and its greatest, by name."""

FUNCTIONS = tuple(_FUNCTIONS)
"""The functions of formulas; ``log`` is the natural logarithm."""

_LITERALS = {"true": True, "false": False, "null": None}

_TOKEN = re.compile(
    r"""\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)(%?)|([A-Za-z_][\w.]*)|(<=|>=|==|!=|[<>+\-*/(),])|'([^']*)'|"([^"]*)")"""
)


class _Text(str):
    """A text in quotes, as a token that is no name."""


@dataclass(frozen=True)
class Formula:
    """A parsed formula.

    Attributes:
        text: as it was written.
        names: the values that it needs, in the order of their first mention.
    """

    text: str
    names: tuple[str, ...]
    where: str
    _node: Node

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the value: a number, a truth value or a text.

        It is NaN where it is unknown, as for a division by zero, the logarithm of 0, or a power that is too large.

        Raises:
            KeyError: ``values`` lacks one of ``names``.
            UserError: the values have no such result, as for a text that is divided.
        """
        try:
            return self._node(values)
        except (ValueError, OverflowError):
            return math.nan
        except TypeError as error:
            known = ", ".join(f"{name} = {values[name]!r}" for name in self.names)
            raise UserError(f"`{self.text}` has no value for {known}: {error}", where=self.where) from None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the formula is true; one that is unknown is not."""
        value = self.value(values)
        return bool(value) and not is_unknown(value)


def parse_formula(text: str, where: str) -> Formula:
    """Parses a formula.

    Args:
        text: the formula.
        where: the key that it comes from, named in errors.

    Raises:
        UserError: it does not follow the grammar.
    """
    parser = _FormulaParser(text, where)
    node = parser.parse()
    return Formula(text, tuple(dict.fromkeys(parser.names)), where, node)


class _FormulaParser(ExpressionParser):
    kind: ClassVar[str] = "formula"
    pattern: ClassVar[re.Pattern[str]] = _TOKEN

    def read_token(self, match: re.Match[str]) -> str | float:
        *_, single, double = match.groups()
        if single is not None or double is not None:
            return _Text(single if single is not None else double)
        return super().read_token(match)

    def factor(self) -> Node:
        token = self.peek()
        if isinstance(token, _Text):
            self.position += 1
            self.count_term()
            return lambda values: str(token)
        if isinstance(token, str) and token in _FUNCTIONS:
            return self._call(token)
        if isinstance(token, str) and token in _LITERALS:
            self.position += 1
            self.count_term()
            return lambda values: _LITERALS[token]
        return super().factor()

    def _call(self, name: str) -> Node:
        function, least, most = _FUNCTIONS[name]
        self.position += 1
        if not self.take("("):
            self.fail(f"`{name}` is a function: write {name}(...)")
        with self.nested():
            arguments = [self.disjunction()]
            while self.take(","):
                arguments.append(self.disjunction())
        if not self.take(")"):
            self.fail("a `)` is missing")
        if len(arguments) < least or (most is not None and len(arguments) > most):
            self.fail(f"`{name}` takes {least} {'value' if least == 1 else 'values or more'}")

        def node(values: Mapping[str, Any]) -> Any:
            inner = [argument(values) for argument in arguments]
            return math.nan if any(map(is_unknown, inner)) else function(*inner)

        return node
