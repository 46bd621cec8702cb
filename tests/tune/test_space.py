"""Spaces: what is drawn, conditions, derived values, constraints, and the mistakes that are named before any work."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.store.errors import UserError
from posttrain.testing.samplers import SPACE
from posttrain.tune.parameters import Choice, Derived, Fixed, Float, Int, Parameter
from posttrain.tune.space import Space, changes

PARAMETERS: list[Parameter] = [
    Float(-2, 3),
    Float(1e-6, 1e-3, log=True),
    Int(1, 8),
    Int(4, 64, log=True),
    Int(-3, 3),
    Choice(["a", 1, True, None, [1, 2]]),
]


@given(st.sampled_from(PARAMETERS), st.floats(0, 1))
def test_shares_and_values_map_to_each_other(parameter: Parameter, share: float) -> None:
    value = parameter.from_unit(share)
    assert value in parameter
    assert parameter.from_unit(parameter.to_unit(value)) == (
        pytest.approx(value) if isinstance(parameter, Float) else value
    )
    if isinstance(parameter, Float):
        assert parameter.to_unit(value) == pytest.approx(share, abs=1e-9)


def test_integers_are_equally_likely() -> None:
    drawn = [Int(1, 4).from_unit(share) for share in (np.arange(4000) + 0.5) / 4000]
    assert np.bincount(drawn).tolist() == [0, 1000, 1000, 1000, 1000]


def test_logarithmic_ranges_are_uniform_in_the_logarithm() -> None:
    assert Float(1e-4, 1, log=True).from_unit(0.5) == pytest.approx(1e-2)
    # P(k) = log((k + 1/2) / (k - 1/2)) / log(8.5 / 0.5), as the rounded logarithm of a uniform number has it.
    drawn = [Int(1, 8, log=True).from_unit(share) for share in (np.arange(10000) + 0.5) / 10000]
    expected = [math.log((k + 0.5) / (k - 0.5)) / math.log(17) for k in range(1, 9)]
    np.testing.assert_allclose(np.bincount(drawn)[1:] / 10000, expected, atol=2e-4)


def test_a_point_has_what_exists() -> None:
    assert SPACE.complete({"rate": 1e-4, "method": "full", "batch": 8, "accumulation": 2}) == {
        **{"rate": 1e-4, "method": "full", "batch": 8, "accumulation": 2},
        "epochs": 3,
    }
    point = SPACE.complete({"rate": 1e-4, "method": "lora", "rank": 8, "batch": 8, "accumulation": 2})
    assert point == {
        **{"rate": 1e-4, "method": "lora", "rank": 8, "alpha": 16, "batch": 8, "accumulation": 2, "epochs": 3}
    }
    assert type(point["alpha"]) is int
    assert list(point) == ["rate", "method", "rank", "alpha", "batch", "accumulation", "epochs"]


def test_membership() -> None:
    point = SPACE.complete({"rate": 1e-4, "method": "lora", "rank": 8, "batch": 8, "accumulation": 2})
    assert point in SPACE
    wrong: list[dict[str, Any]] = [
        {"rate": 1.0},
        {"rank": 65},
        {"rank": 8.5},
        {"alpha": 17},
        {"epochs": 4},
        {"batch": 32, "accumulation": 5},
        {"method": "full"},
        {"more": 1},
    ]
    for change in wrong:
        assert {**point, **change} not in SPACE
    for name in point:
        assert {key: value for key, value in point.items() if key != name} not in SPACE


def test_draws_are_points_and_cover_the_space() -> None:
    generator = np.random.default_rng(0)
    points = [SPACE.complete(SPACE.draw(generator)) for _ in range(300)]
    assert all(point in SPACE for point in points)
    assert {point["method"] for point in points} == {"full", "lora"}
    assert min(point["rate"] for point in points) < 1e-5 < 1e-4 < max(point["rate"] for point in points)


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_the_unit_cube_maps_to_points(shares: list[float]) -> None:
    drawn = SPACE.from_unit(shares)
    assert SPACE.is_feasible(SPACE.complete(drawn)) == (SPACE.complete(drawn) in SPACE)
    back = SPACE.to_unit(drawn)
    assert np.isnan(back[list(SPACE.parameters).index("rank")]) == ("rank" not in drawn)
    again = SPACE.from_unit(np.nan_to_num(back))
    assert {**again, "rate": 0} == {**drawn, "rate": 0}
    assert again["rate"] == pytest.approx(drawn["rate"])


def test_conditions_may_follow_from_each_other() -> None:
    space = Space(
        {
            "inner": {"float": [0, 1], "when": "middle > 2"},
            "middle": {"int": [1, 4], "when": "outer == 'b'"},
            "outer": ["a", "b"],
            "twice": {"derive": "inner * 2", "when": "middle == 4"},
        }
    )
    assert space.complete({"outer": "a", "middle": 4, "inner": 0.5}) == {"outer": "a"}
    assert space.complete({"outer": "b", "middle": 2, "inner": 0.5}) == {"middle": 2, "outer": "b"}
    assert space.complete({"outer": "b", "middle": 3, "inner": 0.5}) == {"inner": 0.5, "middle": 3, "outer": "b"}
    assert space.complete({"outer": "b", "middle": 4, "inner": 0.5})["twice"] == 1
    assert not space.exists("inner", {"outer": "a"})


def test_python_and_config_give_the_same_space() -> None:
    config = {
        "rate": {"float": ["1e-6", 1e-3], "log": True},
        "method": ["full", "lora"],
        "rank": {"int": [4, 64.0], "log": True, "when": "method == 'lora'"},
        "alpha": {"derive": "2 * rank"},
        "batch": {"choice": [8, 16, 32]},
        "accumulation": {"int": [1, 8]},
        "epochs": {"value": 3},
    }
    assert Space(config, ["batch * accumulation <= 128"]).to_json() == SPACE.to_json()
    assert Space.of(SPACE.to_json()).to_json() == SPACE.to_json()
    assert Space.of(SPACE) is SPACE


@pytest.mark.parametrize(
    ("entries", "constraints", "problem"),
    [
        ({}, [], "space: has no parameter to search"),
        ({"a": 1, "b": {"derive": "a"}}, [], "space: has no parameter to search"),
        ([], [], "space: is not a mapping"),
        ({"a": Float(1, 0)}, [], "space.a: 1 to 0 is not a range"),
        ({"a": Float(1, 1)}, [], "space.a: 1 to 1 holds one value; fix it: 1"),
        ({"a": Float(0, 1, log=True)}, [], "space.a: a logarithmic range begins above 0"),
        ({"a": Float(0, math.inf)}, [], "space.a: the range has an end that is not a finite number"),
        ({"a": {"int": [0.5, 3]}}, [], "space.a: 0.5 is not an integer; use `float`"),
        ({"a": {"float": [0, "x"]}}, [], "space.a: `x` is not a number"),
        ({"a": {"float": [0, True]}}, [], "space.a: `True` is not a number"),
        ({"a": {"float": [0, 1, 2]}}, [], "space.a: `float` is not a list of two"),
        ({"a": {"float": [0, 1], "int": [0, 1]}}, [], "space.a: is both float and int"),
        ({"a": {"low": 0, "high": 1}}, [], "space.a: does not say how it is drawn"),
        ({"a": {"float": [0, 1], "logg": True}}, [], "space.a: unknown key `logg`; did you mean `log`?"),
        ({"a": {"float": [0, 1], "log": "yes"}}, [], "space.a: `log` is true or false"),
        ({"a": {"choice": [1, 2], "log": True}}, [], "space.a: unknown key `log`"),
        ({"a": {"float": [0, 1], "when": True}}, [], "space.a: `when` is not a formula"),
        ({"a": []}, [], "space.a: 0 values leave no choice"),
        ({"a": ["x"]}, [], "space.a: 1 values leave no choice"),
        ({"a": ["x", "y", "x"]}, [], 'space.a: "x" is named twice'),
        ({"a": Choice([1, math.nan])}, [], "space.a: nan is not a JSON value"),
        ({"a": Choice([1, print])}, [], "not a JSON value"),
        ({"a": Float(0, 1), "b": Fixed({1, 2})}, [], "space.b: {1, 2} is not a JSON value"),
        ({"a": Float(0, 1, when="b == 'x'"), "b": ["y", "z"]}, [], "space.a: never exists, as `b == 'x'` never holds"),
        ({"a": Float(0, 1, when="b == x"), "b": ["x", "y"]}, [], "no parameter `x`; put a text in quotes: 'x'"),
        ({"rank": Int(1, 9), "a": Derived("2 * rnk")}, [], "no parameter `rnk`; did you mean `rank`?"),
        ({"a": Float(0, 1, when="b > 1"), "b": Derived("a + 1")}, [], "values depend on each other"),
        ({"a": Float(0, 1, when="a > 0")}, [], "values depend on each other"),
        ({"a": Float(0, 1)}, ["a > 2"], "constraints: no point meets `a > 2`"),
        ({"a": Float(0, 1)}, ["b > 2"], "constraints: `b > 2`: there is no parameter `b`"),
        ({"a": Float(0, 1)}, ["a >"], "constraints: formula `a >`"),
        ({"a": Float(0, 1), "b": Derived("sqrt(a - 2)")}, [], "space.b: `sqrt(a - 2)` has no value at any point"),
        ({"a": Float(0, 1)}, ["a < 0.001"], "constraints: hardly a point meets the constraints: 3 of 2,000"),
        ({"a": Int(1, 64), "b": Int(1, 64)}, ["a * b == 64"], "derive one value from the others"),
    ],
)
def test_mistakes_are_named(entries: Any, constraints: list[str], problem: str) -> None:
    with pytest.raises(UserError) as error:
        Space(entries, constraints)
    assert problem in str(error.value)


def test_constraints_that_rarely_hold_are_met() -> None:
    # One point in a hundred: each of these draws would end a study.
    space = Space({"a": Float(0, 1)}, ["a < 0.01"])
    assert max(space.draw(np.random.default_rng(seed))["a"] for seed in range(50)) < 0.01


def test_points_without_a_derived_value_are_not_feasible() -> None:
    space = Space({"a": Int(0, 3), "b": Derived("1 / a"), "c": Derived("log(a)")})
    assert math.isnan(space.complete({"a": 0})["b"])
    assert math.isnan(space.complete({"a": 0})["c"])
    assert [point["a"] for point in space.grid(4)] == [1, 2, 3]
    assert {space.draw(np.random.default_rng(seed))["a"] for seed in range(30)} == {1, 2, 3}


def test_a_constraint_on_what_does_not_exist_is_not_asked() -> None:
    space = Space({"m": ["x", "y"], "a": Float(0, 1, when="m == 'x'")}, ["a > 0.5"])
    assert space.is_feasible(space.complete({"m": "y"}))
    assert not space.is_feasible(space.complete({"m": "x", "a": 0.2}))


def test_changes_are_listed() -> None:
    now = Space(
        {**SPACE.to_json()["entries"], "rate": Float(1e-6, 1e-2, log=True), "decay": [0.1, 0.2]}, ["batch <= 16"]
    )
    assert changes(SPACE, SPACE) == []
    assert changes(SPACE, now) == [
        "`decay` is new",
        "`rate` was float [1e-06, 0.001], log True and is float [1e-06, 0.01], log True",
        "the constraint `batch <= 16` is new",
        "the constraint `batch * accumulation <= 128` is gone",
    ]


def test_a_choice_may_have_many_values() -> None:
    choice = Choice(list(range(100_000)))
    choice.check("space.a")  # by the square of their number it would take minutes
    assert choice.to_unit(99_999) > 0.9999


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"float": [-1e308, 1e308]}, "is too wide to draw from"),
        ({"float": [-1e200, 0]}, "is too wide to draw from"),
        (Int(-(10**400), 5), "not a finite number"),
        (Int(1, 10**300, log=True), "beyond 9,007,199,254,740,992"),
        ({"int": [0, 1e300]}, "is too wide to draw from"),
        ({"int": [0, 2**60]}, "beyond 9,007,199,254,740,992"),
        (Float(0, 10**400), "not a finite number"),
    ],
)
def test_ranges_that_overflow_are_refused(entry: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Space({"x": entry})


def test_a_logarithmic_range_may_span_all_floats() -> None:
    entry = Float(1e-308, 1e308, log=True)
    Space({"x": entry})
    assert [entry.from_unit(share) for share in (0.0, 1.0)] == [1e-308, 1e308]
    assert entry.to_unit(1.0) == pytest.approx(0.5)
