"""Error messages for unknown keys, and for values in place of a section."""

from typing import Any

import pytest
from pydantic import Field

from posttrain.store.errors import UserError
from posttrain.store.section import Section


class Inner(Section):
    decay: float | None = None
    name: str = ""


class OtherSection(Section):
    name: str = ""
    rate_scale: float = 1.0
    inner: Inner | None = None


class ListItem(Section):
    hidden: int = 0


class Root(Section):
    seed: int = 0
    batch_size: int = 1
    first: Inner = Inner()
    second: OtherSection = OtherSection()
    parts: list[ListItem] = Field([])
    by_key: dict[str, ListItem] = Field({})


def message(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        Root.read(values, "f")
    return str(error.value)


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        ({"sead": 1}, "seed"),
        ({"train_batch_size": 1}, "batch_size"),
        ({"second": {"rate": 1}}, "second.rate_scale"),
        ({"rate_scale": 1}, "second.rate_scale"),
        ({"second": {"decay": 1}}, "second.inner.decay"),
        ({"decay": 1}, "first.decay"),  # and not the one further down
        ({"parts": [{"hiden": 1}]}, "parts.0.hidden"),
        ({"by_key": {"any": {"hiden": 1}}}, "by_key.any.hidden"),
    ],
)
def test_a_similar_key_is_suggested(values: dict[str, Any], suggestion: str) -> None:
    assert message(values).endswith(f"; did you mean `{suggestion}`?")


def test_all_unknown_keys_are_named() -> None:
    assert message({"sead": 1, "zz": 2, "second": {"yy": 3}}) == (
        "f: unknown key `second.yy`; unknown too: `sead`, `zz`"
    )
    many = {f"z{number}": 1 for number in range(8)}
    assert message(many).endswith("; unknown too: `z1`, `z2`, `z3`, `z4`, `z5` and 2 more")


@pytest.mark.parametrize(
    ("key", "why"), [("bf16", "nothing is like it"), ("name", "two are"), ("hidden", "no path leads to it")]
)
def test_dissimilar_and_ambiguous_keys_are_not_suggested(key: str, why: str) -> None:
    assert message({key: 1}) == f"f: unknown key `{key}`", why


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"first": "quick"}, "`first` is a section: set one of its keys, such as first.decay"),
        ({"first": None}, "`first` is a section: set one of its keys, such as first.decay"),
        ({"second": {"inner": 0.99}}, "`second.inner` is a section: set one of its keys, such as second.inner.decay"),
        ({"parts": ["x"]}, "`parts.0` is a section: set one of its keys, such as parts.0.hidden"),
        ({"by_key": {"any": 1}}, "`by_key.any` is a section: set one of its keys, such as by_key.any.hidden"),
    ],
)
def test_a_value_in_place_of_a_section_raises(values: dict[str, Any], expected: str) -> None:
    assert message(values) == f"f: {expected}"


class Numbers(Section):
    whole: int = 0
    share: float = 0.0
    several: list[float] = Field([])
    named: dict[int, float] = Field({})
    switch: bool = False
    mode: bool | int = False


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("whole", 2**31, "an integer is at most 2147483647 and at least -2147483647"),
        ("whole", str(10**30), "an integer is at most 2147483647"),
        ("whole", "9" * 5000, "exceeded maximum size"),
        ("whole", True, "a number is expected, not true (as YAML reads yes, no, on and off)"),
        ("whole", "1:30", "a number is expected, not `1:30`"),
        ("share", float("inf"), "Input should be a finite number"),
        ("share", float("nan"), "Input should be a finite number"),
        ("share", "1e999", "Input should be a finite number"),
        ("share", 10**400, "Input should be a valid number"),
        ("share", False, "a number is expected, not false"),
        ("share", "x" * 1000, f"a number is expected, not `{'x' * 57}...`"),
        ("several", [1, True], "a number is expected, not [1, true]"),
        ("several", [float("inf")], "Input should be a finite number"),
        ("named", {1: True}, "a number is expected"),
        ("mode", 2**31, "an integer is at most"),
    ],
)
def test_numbers_are_finite_bounded_and_no_truth_values(key: str, value: Any, problem: str) -> None:
    with pytest.raises(UserError) as error:
        Numbers.read({key: value}, "f")
    assert str(error.value).startswith(f"f: `{key}")
    assert problem in str(error.value)


@pytest.mark.parametrize(
    "values",
    [{"whole": 2**31 - 1}, {"share": "1e-3"}, {"several": [1, 2.5]}, {"switch": True}, {"mode": True}, {"mode": 2}],
)
def test_other_values_are_read_as_before(values: dict[str, Any]) -> None:
    read = Numbers.read(values, "f").model_dump(include=set(values))
    assert read == {key: float(value) if key == "share" else value for key, value in values.items()}


def test_a_key_of_a_megabyte_gives_a_short_line() -> None:
    assert len(message({"x" * 1_000_000: 1})) < 100
    assert "\x1b" not in message({"\x1b[31m": 1})
