"""Warnings about spaces, and the wider spaces that they offer."""

import logging

import pytest

from posttrain.tune import TrialContext, minimize
from posttrain.tune.budget import Budget
from posttrain.tune.lint import SizeCheck, check_edges, check_space
from posttrain.tune.parameters import Choice, Float, Int, Parameter
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial, TrialState


def test_a_space_too_large_for_its_budget() -> None:
    space = Space({name: Float(0, 1) for name in "abc"})
    (warning,) = check_space(space, 20)
    assert warning.startswith("20 trials are few for 3 parameters, as a rule wants 30")
    assert not check_space(space, 30)
    assert not check_space(space)


def test_a_finite_space_needs_no_more_trials_than_points() -> None:
    space = Space({"a": Choice([1, 2]), "b": Int(1, 3)})
    assert not check_space(space, 6)
    (warning,) = check_space(space, 1)
    assert warning == "1 trial is few for 2 parameters, as a rule wants 6; fix some or narrow them"
    (warning,) = check_space(Space({"a": Float(0, 1)}), 5)
    assert warning == "5 trials are few for 1 parameter, as a rule wants 10; fix some or narrow them"


@pytest.mark.parametrize(
    ("budget", "workers", "count"),
    [
        ("100s", 1, 25),
        ("100s", 2, None),
        ("2k tokens", 1, 20),
        ("60 trials, 100s", 1, 25),
        ("120s", 1, None),
        ("10 trials", 1, None),  # which was said before
    ],
)
def test_costs_say_how_many_trials_a_budget_holds(budget: str, workers: int, count: int | None) -> None:
    """Trials cost 4 seconds and 100 tokens; three parameters take 30."""
    check = SizeCheck(Space({name: Float(0, 1) for name in "abc"}), Budget.read(budget), workers)
    trials = [Trial(n, {}, {}, TrialState.FINISHED, value=1.0, seconds=4.0, tokens=100) for n in range(6)]
    refused = [Trial(n, {}, {}, TrialState.FAILED, seconds=0.001) for n in range(4)]
    assert check([*trials[:4], *refused]) is None
    warning = check(trials[:5])
    assert warning == (
        None
        if count is None
        else f"the budget holds about {count} trials, as the first 5 cost: few for 3 parameters, "
        "as a rule wants 30; fix some or narrow them"
    )
    assert check(trials) is None


def test_a_study_says_once_that_its_budget_is_small(caplog: pytest.LogCaptureFixture) -> None:
    def function(trial: TrialContext) -> None:
        trial.report(1, trial["a"], tokens=100)

    with caplog.at_level(logging.WARNING, "posttrain"):
        minimize(function, {"a": Float(0, 1)}, budget="800 tokens", sampler="random")
    assert caplog.text.count("the budget holds about 8 trials, as the first 5 cost: few for 1 parameter") == 1


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("train.learning_rate", 0, 0.01, True),
        ("train.learning_rate", 1e-5, 9e-4, True),
        ("train.learning_rate", 1e-4, 5e-4, False),
        ("train.optimizer.weight_decay", 0, 0.1, True),
        ("train.dpo.beta", 0.01, 0.5, True),
        ("train.simpo.beta", 2, 10, False),
        ("train.distillation.beta", 0.05, 0.95, False),
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
    ("parameter", "value", "edge", "wider"),
    [
        (Float(1e-6, 1e-3, log=True), 9.9e-4, "upper", "1e-06 to 0.01"),
        (Float(1e-6, 1e-3, log=True), 1e-6, "lower", "1e-07 to 0.001"),
        (Float(1e-6, 1e-3, log=True), 1e-4, None, ""),
        (Float(2, 4), 3.99, "upper", "2 to 6"),
        (Float(2, 6), 2.01, "lower", "1 to 6"),
        (Float(-2, 2), -2.0, "lower", "-6 to 2"),
        (Float(0, 0.3), 0.0, None, ""),
        (Float(0.5, 1), 1.0, None, ""),
        (Float(0.1, 0.9), 0.9, "upper", "0.1 to 1"),
        (Float(0.1, 0.9), 0.1, "lower", "0.05 to 0.9"),
        (Int(4, 64, log=True), 64, "upper", "4 to 640"),
        (Int(4, 64, log=True), 63, None, ""),
        (Int(4, 64, log=True), 4, "lower", "1 to 64"),
        (Int(1, 8), 1, None, ""),
        (Int(3, 4), 3, None, ""),
        (Int(3, 5), 3, "lower", "2 to 5"),
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
        assert warnings[0] == f"the best `a`, {value:g}, is on the {edge} edge of its range; {expected}"


def test_parameters_that_do_not_exist_have_no_edge() -> None:
    space = Space({"m": ["x", "y"], "a": Float(2, 3, when="m == 'x'")})
    assert not check_edges(space, Trial(0, {"m": "y"}, {"m": "y"}))
