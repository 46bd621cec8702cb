"""Every scheduler passes the contract; the halving ones follow traces that were computed by hand."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from posttrain.store.errors import UserError
from posttrain.testing.schedulers import MakeScheduler, SchedulerContract, SchedulerRun
from posttrain.tune.schedulers.asha import Asha
from posttrain.tune.schedulers.base import Scheduler
from posttrain.tune.schedulers.hyperband import Hyperband
from posttrain.tune.schedulers.none import RunToEnd
from posttrain.tune.schedulers.registry import SCHEDULERS, make_scheduler
from posttrain.tune.schedulers.rungs import Rung, rung_levels
from posttrain.tune.schedulers.successive_halving import SuccessiveHalving


class TestRunToEnd(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return RunToEnd


class TestRunToStep(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: RunToEnd(max_resource=9)


class TestSuccessiveHalving(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: SuccessiveHalving(max_resource=9)


class TestHyperband(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: Hyperband(max_resource=9)


class TestAsha(SchedulerContract):
    @pytest.fixture
    def make(self) -> MakeScheduler:
        return lambda: Asha(max_resource=9)


def jobs(run: SchedulerRun) -> list[tuple[int, int]]:
    """Trial and step of each run, in their order."""
    return [(arguments[0], arguments[1]) for name, arguments, _ in run.events if name == "started"]


# 0, 5 and 7 are good, and 7 the best, as in Figure 2 of the ASHA paper, which counts from 1.
NINE: Mapping[int, float] = {0: 0.3, 1: 0.9, 2: 0.8, 3: 0.7, 4: 0.6, 5: 0.2, 6: 0.5, 7: 0.1, 8: 0.4}


def by_number(values: Mapping[int, float]) -> Callable[[int, int], float]:
    return lambda number, step: values[number]


def test_successive_halving_of_nine_trials() -> None:
    # Figure 1 of the ASHA paper: n = 9, r = 1, R = 9, eta = 3, s = 0: rungs of 9, 3 and 1 trials at steps 1, 3 and 9.
    scheduler = SuccessiveHalving(max_resource=9, eta=3)
    assert scheduler.rungs(0) == [Rung(9, 1), Rung(3, 3), Rung(1, 9)]
    run = SchedulerRun(scheduler, 9, value=by_number(NINE)).run()
    assert jobs(run) == [*((number, 1) for number in range(9)), (7, 3), (5, 3), (0, 3), (7, 9)]
    assert run.finished == {7}
    # Every rung costs the same: 9 steps.
    assert sum(run.steps.values()) == 1 * 6 + 3 * 2 + 9 * 1


def test_asha_with_one_worker() -> None:
    # By Algorithm 2: after trials 0, 1, 2 the best of the three is promoted; after the next three 5 has beaten 0 and is
    # among the best two; after nine, 7 is; it is then the best of the three in rung 1.
    run = SchedulerRun(Asha(max_resource=9, eta=3), 9, value=by_number(NINE)).run()
    assert jobs(run) == [
        *[(0, 1), (1, 1), (2, 1), (0, 3)],
        *[(3, 1), (4, 1), (5, 1), (5, 3)],
        *[(6, 1), (7, 1), (7, 3), (7, 9), (8, 1)],
    ]
    assert run.finished == {7}


def test_asha_promotes_from_the_top_rung_first() -> None:
    scheduler = Asha(max_resource=9, eta=3)
    for number in range(9):
        scheduler.started(number, 1, {})
        scheduler.report(number, 1, float(number))
    for number in range(3):
        scheduler.started(number, 3, {})
        scheduler.report(number, 3, float(number))
    scheduler.started(9, 1, {})
    scheduler.report(9, 1, -1.0)
    choice = scheduler.choose()
    assert (choice.number, choice.resource) == (0, 9)  # type: ignore[union-attr]
    scheduler.started(0, 9, {})
    choice = scheduler.choose()
    assert (choice.number, choice.resource) == (9, 3)  # type: ignore[union-attr]


def test_the_brackets_of_hyperband() -> None:
    # Algorithm 1 with R = 81 and eta = 3: n = ceil(5 / (s + 1) 3^s), n_i = floor(n 3^-i), r_i = 81 3^(i - s).
    scheduler = Hyperband(max_resource=81, eta=3)
    assert [scheduler.rungs(number) for number in range(5)] == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]
    assert scheduler.rungs(5) == scheduler.rungs(0)


def test_hyperband_runs_its_brackets_in_turn() -> None:
    scheduler = Hyperband(max_resource=9, eta=3)
    assert [scheduler.rungs(number) for number in range(3)] == [[(9, 1), (3, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]
    run = SchedulerRun(scheduler, 17, value=lambda number, step: float(number)).run()
    assert jobs(run) == [
        *[*((number, 1) for number in range(9)), (0, 3), (1, 3), (2, 3), (0, 9)],
        *[*((number, 3) for number in range(9, 14)), (9, 9)],
        *((number, 9) for number in range(14, 17)),
    ]
    assert run.finished == {0, 9, 14, 15, 16}


def test_an_unfinished_rung_is_closed_by_the_budget() -> None:
    run = SchedulerRun(SuccessiveHalving(max_resource=9), 6, value=lambda number, step: float(number)).run()
    # Six of nine trials: two of three continue, and one of these.
    assert jobs(run)[6:] == [(0, 3), (1, 3), (0, 9)]


def test_failures_leave_room_for_the_next_best() -> None:
    scheduler = SuccessiveHalving(max_resource=9)
    run = SchedulerRun(scheduler, 9, value=lambda number, step: float(number), fails={0: 1, 1: 2}).run()
    assert jobs(run)[9:] == [(1, 3), (2, 3), (3, 3), (2, 9)]


def test_a_paused_trial_that_fails_is_not_promoted() -> None:
    scheduler = SuccessiveHalving(max_resource=3)
    for number in range(3):
        scheduler.started(number, 1, {"bracket": 0})
        scheduler.report(number, 1, float(number))
    scheduler.ended(0, None)
    choice = scheduler.choose()
    assert (choice.number, choice.resource) == (1, 3)  # type: ignore[union-attr]


def test_asha_promotes_the_next_best_of_a_paused_trial_that_fails() -> None:
    scheduler = Asha(max_resource=3)
    for number in range(6):
        scheduler.started(number, 1, {})
        scheduler.report(number, 1, float(number))
    scheduler.ended(0, None)
    choice = scheduler.choose()
    assert (choice.number, choice.resource) == (1, 3)  # type: ignore[union-attr]


def test_a_trial_that_ends_by_itself_counts_in_later_rungs() -> None:
    scheduler = SuccessiveHalving(max_resource=9)
    # Trial 0 is the best and ends at step 2: no other takes its place in rung 1, nor in the last one.
    run = SchedulerRun(scheduler, 9, value=lambda number, step: float(number), length={0: 2}).run()
    assert jobs(run)[9:] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("limit", "least", "eta", "levels"),
    [
        (81, 1, 3, [1, 3, 9, 27, 81]),
        (243, 1, 3, [1, 3, 9, 27, 81, 243]),
        (100, 1, 3, [1, 4, 11, 33, 100]),
        (16, 2, 4, [4, 16]),
        (5, 5, 3, [5]),
    ],
)
def test_rung_levels(limit: int, least: int, eta: float, levels: Sequence[int]) -> None:
    assert rung_levels(limit, least, eta, "scheduler") == levels


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("make", [lambda: SuccessiveHalving(9), lambda: Hyperband(9)])
def test_workers_do_not_change_a_synchronous_study(make: MakeScheduler, workers: int) -> None:
    def value(number: int, step: int) -> float:
        return number * 7 % 13 + 1 / step

    run, alone = (SchedulerRun(make(), 24, count, value, seed=workers).run() for count in (workers, 1))
    assert run.steps == alone.steps
    assert sorted(jobs(run)) == sorted(jobs(alone))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("ahsa", "there is no scheduler `ahsa`; did you mean `asha`?"),
        ("asha", "scheduler: `max_resource`: Field required"),
        ({"name": "asha", "max_resource": 9, "etta": 3}, "scheduler: unknown key `etta`; did you mean `eta`?"),
        ({"name": "asha", "max_resource": "many"}, "`max_resource`: a number is expected, not `many`"),
        ({"name": "asha", "max_resource": math.inf}, "`max_resource`: Input should be a finite number"),
        ({"name": "asha", "max_resource": 9, "eta": math.nan}, "`eta`: Input should be a finite number"),
        ({"name": "asha", "max_resource": 0}, "no step lies between"),
        ({"name": "asha", "max_resource": 9, "eta": 1}, "eta 1 is less than 2"),
        ({"max_resource": 9}, "names no scheduler"),
    ],
)
def test_mistakes_are_named(value: object, problem: str) -> None:
    with pytest.raises(UserError, match="scheduler") as error:
        make_scheduler(value)
    assert problem in str(error.value)


def test_schedulers_by_name() -> None:
    for name in SCHEDULERS:
        made = make_scheduler({"name": name, "max_resource": 9})
        assert isinstance(made, Scheduler)
        assert made.max_resource == 9
