"""Rules over named values, such as ``accuracy >= champion.accuracy * 1.02``: parsed, never run as Python.

Grammar::

    rule       = disjunction
    disjunction = conjunction ("or" conjunction)*
    conjunction = negation ("and" negation)*
    negation   = "not" negation | comparison
    comparison = sum (("<" | "<=" | ">" | ">=" | "==" | "!=") sum)?
    sum        = product (("+" | "-") product)*
    product    = factor (("*" | "/") factor)*
    factor     = NUMBER ["%"] | NAME | "-" factor | "(" disjunction ")"

A value that is not a number (a metric that could not be measured, a division by zero) makes what it touches
unknown, as in Kleene's logic: a comparison with it, and ``not`` of that, are unknown; ``and`` and ``or`` are,
unless their other side decides alone. A rule that is unknown does not hold.

Rules are limited in length, in terms and in depth, since parsing and evaluation recurse. `ExpressionParser` is also the
base of other grammars, such as the formulas of `posttrain.tune`.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from posttrain.store.errors import UserError, shorten

# Own grammar instead of `eval`: rules come from a config that may be shared, and must not run code.
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)(%?)|([A-Za-z_][\w.]*)|(<=|>=|==|!=|[<>+\-*/()]))")
MAX_CHARACTERS = 2_000
"""Characters of the longest rule."""

MAX_TERMS = 100
"""Names and numbers in a rule, at most: a chain of so many operators is evaluated by as many nested calls."""

MAX_DEPTH = 20
"""Parentheses, ``not`` and minus signs inside each other, at most; each costs up to nine nested calls."""

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_ARITHMETIC: dict[str, Callable[[Any, Any], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    # A metric of 0 in a denominator makes the rule unknown; raising would end the round after its training.
    "/": lambda a, b: a / b if b else math.nan,
}

Values = Mapping[str, float]
Node = Callable[[Mapping[str, Any]], Any]
"""A parsed part of an expression, as a function of the values; rules have numbers alone."""


@dataclass(frozen=True)
class Rule:
    """A parsed rule; ``names`` are the values it needs, in the order of their first mention."""

    text: str
    names: tuple[str, ...]
    _evaluate: Node

    def holds(self, values: Values) -> bool:
        """Returns True if the rule holds; a rule that is unknown, for a value that is not a number, does not.

        Raises:
            KeyError: if ``values`` lacks one of ``names``.
        """
        return _true(self._evaluate(values))

    def format_values(self, values: Values) -> str:
        """Formats the values that decided, such as ``accuracy = 0.913, champion.accuracy = 0.872``."""
        return ", ".join(f"{name} = {values[name]:.4g}" for name in self.names)


def parse(text: str, where: str) -> Rule:
    """Parses a rule.

    Args:
        text: The rule.
        where: The config key that it comes from, named in the error.

    Raises:
        UserError: if it does not follow the grammar.
    """
    parser = ExpressionParser(text, where)
    node = parser.parse()
    return Rule(text, tuple(dict.fromkeys(parser.names)), node)


class ExpressionParser:
    """Recursive descent, a method for each rule of the grammar; each returns a function of the values.

    Attributes:
        kind: noun for messages.
        pattern: one token; its groups are number, percent sign, name and sign.
        names: the names that were read, in order.
    """

    kind: ClassVar[str] = "rule"
    pattern: ClassVar[re.Pattern[str]] = _TOKEN

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.names: list[str] = []
        self.terms = self.depth = 0
        if len(text) > MAX_CHARACTERS:
            self.fail(f"has {len(text):,} characters, and a {self.kind} has at most {MAX_CHARACTERS:,}")
        self.tokens: list[str | float] = []
        position = 0
        while text[position:].strip():
            match = self.pattern.match(text, position)
            if not match:
                self.fail(f"`{text[position:].strip()[0]}` means nothing in a {self.kind}")
            self.tokens.append(self.read_token(match))
            position = match.end()
        self.position = 0

    def parse(self) -> Node:
        """Returns the whole expression."""
        node = self.disjunction()
        if self.peek() is not None:
            self.fail(f"`{self.peek()}` does not belong here")
        return node

    def read_token(self, match: re.Match[str]) -> str | float:
        number, percent, name, sign = match.groups()[:4]
        if number and not math.isfinite(float(number)):
            self.fail(f"`{shorten(number)}` is too large a number")
        return float(number) / (100 if percent else 1) if number else name or sign

    def fail(self, what: str) -> NoReturn:
        raise UserError(f"{self.kind} `{shorten(self.text)}`: {what}", where=self.where)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Counts the depth around a part that may hold another like it."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"is nested more than {MAX_DEPTH} deep")
        yield
        self.depth -= 1

    def count_term(self) -> None:
        self.terms += 1
        if self.terms > MAX_TERMS:
            self.fail(f"has more than {MAX_TERMS} names and numbers")

    def peek(self) -> str | float | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, *expected: str) -> str | None:
        token = self.peek()
        if isinstance(token, str) and token in expected:
            self.position += 1
            return token
        return None

    def disjunction(self) -> Node:
        left = self.conjunction()
        while self.take("or"):
            left = _either(left, self.conjunction())
        return left

    def conjunction(self) -> Node:
        left = self.negation()
        while self.take("and"):
            left = _both(left, self.negation())
        return left

    def negation(self) -> Node:
        if self.take("not"):
            with self.nested():
                return _negated(self.negation())
        left = self.sum()
        if sign := self.take(*_COMPARISONS):
            return _compared(sign, left, self.sum())
        return left

    def sum(self) -> Node:
        left = self.product()
        while sign := self.take("+", "-"):
            left = _combine(sign, left, self.product())
        return left

    def product(self) -> Node:
        left = self.factor()
        while sign := self.take("*", "/"):
            left = _combine(sign, left, self.factor())
        return left

    def factor(self) -> Node:
        if self.take("-"):
            with self.nested():
                inner = self.factor()
            return lambda values: -inner(values)
        if self.take("("):
            with self.nested():
                inside = self.disjunction()
            if not self.take(")"):
                self.fail("a `)` is missing")
            return inside
        token = self.peek()
        self.position += 1
        self.count_term()
        if isinstance(token, float):
            return lambda values: token
        if token is None:
            self.fail("something is missing at its end")
        if not isinstance(token, str) or not (token[0].isalpha() or token[0] == "_") or token in ("and", "or", "not"):
            self.fail(f"a name or a number is expected where `{token}` stands")
        name = str(token)
        self.names.append(name)
        return lambda values: values[name]


def _combine(sign: str, left: Node, right: Node) -> Node:
    apply = _ARITHMETIC[sign]
    return lambda values: apply(left(values), right(values))


def _true(value: Any) -> bool:
    return bool(value) and not is_unknown(value)


def is_unknown(value: Any) -> bool:
    """Returns whether a value is the NaN that stands for a number that is not known."""
    return isinstance(value, float) and math.isnan(value)


def _compared(sign: str, left: Node, right: Node) -> Node:
    compare = _COMPARISONS[sign]

    def node(values: Mapping[str, Any]) -> float:
        a, b = left(values), right(values)
        return math.nan if is_unknown(a) or is_unknown(b) else compare(a, b)

    return node


def _negated(inner: Node) -> Node:
    def node(values: Mapping[str, Any]) -> float:
        value = inner(values)
        return math.nan if is_unknown(value) else not value

    return node


def _both(left: Node, right: Node) -> Node:
    def node(values: Mapping[str, Any]) -> float:
        a, b = left(values), right(values)
        # NaN is truthy: a false side is surely false, and decides alone.
        if not a or not b:
            return False
        return math.nan if is_unknown(a) or is_unknown(b) else True

    return node


def _either(left: Node, right: Node) -> Node:
    def node(values: Mapping[str, Any]) -> float:
        a, b = left(values), right(values)
        if _true(a) or _true(b):
            return True
        return math.nan if is_unknown(a) or is_unknown(b) else False

    return node
