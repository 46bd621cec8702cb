"""Rules that stop single trials pass the contract, follow traces computed by hand, and leave the winner alone."""

from collections.abc import Callable

import pytest

from posttrain.store.errors import UserError
from posttrain.testing.schedulers import MakeScheduler, SchedulerContract, SchedulerRun
from posttrain.tune.schedulers.early_stopping import EarlyStopping
from posttrain.tune.schedulers.registry import make_scheduler


class TestEarlyStopping(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: EarlyStopping(max_resource=9, patience=2)


def steps(scheduler: EarlyStopping, curves: list[Callable[[int], float]]) -> list[int]:
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
    assert steps(EarlyStopping(max_resource=30, patience=4), curves) == [30, 9, 12, 21, 30]


@pytest.mark.parametrize(("warmup", "stop"), [(0.0, 9), (0.2, 9), (0.5, 16), (0.9, 28)])
def test_no_trial_is_stopped_in_its_warmup(warmup: float, stop: int) -> None:
    scheduler = EarlyStopping(max_resource=30, patience=4)
    assert scheduler.spare_warmup(warmup) == ""
    assert steps(scheduler, [lambda step: 0.0, lambda step: 1.0]) == [30, stop]


@pytest.mark.parametrize("name", ["asha", "successive_halving", "hyperband"])
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


def test_an_impossible_patience_is_named() -> None:
    with pytest.raises(UserError, match="scheduler: `patience`: Input should be greater than or equal"):
        make_scheduler({"name": "early_stopping", "max_resource": 9, "patience": 0})
