"""Rules mean what they say, and nothing in them is executed."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.loop.expression import parse
from posttrain.store.errors import UserError

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
def test_holds(text: str) -> None:
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    ["a != 0.5", "a < 0.5", "a > 0.5", "not a < b", "a > b and a < b", "zero", "not a", "(a < b or a > b) and a > b"],
)
def test_does_not_hold(text: str) -> None:
    assert not holds(text)


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("unknown", "a"),
        ("a", "unknown"),
        ("unknown", "unknown"),
        ("a / zero", "1"),
        ("1", "-unknown"),
        ("zero / zero", "0"),
    ],
)
def test_what_is_no_number_never_holds(left: str, right: str, sign: str) -> None:
    for text in (f"{left} {sign} {right}", f"not {left} {sign} {right}", f"not not {left} {sign} {right}"):
        assert not holds(text)


@pytest.mark.parametrize("text", ["unknown", "not unknown", "-unknown", "a / zero", "unknown + 1"])
def test_a_bare_value_that_is_no_number(text: str) -> None:
    assert not holds(text)


TRUTH: dict[Any, str] = {True: "a < b", False: "a > b", None: "unknown > 0"}


@pytest.mark.parametrize("left", TRUTH)
@pytest.mark.parametrize("right", TRUTH)
def test_unknown_in_and_and_or(left: bool | None, right: bool | None) -> None:
    """Kleene's tables, over the three ways in which a side can turn out."""
    sides = (left, right)
    conjunction = False if False in sides else None if None in sides else True
    disjunction = True if True in sides else None if None in sides else False
    for word, value in (("and", conjunction), ("or", disjunction)):
        text = f"({TRUTH[left]}) {word} ({TRUTH[right]})"
        assert holds(text) is (value is True)
        assert holds(f"not ({text})") is (value is False)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "missing at its end"),
        ("   ", "missing at its end"),
        ("a >", "missing at its end"),
        ("a > b and", "missing at its end"),
        ("a > > b", "`>`"),
        ("a b", "`b`"),
        ("a > b b", "`b`"),
        ("a > b > c", "`>`"),
        ("1.2.3 > a", "`0.3`"),
        ("(a > b", "`)` is missing"),
        ("a > b)", "`)`"),
        ("()", "`)`"),
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
        ("f(a) > 1", "`(`"),
        ("a[0] > 1", "`[`"),
        ("a > 1; b", "`;`"),
        ("a > 1 # b", "`#`"),
        ("a: 1", "`:`"),
        ("{a}", "`{`"),
        ("a\\b", "`\\`"),
        ("é > 1", "`é`"),
    ],
)
def test_an_error_names_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, "gate.deploy")
    line = str(caught.value)
    assert line.startswith(f"gate.deploy: rule `{text}`: ")
    assert named in line.removeprefix(f"gate.deploy: rule `{text}`: ")


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
def test_nothing_that_python_would_execute_is_a_rule(text: str) -> None:
    with pytest.raises(UserError):
        parse(text, "gate.deploy")


def test_attribute_names_are_nothing_but_names() -> None:
    rule = parse("a.__class__ > 0", "gate.deploy")
    assert rule.names == ("a.__class__",)
    with pytest.raises(KeyError):
        rule.holds({"a": 1.0})


def test_names_in_order_and_values_shown() -> None:
    rule = parse("b > a * 2 and a < champion.a or b > 1", "gate.deploy")
    assert rule.names == ("b", "a", "champion.a")
    assert rule.shown(VALUES) == "b = 2, a = 0.5, champion.a = 0.4"


# Python itself is the reference, for the part of its grammar that is ours too.
_NAMES = ("a", "b", "c")
_numbers = st.integers(0, 20).map(str) | st.sampled_from(["0.5", "1.25", "3.", ".75", "1e2", "2E-1"])


def _between(signs: list[str], part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda left, sign, right: f"{left} {sign} {right}", part, st.sampled_from(signs), part)


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
def test_like_python(text: str, values: tuple[float, ...]) -> None:
    named = dict(zip(_NAMES, values, strict=True))
    try:
        expected = eval(text, {"__builtins__": {}}, dict(named))  # noqa: S307 - our own text, as the reference
    except (ZeroDivisionError, OverflowError):
        parse(text, "gate.deploy").holds(named)  # unknown; only that it does not fail
        return
    assert parse(text, "gate.deploy").holds(named) is bool(expected)


@given(st.text(max_size=40))
def test_any_text_is_a_rule_or_a_users_mistake(text: str) -> None:
    try:
        rule = parse(text, "gate.deploy")
    except UserError:
        return
    assert rule.holds(dict.fromkeys(rule.names, 1.0)) in (True, False)
