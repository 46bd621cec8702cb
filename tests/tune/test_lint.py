"""Warnings about spaces, and the wider spaces that they offer."""

import pytest

from posttrain.tune.lint import check_edges, check_space
from posttrain.tune.parameters import Choice, Float, Int, Parameter
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial


def test_a_space_too_large_for_its_budget() -> None:
    space = Space({name: Float(0, 1) for name in "abc"})
    (warning,) = check_space(space, 20)
    assert warning.text.startswith("20 trials are few for 3 parameters, as a rule wants 30")
    assert not check_space(space, 30)
    assert not check_space(space)


def test_a_finite_space_needs_no_more_trials_than_points() -> None:
    space = Space({"a": Choice([1, 2]), "b": Int(1, 3)})
    assert not check_space(space, 6)
    assert check_space(space, 5)


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (Float(1e-4, 1e-1), True),
        (Int(1, 1000), True),
        (Float(1e-4, 1e-1, log=True), False),
        (Float(0, 0.3), False),
        (Float(0.1, 0.9), False),
        (Float(-1, 1000), False),
    ],
)
def test_a_linear_range_over_orders_of_magnitude(parameter: Parameter, expected: bool) -> None:
    warnings = check_space(Space({"a": parameter}))
    assert bool(warnings) is expected
    if warnings:
        assert "try `log: true`" in warnings[0].text


@pytest.mark.parametrize(
    ("parameter", "value", "edge", "wider"),
    [
        (Float(1e-6, 1e-3, log=True), 9.9e-4, "upper", "1e-06 to 0.01"),
        (Float(1e-6, 1e-3, log=True), 1e-6, "lower", "1e-07 to 0.001"),
        (Float(1e-6, 1e-3, log=True), 1e-4, None, ""),
        (Float(2, 4), 3.99, "upper", "2 to 6"),
        (Float(2, 6), 2.01, "lower", "0 to 6"),
        (Float(-2, 2), -2.0, "lower", "-6 to 2"),
        (Float(0, 0.3), 0.0, None, ""),
        (Float(0.5, 1), 1.0, None, ""),
        (Float(0.1, 0.9), 0.9, "upper", "0.1 to 1"),
        (Float(0.1, 0.9), 0.1, "lower", "0 to 0.9"),
        (Int(4, 64, log=True), 64, "upper", "4 to 640"),
        (Int(4, 64, log=True), 63, None, ""),
        (Int(4, 64, log=True), 4, "lower", "1 to 64"),
        (Int(1, 8), 1, None, ""),
        (Int(3, 4), 3, None, ""),
        (Int(3, 5), 3, "lower", "1 to 5"),
        (Choice([8, 16, 32]), 32, "upper", ""),
        (Choice([8, 16, 32]), 16, None, ""),
        (Choice([8, 16]), 16, None, ""),
        (Choice([0, 8, 16]), 0, None, ""),
        (Choice(["a", "b", "c"]), "c", None, ""),
    ],
)
def test_the_best_on_an_edge(parameter: Parameter, value: float, edge: str | None, wider: str) -> None:
    warnings = check_edges(Space({"a": parameter}), Trial(0, {"a": value}, {"a": value}))
    assert bool(warnings) is (edge is not None)
    if edge:
        expected = f"widen it to {wider}, and go on with --migrate" if wider else "add values beyond it"
        assert warnings[0].text == f"the best `a`, {value:g}, is on the {edge} edge of its range; {expected}"


def test_parameters_that_do_not_exist_have_no_edge() -> None:
    space = Space({"m": ["x", "y"], "a": Float(2, 3, when="m == 'x'")})
    assert not check_edges(space, Trial(0, {"m": "y"}, {"m": "y"}))
