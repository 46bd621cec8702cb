"""Warnings about spaces."""

import pytest

from posttrain.tune.lint import check_edges, check_space
from posttrain.tune.parameters import Choice, Float, Int, Parameter
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("train.learning_rate", 0, 0.01, True),
        ("train.learning_rate", 1e-5, 9e-4, True),
        ("train.learning_rate", 1e-4, 5e-4, False),
        ("train.optimizer.weight_decay", 0, 0.1, True),
        ("train.objective.beta", 0.01, 0.5, True),
        ("train.objective.gamma", 0.3, 1.6, False),
        ("train.schedule.decay", 0.05, 0.95, False),
        ("lr", 1e-4, 1e-2, True),
        ("model.kl_coefficient", 0, 0.1, True),
        ("train.lora.dropout", 0, 0.1, False),
    ],
)
def test_names_that_are_always_logarithmic(name: str, low: float, high: float, expected: bool) -> None:
    warnings = check_space(Space({name: Float(low, high)}))
    assert bool(warnings) is expected
    if warnings:
        assert warnings[0].endswith("try `log: true`" if low else "try `log: true` with a lower end above 0")
    assert not check_space(Space({name: Float(low or 1e-6, high, log=True)}))


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
        assert "try `log: true`" in warnings[0]


@pytest.mark.parametrize(
    ("parameter", "value", "edge"),
    [
        (Float(1e-6, 1e-3, log=True), 9.9e-4, "upper"),
        (Float(1e-6, 1e-3, log=True), 1e-6, "lower"),
        (Float(1e-6, 1e-3, log=True), 1e-4, None),
        (Float(2, 4), 3.99, "upper"),
        (Float(2, 6), 2.01, "lower"),
        (Float(-2, 2), -2.0, "lower"),
        (Float(0, 0.3), 0.0, None),
        (Float(0.5, 1), 1.0, None),
        (Float(0.1, 0.9), 0.9, "upper"),
        (Float(0.1, 0.9), 0.1, "lower"),
        (Int(4, 64, log=True), 64, "upper"),
        (Int(4, 64, log=True), 63, None),
        (Int(4, 64, log=True), 4, "lower"),
        (Int(1, 8), 1, None),
        (Int(3, 4), 3, None),
        (Int(3, 5), 3, "lower"),
        (Choice([8, 16, 32]), 32, "upper"),
        (Choice([8, 16, 32]), 16, None),
        (Choice([8, 16]), 16, None),
        (Choice([0, 8, 16]), 0, None),
        (Choice(["a", "b", "c"]), "c", None),
    ],
)
def test_the_best_on_an_edge(parameter: Parameter, value: float, edge: str | None) -> None:
    warnings = check_edges(Space({"a": parameter}), Trial(0, {"a": value}, {"a": value}))
    assert bool(warnings) is (edge is not None)
    if edge:
        fix = "widen it in a study that names this one in warm_start"
        assert warnings[0] == f"the best `a`, {value:g}, is on the {edge} edge of its range; {fix}"


def test_parameters_that_do_not_exist_have_no_edge() -> None:
    space = Space({"m": ["x", "y"], "a": Float(2, 3, when="m == 'x'")})
    assert not check_edges(space, Trial(0, {"m": "y"}, {"m": "y"}))
