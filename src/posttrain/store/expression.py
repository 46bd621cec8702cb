"""Rules over named values, such as ``accuracy >= champion.accuracy * 1.02``: parsed, never run as Python.

A rule has numbers (also ``2%``), names with dots, ``+ - * /``, comparisons of two values, ``and``, ``or``, ``not`` and
parentheses, which bind as in Python. `posttrain.tune.formula` adds texts and functions.

A value that is not a number (a metric that could not be measured, a division by zero) makes what it touches
unknown, as in Kleene's logic: a comparison with it, and ``not`` of that, are unknown; ``and`` and ``or`` are,
unless their other side decides alone. A rule that is unknown does not hold.
"""

import ast
import math
import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

from posttrain.store.errors import UserError, shorten

MAX_CHARACTERS = 2_000
"""Characters of the longest rule."""

MAX_PARTS = 250
"""Names, numbers and signs in a rule, at most: evaluation recurses."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<percent>%?)|(?P<name>[A-Za-z_][\w.]*)"""
    r"""|(?P<sign><=|>=|==|!=|[<>+\-*/()])|(?P<comma>,)|(?P<text>'[^'\n]*'|"[^"\n]*"))"""
)

_NAME = re.compile(r"[A-Za-z_][\w.]*")

_WORDS = ("and", "or", "not")

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A metric of 0 in a denominator makes the rule unknown; raising would end the round after its training.
    ast.Div: lambda a, b: a / b if b else math.nan,
}

Values = Mapping[str, float]


@dataclass(frozen=True)
class Grammar:
    """What an expression may hold.

    Attributes:
        kind: noun for messages.
        has_texts: whether texts in quotes are values.
        functions: each with its least number of arguments and its greatest, by name.
        constants: values by name.
    """

    kind: str = "rule"
    has_texts: bool = False
    functions: Mapping[str, tuple[Callable[..., Any], int, int | None]] | None = None
    constants: Mapping[str, Any] | None = None


RULES = Grammar()


