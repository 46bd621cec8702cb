"""Rules that stop single trials pass the contract, follow traces computed by hand, and leave the winner alone."""

from collections.abc import Callable

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.testing.schedulers import MakeScheduler, SchedulerContract, SchedulerRun
from posttrain.tune.curves import extrapolate
from posttrain.tune.schedulers.base import Decision
from posttrain.tune.schedulers.early_stopping import EarlyStopping
from posttrain.tune.schedulers.extrapolation import Extrapolation
from posttrain.tune.schedulers.registry import make_scheduler


class TestEarlyStopping(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: EarlyStopping(max_resource=9, patience=2)


class TestExtrapolation(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: Extrapolation(max_resource=9)


def steps(scheduler: EarlyStopping | Extrapolation, curves: list[Callable[[int], float]]) -> list[int]:
    """Returns the last step of each trial."""
    run = SchedulerRun(scheduler, len(curves), value=lambda number, step: curves[number](step)).run()
    return [run.steps[number] for number in range(len(curves))]


def test_patience_is_doubled_early_and_halved_late() -> None:
    scheduler = EarlyStopping(max_resource=30, patience=4)
    assert [scheduler.patience(step) for step in (1, 10, 11, 20, 21, 30)] == [8, 8, 4, 4, 2, 2]
    assert EarlyStopping(max_resource=30, patience=1).patience(30) == 1


def test_early_stopping_by_hand() -> None:
    # Of 30 steps with a patience of 4. The first trial leads from its first step to the last.
    curves: list[Callable[[int], float]] = [
        lambda step: 0.0,
        # Never better than at step 1: 8 steps without an improvement at step 9.
        lambda step: 1.0,
        # Better until step 8: at step 10, still early, it has 2 such steps; at 11 the patience is 4, reached at 12.
        lambda step: 1.0 / min(step, 8),
        # Better until step 19: from step 21 on 2 such steps are enough.
        lambda step: 1.0 / min(step, 19),
        # Better by 0.7% of its best at each step, which is less than 1%: two of them are an improvement.
        lambda step: 0.993**step,
    ]
    assert steps(EarlyStopping(max_resource=30, patience=4, warmup=0), curves) == [30, 9, 12, 21, 30]


@pytest.mark.parametrize(("warmup", "stop"), [(0.0, 9), (0.2, 9), (0.5, 16), (0.9, 28)])
@pytest.mark.parametrize("of_the_trials", [False, True])
def test_no_trial_is_stopped_in_its_warmup(warmup: float, stop: int, of_the_trials: bool) -> None:
    scheduler = EarlyStopping(max_resource=30, patience=4, warmup=0.0 if of_the_trials else warmup)
    assert scheduler.spare_warmup(warmup if of_the_trials else 0.0) == ""
    assert steps(scheduler, [lambda step: 0.0, lambda step: 1.0]) == [30, stop]


@pytest.mark.parametrize(("warmup", "first"), [(0.0, 3), (0.1, 4), (0.4, 13), (0.41, 13), (1.0, 30)])
def test_no_trial_is_extrapolated_in_its_warmup(warmup: float, first: int) -> None:
    scheduler = Extrapolation(max_resource=30, startup=2)
    assert scheduler.spare_warmup(warmup) == ""
    good: list[Callable[[int], float]] = [lambda step: 1 / step] * 3
    assert steps(scheduler, [*good, lambda step: 9.0])[3] == first


@pytest.mark.parametrize("name", ["asha", "successive_halving", "hyperband", "moasha"])
def test_a_rung_in_the_warmup_is_named(name: str) -> None:
    def warning(share: float, **options: int) -> str:
        return make_scheduler({"name": name, "max_resource": 9, **options}).spare_warmup(share)

    assert warning(1 / 9) == ""
    expected = "trials are compared after 1 of 9 parts, and up to 25% are warm-up: such values mislead; "
    assert warning(0.25) == f"{expected}give the scheduler min_resource: 3"
    assert warning(0.25, min_resource=3) == ""


def test_the_best_trial_is_never_stopped() -> None:
    # It has come to its end early; a later one that is better and stands still takes its role.
    curves: list[Callable[[int], float]] = [lambda step: 1.0, lambda step: 0.5, lambda step: 0.7, lambda step: 0.5]
    assert steps(EarlyStopping(max_resource=12, patience=1), curves) == [12, 12, 3, 3]


def test_negative_values_improve_downwards() -> None:
    # As of a metric that is maximised.
    curves: list[Callable[[int], float]] = [lambda step: -9.0, lambda step: -0.1 * step, lambda step: -0.5]
    assert steps(EarlyStopping(max_resource=12, patience=2), curves) == [12, 12, 5]


def saturating(end: float, step: int) -> float:
    return end + 2.0 * step**-1.0


def test_hopeless_curves_are_stopped_and_good_ones_are_not() -> None:
    ends = [0.5, 0.9, 0.7, 1.1, 0.8, 5.0, 0.45, 3.0, 0.1]
    lasts = steps(
        Extrapolation(max_resource=30, startup=5), [lambda step, end=end: saturating(end, step) for end in ends]
    )  # type: ignore[misc]
    assert lasts[:5] == [30] * 5  # that others are compared with
    assert lasts[5] < 10
    assert lasts[7] < 10
    assert lasts[6] == lasts[8] == 30


def test_a_trial_is_stopped_where_its_chance_falls_below_the_limit() -> None:
    scheduler = Extrapolation(max_resource=20, chance=0.1, min_resource=2, startup=3)
    for number, end in enumerate([1.0, 1.2, 1.6]):
        scheduler.started(number, 20, {})
        scheduler.ended(number, end)
    low, centre, high = np.quantile([1.0, 1.2, 1.6], [0.25, 0.5, 0.75])
    scheduler.started(3, 20, {})
    values: list[float] = []
    for step in range(1, 20):
        values.append(1.3 + 1 / step)
        decision = scheduler.report(3, step, values[-1])
        if step == 1:
            assert decision is Decision.CONTINUE
            continue
        forecast = extrapolate(range(1, step + 1), values, 20, centre, (high - low) / 1.349)
        assert (decision is Decision.STOP) == (forecast.probability_below(1.0) < 0.1)
        if decision is Decision.STOP:
            break
    else:
        pytest.fail("it was never stopped")
    # Its value is no last value.
    scheduler.ended(3, values[-1])
    assert scheduler._ends == [1.0, 1.2, 1.6]


def test_equal_ends_are_no_division_by_zero() -> None:
    assert steps(Extrapolation(max_resource=9, startup=2), [lambda step: 1.0] * 4) == [9] * 4


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"name": "early_stopping", "patience": 0},
            "scheduler early_stopping.patience: 0 is out of range; give at least 1",
        ),
        ({"name": "early_stopping", "warmup": 1.0}, "early_stopping.warmup: 1 is out of range"),
        ({"name": "early_stopping", "improvement": -0.1}, "early_stopping.improvement: -0.1 is out of range"),
        ({"name": "extrapolation", "chance": 1}, "chance 1 is no probability between 0 and 1"),
        ({"name": "extrapolation", "min_resource": 10}, "no step lies between"),
        ({"name": "extrapolation", "startup": 1}, "startup 1 is less than 2"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError) as error:
        make_scheduler({"max_resource": 9, **options})
    assert problem in str(error.value)
