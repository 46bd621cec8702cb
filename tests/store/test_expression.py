"""Rules are evaluated by their grammar, and no code in them is executed."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.store.expression import parse

NAN = math.nan
VALUES = {"a": 0.5, "b": 2.0, "champion.a": 0.4, "gain.a.low": -0.1, "zero": 0.0, "unknown": NAN, "_x1": 7.0}


def holds(text: str, **values: float) -> bool:
    return parse(text, "gate.deploy").holds({**VALUES, **values})


@pytest.mark.parametrize(
    "text",
    [
        "a == 0.5",
        "a >= champion.a * 1.02",
        "a>=champion.a*1.02",
        "gain.a.low < 0",
        "_x1 == 7",
        "1 + 2 * 3 == 7",
        "(1 + 2) * 3 == 9",
        "2 * 3 + 1 == 7",
        "8 / 4 / 2 == 1",
        "8 - 4 - 2 == 2",
        "-a == 0 - 0.5",
        "--a == a",
        "-a * 2 == -1",
        "3 - -a == 3.5",
        "-(a + b) == -2.5",
        "a == 50%",
        "a <= champion.a + 12.5%",
        "1e-3 < 1.5E2",
        ".5 == a",
        "5. == 5",
        "a < b and b > a",
        "a > b or b > a",
        "not a > b",
        "not not a < b",
        "a > b and a > b or a < b",  # `and` binds closer than `or`
        "a < b or a < b and a > b",
        "not a > b and a < b",  # `not` binds closer than `and`
        "not (a < b and a > b)",
        "(a)",
        "a",
    ],
)
def test_rules_that_hold(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    ["a != 0.5", "a < 0.5", "a > 0.5", "not a < b", "a > b and a < b", "zero", "not a", "(a < b or a > b) and a > b"],
)
def test_rules_that_do_not_hold(text: str) -> None:
    assert not holds(text)


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("unknown", "a"),
        ("a", "unknown"),
        ("unknown", "unknown"),
        ("a / zero", "1"),
        ("1", "-unknown"),
        ("zero / zero", "0"),
    ],
)
def test_comparisons_with_nan_never_hold(first: str, second: str, sign: str) -> None:
    for text in (f"{first} {sign} {second}", f"not {first} {sign} {second}", f"not not {first} {sign} {second}"):
        assert not holds(text)


@pytest.mark.parametrize("text", ["unknown", "not unknown", "-unknown", "a / zero", "unknown + 1"])
def test_a_bare_nan_does_not_hold(text: str) -> None:
    assert not holds(text)


TRUTH: dict[Any, str] = {True: "a < b", False: "a > b", None: "unknown > 0"}


@pytest.mark.parametrize("first", TRUTH)
@pytest.mark.parametrize("second", TRUTH)
def test_and_and_or_follow_kleenes_logic(first: bool | None, second: bool | None) -> None:
    """Kleene's tables over the three truth values of each operand."""
    operands = (first, second)
    conjunction = False if False in operands else None if None in operands else True
    disjunction = True if True in operands else None if None in operands else False
    for operator, value in (("and", conjunction), ("or", disjunction)):
        text = f"({TRUTH[first]}) {operator} ({TRUTH[second]})"
        assert holds(text) is (value is True)
        assert holds(f"not ({text})") is (value is False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "missing at its end"),
        ("   ", "missing at its end"),
        ("a >", "missing at its end"),
        ("a > b and", "missing at its end"),
        ("a > > b", "`>`"),
        ("a b", "`b`"),
        ("a > b b", "`b`"),
        ("a > b > c", "compares more than two values"),
        ("1.2.3 > a", "`.3`"),
        ("(a > b", "`)` is missing"),
        ("a > b)", "`)`"),
        ("()", "`(`"),
        ("a = b", "`=`"),
        ("a & b", "`&`"),
        ("a ** b > 1", "`*`"),
        ("a > 'b'", "`'`"),
        ("a > 5 %", "`%`"),
        ("a% > 5", "`%`"),
        ("+a > 5", "`+`"),
        ("a > not b", "`not`"),
        ("and > 1", "`and`"),
        ("a > b or or a", "`or`"),
        ("f(a) > 1", "`f`"),
        ("a[0] > 1", "`[`"),
        ("a > 1; b", "`;`"),
        ("a > 1 # b", "`#`"),
        ("a: 1", "`:`"),
        ("{a}", "`{`"),
        ("a\\b", "`\\`"),
        ("é > 1", "`é`"),
    ],
)
def test_an_error_names_the_problem(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, "gate.deploy")
    line = str(caught.value)
    assert line.startswith(f"gate.deploy: rule `{text}`: ")
    assert problem in line.removeprefix(f"gate.deploy: rule `{text}`: ")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "__import__('os')",
        "().__class__",
        "a.__class__()",
        "print(1)",
        "exec('1')",
        "lambda: 1",
        "[x for x in a]",
        "a if b else a",
        "a := 1",
        'open("x")',
        "`true`",
        "$(true)",
        "0x10 > a",
        "1_000 > a",
        "a is b",
        "a in b",
        "f'{a}'",
    ],
)
def test_python_code_is_no_rule(text: str) -> None:
    with pytest.raises(UserError):
        parse(text, "gate.deploy")


