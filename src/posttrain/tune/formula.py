"""Formulas over the values of a search space, such as ``2 * rank`` or ``method == 'lora'``: parsed, never run as
Python.

The grammar is that of `posttrain.store.expression`, with texts in quotes, the functions of `FUNCTIONS`, and ``true``,
``false`` and ``null``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.store.errors import UserError
from posttrain.store.expression import Expression, Grammar, parse_tree

FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int | None]] = {
    "sqrt": (math.sqrt, 1, 1),
    "log": (math.log, 1, 1),
    "exp": (math.exp, 1, 1),
    "round": (round, 1, 1),
    "min": (min, 2, None),
    "max": (max, 2, None),
}
"""The functions, each with its least number of arguments and its greatest; ``log`` is the natural logarithm."""

_CONSTANTS = {"true": True, "false": False, "null": None}

_FORMULAS = Grammar("formula", has_texts=True, functions=FUNCTIONS, constants=_CONSTANTS)


@dataclass(frozen=True)
class Formula(Expression):
    """A parsed formula; ``where`` is the key that it comes from, named in errors."""

    where: str

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the value: a number, a truth value or a text.

        It is NaN where it is unknown, as for a division by zero, the logarithm of 0, or a power that is too large.

        Raises:
            KeyError: ``values`` lacks one of ``names``.
            UserError: the values have no such result, as for a text that is divided.
        """
        try:
            return super().value(values)
        except (ValueError, OverflowError):
            return math.nan
        except TypeError as error:
            known = ", ".join(f"{name} = {values[name]!r}" for name in self.names)
            raise UserError(f"`{self.text}` has no value for {known}: {error}", where=self.where) from None


def parse_formula(text: str, where: str) -> Formula:
    """Parses a formula.

    Args:
        text: the formula.
        where: the key that it comes from, named in errors.

    Raises:
        UserError: it does not follow the grammar.
    """
    tree, names = parse_tree(text, where, _FORMULAS)
    return Formula(text, names, _FORMULAS, tree, where)
