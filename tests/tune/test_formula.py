"""Formulas have the values that Python gives, know text and functions, and run no code."""

import math

import pytest

from posttrain.store.errors import UserError
from posttrain.tune.formula import parse_formula

VALUES = {"rank": 16, "method": "lora", "flag": True, "lora.alpha": 32.0, "nothing": None, "zero": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * rank", 32),
        ("rank + lora.alpha / 4", 24),
        ("method == 'lora'", True),
        ('method != "lora"', False),
        ("method == 'lora' and rank > 8", True),
        ("not flag", False),
        ("flag == true", True),
        ("nothing == null", True),
        ("0.001 * sqrt(rank / 4)", 0.002),
        ("log(exp(2))", 2),
        ("round(rank / 3)", 5),
        ("min(rank, 3, lora.alpha)", 3),
        ("max(rank * 2, 3) - 1", 31),
        ("10%", 0.1),
        ("'a' < 'b'", True),
    ],
)
def test_values(text: str, value: object) -> None:
    assert parse_formula(text, "space.x").value(VALUES) == pytest.approx(value)


def test_names_are_listed_once() -> None:
    assert parse_formula("rank * 2 + max(rank, lora.alpha) + sqrt(4)", "x").names == ("rank", "lora.alpha")


@pytest.mark.parametrize("text", ["1 / zero", "sqrt(1 / zero)", "min(1, 1 / zero)"])
def test_a_division_by_zero_is_unknown(text: str) -> None:
    formula = parse_formula(text, "x")
    assert math.isnan(formula.value(VALUES))
    assert not formula.holds(VALUES)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("method * rank / method", "space.x: `method * rank / method` has no value for method = 'lora', rank = 16"),
        ("method > rank", "has no value"),
    ],
)
def test_values_without_a_result_are_named(text: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        parse_formula(text, "space.x").value(VALUES)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sqrt rank", "`rank` does not belong here"),
        ("sqrt + 1", "`sqrt` is a function: write sqrt(...)"),
        ("sqrt(1, 2)", "`sqrt` takes 1 value"),
        ("min(1)", "`min` takes 2 values or more"),
        ("min(1, 2", "a `)` is missing"),
        ("'lora", "`'` means nothing in a formula"),
        ("rank rank", "`rank` does not belong here"),
        ("__import__('os')", "does not belong here"),
        ("eval('1')", "does not belong here"),
        ("(" * 130 + "1" + ")" * 130, "more than 250 names, numbers and signs"),
        ("+".join(["'a'"] * 200), "more than 250 names, numbers and signs"),
    ],
)
def test_mistakes_are_named(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=r"space\.x: formula") as error:
        parse_formula(text, "space.x")
    assert problem in str(error.value)