def test_attributes_are_plain_names() -> None:
    rule = parse("a.__class__ > 0", "gate.deploy")
    assert rule.names == ("a.__class__",)
    with pytest.raises(KeyError):
        rule.holds({"a": 1.0})


def test_a_rule_lists_its_names_in_order_and_shows_their_values() -> None:
    rule = parse("b > a * 2 and a < champion.a or b > 1", "gate.deploy")
    assert rule.names == ("b", "a", "champion.a")
    assert rule.format_values(VALUES) == "b = 2, a = 0.5, champion.a = 0.4"


# Python itself is the reference, for the grammar that rules share with it.
_NAMES = ("a", "b", "c")
_numbers = st.integers(0, 20).map(str) | st.sampled_from(["0.5", "1.25", "3.", ".75", "1e2", "2E-1"])


def _between(signs: list[str], part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda first, sign, second: f"{first} {sign} {second}", part, st.sampled_from(signs), part)


_sums = st.recursive(
    _numbers | st.sampled_from(_NAMES),
    lambda inner: (
        _between(["+", "-", "*", "/"], inner) | inner.map(lambda text: f"({text})") | inner.map(lambda text: f"-{text}")
    ),
    max_leaves=12,
)
_rules = st.recursive(
    _between(["<", "<=", ">", ">=", "==", "!="], _sums),
    lambda inner: (
        _between(["and", "or"], inner) | inner.map(lambda text: f"({text})") | inner.map(lambda text: f"not {text}")
    ),
    max_leaves=6,
)


@given(_rules, st.tuples(*[st.integers(-3, 3).map(lambda n: n / 2) for _ in _NAMES]))
def test_rules_evaluate_like_python(text: str, values: tuple[float, ...]) -> None:
    variables = dict(zip(_NAMES, values, strict=True))
    try:
        expected = eval(text, {"__builtins__": {}}, dict(variables))  # noqa: S307 - generated text, as the reference
    except (ZeroDivisionError, OverflowError):
        parse(text, "gate.deploy").holds(variables)  # the result is unknown, but there is no exception
        return
    assert parse(text, "gate.deploy").holds(variables) is bool(expected)


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_a_user_error(text: str) -> None:
    try:
        rule = parse(text, "gate.deploy")
    except UserError:
        return
    assert rule.holds(dict.fromkeys(rule.names, 1.0)) in (True, False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a" + " + a" * 1499 + " > 0", "has 6,001 characters, and a rule has at most 2,000"),
        ("a" + "+a" * 200, "has more than 250 names, numbers and signs"),
        ("(" * 200 + "a" + ")" * 200, "has more than 250 names, numbers and signs"),
        ("not " * 300 + "a", "has more than 250 names, numbers and signs"),
        ("-" * 300 + "a", "has more than 250 names, numbers and signs"),
        ("a" * 1_000_000, "has 1,000,000 characters"),
        ("1" * 400 + " > a", "is too large a number"),
        ("a > 1e999", "is too large a number"),
    ],
)
def test_long_and_deep_rules_are_refused_in_one_short_line(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        parse(text, "gate.deploy")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text",
    [
        "+".join(["a"] * 99) + " > 0",
        " and ".join(["a"] * 100),
        " or ".join(["zero"] * 99 + ["a"]),
        "(" * 120 + "a" + ")" * 120,
        "not " * 248 + "a",
        "-" * 248 + "a",
    ],
)
def test_rules_at_the_limits_are_evaluated(text: str) -> None:
    assert holds(text)
