"""Objectives as a user writes them, the values that a function gives, and the trial that a rule takes of a front."""

import math
from typing import Any

import numpy as np
import pytest

from posttrain.jobs.memory import Memory
from posttrain.store.errors import UserError
from posttrain.tune.objectives import Objective, Objectives, read_measured, read_objectives
from posttrain.tune.trial import Trial, TrialState


def trial(number: int, *values: float, state: TrialState = TrialState.FINISHED) -> Trial:
    return Trial(number, {}, {}, state, value=values[0], others=values[1:])


def test_an_objective_is_a_name_a_mapping_or_one_already() -> None:
    read = read_objectives(["loss", {"metric": "accuracy", "limit": 0.9}, Objective("size"), "seconds"])
    assert read.items == (Objective("loss"), Objective("accuracy", limit=0.9), Objective("size"), Objective("seconds"))
    greater = read_objectives(["loss", {"metric": "seconds", "maximize": False}, "f1"], maximize="f1".__eq__)
    assert greater.directions == (False, False, True)
    assert read.measured == ("loss", "accuracy", "size")
    assert read.complete((1, 2, 3), 4, 5, Memory(6, 7)) == (1, 2, 3, 4)
    memory = read_objectives(["gpu_memory_bytes", "loss", "memory_bytes"])
    assert memory.complete((1,), 4, 5, Memory(6, 7)) == (7, 1, 6)
    assert read.select_measured((1, 2, 3, 4)) == (1, 2, 3)
    assert greater.losses((1, 2, 3)) == (1, 2, -3)


@pytest.mark.parametrize(
    ("values", "choose", "problem"),
    [
        (["loss", "seconds", "loss"], "knee", "objectives: `loss` is there twice; name each objective once"),
        (["seconds", "tokens"], "knee", "objectives: only seconds, tokens: what a trial costs is least if it does"),
        ([], "knee", "objectives: are empty"),
        ([{"metrik": "loss"}], "knee", "objectives: `metric`: Field required"),
        ([{"metric": "loss", "maximize": "much"}], "knee", "`maximize`: Input should be a valid boolean"),
        ([7], "knee", "`metric`: Input should be a valid string"),
        ([{"metric": "loss", "limit": "low"}], "knee", "`limit`: a number is expected, not `low`"),
        (["loss", Objective("seconds", maximize=True)], "knee", "`seconds` is what a trial costs"),
        ([Objective("loss", limit=math.inf)], "knee", "`limit`: Input should be a finite number"),
        ([{"metric": "loss", "limit": math.nan}], "knee", "`limit`: Input should be a finite number"),
        (["loss", {"metric": "seconds", "maximize": True}], "knee", "`seconds` is what a trial costs"),
        (["loss", "size"], "best", "choose: `best` chooses no trial of a front; give knee, or such as loss within 1%"),
        (["loss", "size"], "accuracy within 1%", "`accuracy within 1%` chooses no trial"),
    ],
)
def test_mistakes_are_named(values: list[Any], choose: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        read_objectives(values, choose)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("value", "names", "expected"),
    [
        (1.5, ("loss",), (1.5,)),
        ([1.5], ("loss",), (1.5,)),
        ({"size": 2, "loss": 1.5, "more": 3}, ("loss", "size"), (1.5, 2.0)),
        ((1.5, 2), ("loss", "size"), (1.5, 2.0)),
        (np.array([1.5, 2]), ("loss", "size"), (1.5, 2.0)),
    ],
)
def test_values_of_a_function(value: Any, names: tuple[str, ...], expected: tuple[float, ...]) -> None:
    assert read_measured(value, names) == expected


@pytest.mark.parametrize(
    ("value", "names", "problem"),
    [
        ({"loss": 1}, ("loss", "size"), "the objective size is missing: there is loss"),
        ({}, ("loss", "size"), "the objective loss is missing: there is nothing"),
        ((1, 2, 3), ("loss", "size"), "3 values for the objectives loss, size"),
        (1.0, ("loss", "size"), "one value for the 2 objectives loss, size"),
        ("ab", ("loss", "size"), "one value for the 2 objectives"),
        ((1, 2), ("loss",), "2 values for the objectives loss"),
    ],
)
def test_values_that_are_missing(value: Any, names: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_measured(value, names)


FRONT = [trial(0, 0.50, 10.0), trial(1, 0.503, 6.0), trial(2, 0.52, 2.0), trial(3, 0.9, 1.0)]


@pytest.mark.parametrize(
    ("choose", "limits", "number"),
    [
        ("knee", (None, None), 2),
        ("loss within 1%", (None, None), 1),
        ("loss within 0.5%", (None, None), 0),
        ("loss within 5 %", (None, None), 2),
        ("seconds within 0%", (None, None), 3),
        ("loss within 5%", (None, 1.5), 3),
        ("knee", (0.55, None), 1),
        # Nothing meets them: all count.
        ("loss within 1%", (0.1, None), 1),
    ],
)
def test_the_rule_takes_a_trial_of_the_front(choose: str, limits: tuple[float | None, ...], number: int) -> None:
    items = (Objective("loss", limit=limits[0]), Objective("seconds", limit=limits[1]))
    chosen = Objectives(items, choose).choose_trial(FRONT)
    assert chosen is not None
    assert chosen.number == number


def test_the_rule_of_a_greatest_value() -> None:
    front = [trial(0, 0.90, 10.0), trial(1, 0.895, 6.0), trial(2, 0.8, 2.0)]
    objectives = Objectives((Objective("accuracy", True), Objective("seconds")), "accuracy within 1%")
    assert objectives.choose_trial(front) is front[1]
    assert Objectives((Objective("accuracy", True, 0.899), Objective("seconds"))).choose_trial(front) is front[0]
    assert objectives.choose_trial([]) is None


def test_the_front_grows_as_trials_finish() -> None:
    generator = np.random.default_rng(1)
    objectives = Objectives((Objective("a"), Objective("b", True), Objective("c")))
    states = [TrialState.FINISHED, TrialState.STOPPED, TrialState.FINISHED, TrialState.PAUSED]
    values = generator.integers(0, 6, (80, 3)).astype(float).tolist()
    trials = [trial(number, *point, state=states[number % 4]) for number, point in enumerate(values)]
    front: list[Trial] = []
    for position in generator.permutation(len(trials)).tolist():
        front = objectives.extend_front(front, trials[position])
        assert objectives.extend_front(front, trials[position]) == front
    assert front == objectives.front(trials)
    assert {entry.state for entry in front} == {TrialState.FINISHED}