@dataclass(frozen=True)
class Expression:
    """A parsed expression; ``names`` are the values it needs, in the order of their first mention."""

    text: str
    names: tuple[str, ...]
    grammar: Grammar
    _tree: ast.expr

    def value(self, values: Mapping[str, Any]) -> Any:
        """Returns the value; NaN where it is unknown.

        Raises:
            KeyError: ``values`` lacks one of ``names``.
        """
        return self._value(self._tree, values)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the expression is true; one that is unknown is not.

        Raises:
            KeyError: ``values`` lacks one of ``names``.
        """
        return _is_true(self.value(values))

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                constants = self.grammar.constants or {}
                return constants[name] if name in constants else values[name]
            case ast.BoolOp(op, parts):
                # A surely false side decides `and` alone, a surely true one `or`.
                decides = isinstance(op, ast.Or)
                sides = [self._value(part, values) for part in parts]
                if any(_is_true(side) if decides else not side for side in sides):
                    return decides
                return math.nan if any(map(is_unknown, sides)) else not decides
            case ast.UnaryOp(op, operand):
                value = self._value(operand, values)
                if isinstance(op, ast.USub):
                    return -value
                return math.nan if is_unknown(value) else not value
            case ast.Compare(left, [op], [right]) | ast.BinOp(left, op, right):
                sides = [self._value(left, values), self._value(right, values)]
                return math.nan if any(map(is_unknown, sides)) else _OPERATORS[type(op)](*sides)
            case ast.Call(ast.Name(name), arguments):
                inner = [self._value(argument, values) for argument in arguments]
                assert self.grammar.functions is not None, "the parser has checked it"
                return math.nan if any(map(is_unknown, inner)) else self.grammar.functions[name][0](*inner)
        raise AssertionError(f"the parser has let {ast.dump(node)} through")


@dataclass(frozen=True)
class Rule(Expression):
    """A rule of a gate or a trigger."""

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
    tree, names = parse_tree(text, where, RULES)
    return Rule(text, names, RULES, tree)


def parse_tree(text: str, where: str, grammar: Grammar) -> tuple[ast.expr, tuple[str, ...]]:
    """Returns an expression's tree, of nothing but what the grammar knows, and the names of its values.

    Raises:
        UserError: the text does not follow the grammar.
    """
    return _Parser(text, where, grammar).parse()


class _Parser:
    """Checks every token, has Python's own parser build the tree, and checks that node by node."""

    def __init__(self, text: str, where: str, grammar: Grammar) -> None:
        self._text, self._where, self._grammar = text, where, grammar
        self._functions, self._constants = grammar.functions or {}, grammar.constants or {}
        self._tokens: list[str] = []
        self._sources: list[str] = []  # the tokens as Python reads them

    def parse(self) -> tuple[ast.expr, tuple[str, ...]]:
        if len(self._text) > MAX_CHARACTERS:
            what = f"has {len(self._text):,} characters, and a {self._grammar.kind} has at most {MAX_CHARACTERS:,}"
            self._fail(what)
        self._read_tokens()
        try:
            tree = ast.parse(" ".join(self._sources), mode="eval").body
        except SyntaxError as error:
            if "was never closed" in error.msg:
                self._fail("a `)` is missing")
            # Python's parser points to nothing at the end of a text.
            end = len(" ".join(self._sources)) + 1
            self._reject(max(error.offset - 1, (error.end_offset or 0) - 2) if error.offset else end)
        self._check(tree)
        known = {*_WORDS, *self._functions, *self._constants}
        names = (token for token in self._tokens if _NAME.fullmatch(token) and token not in known)
        return tree, tuple(dict.fromkeys(names))

    def _read_tokens(self) -> None:
        position = 0
        while self._text[position:].strip():
            match = _TOKEN.match(self._text, position)
            allowed = match and not (
                (match["comma"] and not self._functions) or (match["text"] and not self._grammar.has_texts)
            )
            if match is None or not allowed:
                self._fail(f"`{self._text[position:].strip()[0]}` means nothing in a {self._grammar.kind}")
            token = match[0].strip()
            if match["number"]:
                number = float(match["number"]) / (100 if match["percent"] else 1)
                if not math.isfinite(number):
                    self._fail(f"`{shorten(match['number'])}` is too large a number")
                source = repr(number)
            elif match["name"] and token not in _WORDS:
                # Python reads no dots and digits as one name: it gets the token's number instead.
                source = f"_{len(self._tokens)}"
            else:
                source = repr(token[1:-1]) if match["text"] else token
            self._tokens.append(token)
            self._sources.append(source)
            position = match.end()
        if len(self._tokens) > MAX_PARTS:
            self._fail(f"has more than {MAX_PARTS} names, numbers and signs")

    def _check(self, node: ast.AST) -> None:
        """Checks a node and those below it, and gives names their own spelling again."""
        match node:
            case ast.Constant():
                return
            case ast.Name(number):
                node.id = name = self._tokens[int(number[1:])]
                if name in self._functions:
                    self._fail(f"`{name}` is a function: write {name}(...)")
                return
            case ast.Call(ast.Name(number) as function, arguments, []):
                function.id = name = self._tokens[int(number[1:])]
                if name not in self._functions:
                    self._reject(function.end_col_offset or 0)
                _, least, most = self._functions[name]
                if len(arguments) < least or (most is not None and len(arguments) > most):
                    self._fail(f"`{name}` takes {least} {'value' if least == 1 else 'values or more'}")
                parts: Sequence[ast.AST] = arguments
            case ast.Compare(left, [_], [right]) | ast.BinOp(left, _, right):
                parts = [left, right]
            case ast.Compare():
                self._fail("compares more than two values; join comparisons by `and`")
            case ast.BoolOp(_, parts):
                pass
            case ast.UnaryOp(ast.Not() | ast.USub(), operand):
                parts = [operand]
            case _:
                self._reject(getattr(node, "col_offset", 0))
        for part in parts:
            self._check(part)

    def _reject(self, position: int) -> NoReturn:
        """Raises the error about the token at a position of the joined tokens."""
        starts = list(accumulate((len(source) + 1 for source in self._sources), initial=0))
        at = bisect_right(starts, position) - 1
        if at >= len(self._tokens):
            self._fail("something is missing at its end")
        self._fail(f"`{shorten(self._tokens[at])}` does not belong here")

    def _fail(self, what: str) -> NoReturn:
        raise UserError(f"{self._grammar.kind} `{shorten(self._text)}`: {what}", where=self._where)


def _is_true(value: Any) -> bool:
    return bool(value) and not is_unknown(value)


def is_unknown(value: Any) -> bool:
    """Returns whether a value is the NaN that stands for a number that is not known."""
    return isinstance(value, float) and math.isnan(value)
