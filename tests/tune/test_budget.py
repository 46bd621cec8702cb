"""Budgets are read, spent and shown."""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from posttrain.store.errors import UserError
from posttrain.tune import Float, Int, TrialContext, minimize
from posttrain.tune.api import optimize
from posttrain.tune.backends.simulated import CurvePoint, SimulatedBackend
from posttrain.tune.budget import Budget, Price, Spent, format_seconds
from posttrain.tune.trial import Trial


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("50 trials", Budget(trials=50)),
        ("1 trial", Budget(trials=1)),
        (50, Budget(trials=50)),
        ("30m", Budget(seconds=1800)),
        ("30 min", Budget(seconds=1800)),
        ("1h 30m", Budget(seconds=5400)),
        ("1.5h", Budget(seconds=5400)),
        ("90s", Budget(seconds=90)),
        ("2 d", Budget(seconds=172800)),
        ("1 hour", Budget(seconds=3600)),
        ("1 minute", Budget(seconds=60)),
        ("1 day", Budget(seconds=86400)),
        ("1 gpu-minute", Budget(gpu_seconds=60)),
        ("2M tokens", Budget(tokens=2_000_000)),
        ("2.01M tokens", Budget(tokens=2_010_000)),
        ("500K tokens", Budget(tokens=500_000)),
        ("1.5 B tokens", Budget(tokens=1_500_000_000)),
        ("500 tokens", Budget(tokens=500)),
        ("50 trials, 2h", Budget(trials=50, seconds=7200)),
        (Budget(trials=3), Budget(trials=3)),
    ],
)
def test_reading(value: Any, budget: Budget) -> None:
    assert Budget.read(value) == budget


@pytest.mark.parametrize(
    "value",
    [
        *["", "many", "50", "50 trials and more", "2M", "0 trials", "-3 trials", "1.5 trials", "5 parsecs", None, True],
        *["50 trials 2h", "50 trials, 60 trials", "30m tokens", "1e3 trials"],
    ],
)
def test_what_is_no_budget(value: Any) -> None:
    with pytest.raises(UserError, match="--budget: "):
        Budget.read(value, "--budget")


def test_spending() -> None:
    budget = Budget.read("2 trials, 1m, 1k tokens")
    assert budget.allows_start([None])  # type: ignore[list-item]
    assert not budget.allows_start([None, None])  # type: ignore[list-item]
    assert not budget.is_spent(Spent(59, 999, 1e9))
    assert budget.is_spent(Spent(60, 0, 0))
    assert budget.is_spent(Spent(0, 1000, 0))
    assert budget.left(1, Spent(20, 400, 0)) == "1 trial, 40s, 600 tokens left"
    assert budget.left(5, Spent(100, 4000, 0)) == "0 trials, 0s, 0 tokens left"


EUROS = Price(4.0, "EUR")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2 gpu-hours", 7200), ("1 GPU-hour", 3600), ("0.5 gpu-h", 1800), ("90 gpu-minutes", 5400), ("3 gpu-min", 180)],
)
def test_hours_of_accelerators(text: str, seconds: float) -> None:
    budget = Budget.read(text, accelerators=2)
    assert budget == Budget(gpu_seconds=seconds, accelerators=2)
    # Two accelerators a trial: half of the seconds of work.
    assert not budget.is_spent(Spent(1e9, 10**9, seconds / 2 - 1))
    assert budget.is_spent(Spent(0, 0, seconds / 2))


def test_money() -> None:
    budget = Budget.read("5 EUR, 10 trials", price=EUROS, accelerators=2)
    assert (budget.money, budget.trials) == (5.0, 10)
    # Half an hour of work with two accelerators at 4 EUR an hour.
    assert budget.left(3, Spent(0, 0, 1800)) == "7 trials, 1.00 EUR left"
    assert not budget.is_spent(Spent(0, 0, 2249))
    assert budget.is_spent(Spent(0, 0, 2250))
    assert Budget.read("2 gpu-hours").left(0, Spent(0, 0, 1800)) == "1.50 gpu-hours left"


def test_money_needs_a_price_in_its_currency() -> None:
    with pytest.raises(UserError, match="EUR is spent at a price, and there is none"):
        Budget.read("5 EUR")
    with pytest.raises(UserError, match="is in USD, and the price in EUR"):
        Budget.read("5 USD", price=EUROS)


def test_the_share_that_trials_have_spent() -> None:
    trials = [Trial(number, {}, {}, seconds=900, tokens=50) for number in range(4)]
    assert Budget().share(trials) == 0
    assert Budget(trials=10).share(trials) == 0.4
    assert Budget(seconds=7200, tokens=400).share(trials) == 0.5
    assert Budget(seconds=7200).share(trials, workers=2) == 0.25
    assert Budget(gpu_seconds=7200).share(trials, workers=2) == 0.5
    assert Budget(gpu_seconds=7200).share(trials, workers=2, devices=1) == 0.25
    assert Budget.read("8 EUR", price=EUROS).share(trials) == 0.5


def test_a_study_ends_when_its_hours_are_spent() -> None:
    def run(trial: TrialContext) -> None:
        for step in range(1, 6):
            time.sleep(0.02)
            trial.report(step, 1.0)

    result = minimize(run, {"x": Float(0, 1)}, budget=f"{0.25 / 60} gpu-minutes", sampler="random", accelerators=2)
    work = sum(trial.seconds for trial in result.trials)
    assert 0.125 <= work < 0.2  # 0.25 s, by two accelerators


def test_durations() -> None:
    assert [format_seconds(seconds) for seconds in (0.1234, 59, 61, 3700)] == ["0.123s", "59s", "1m 1s", "1h 1m"]


def test_a_budget_as_an_object_gets_its_price() -> None:
    price = Price(2.0, "EUR")
    assert Budget.read(Budget(money=5.0), price=price, accelerators=2) == Budget(money=5.0, price=price, accelerators=2)
    with pytest.raises(UserError, match="budget: money is spent at a price, and there is none"):
        Budget.read(Budget(money=5.0))


def test_trials_that_fail_have_costs() -> None:
    def function(trial: TrialContext) -> float:
        trial.report(1, 0.5 if trial.number == 0 else math.nan, tokens=1000)
        return 0.5

    result = minimize(function, {"x": Float(0, 1)}, budget="3k tokens, 40 trials")
    assert [trial.tokens for trial in result.trials] == [1000] * 3
    assert result.trials[1].seconds > 0


def test_runs_that_are_cut_off_have_costs(tmp_path: Path) -> None:
    """A budget in seconds that is spent has nothing for another session."""

    # In here, so that it is sent by value: the workers cannot import the tests.
    def sleep(trial: TrialContext) -> float:
        time.sleep(60)
        return 0.0

    options: dict[str, Any] = {"out": tmp_path, "engine": "processes", "workers": 1}
    first = minimize(sleep, {"x": Float(0, 1)}, budget="1s", **options)
    assert first.trials[0].state == "paused"
    assert first.trials[0].seconds == pytest.approx(1.1, abs=0.5)
    began = time.monotonic()
    second = minimize(sleep, {"x": Float(0, 1)}, budget="1s", **options)
    assert time.monotonic() - began < 1
    assert second.trials == first.trials


@pytest.mark.parametrize("budget", ["0.3s", "0.005 gpu-minutes", "0.01 EUR"])
def test_a_run_in_this_process_ends_with_the_time(budget: str, tmp_path: Path) -> None:
    """It goes on from its checkpoint in a later session whose budget is larger."""
    steps = list[int]()

    def function(trial: TrialContext) -> float:
        state = trial.folder / "step"
        step = int(state.read_text()) if state.exists() else 0
        while step < 40:
            time.sleep(0.02)
            step += 1
            steps.append(step)
            state.write_text(str(step))
            try:
                trial.show_life()
            except Exception:  # noqa: BLE001  # a function that handles its own errors
                steps.append(-1)
        return 0.5

    options: dict[str, Any] = {"out": tmp_path, "price": Price(120.0, "EUR")}
    first = minimize(function, {"x": Float(0, 1)}, budget=budget, **options)
    assert [(str(trial.state), trial.value) for trial in first.trials] == [("paused", None)]
    assert 0.2 <= first.trials[0].seconds < 0.6  # a tenth more than the budget, in which it might have reported
    assert minimize(function, {"x": Float(0, 1)}, budget=budget, **options).trials == first.trials
    second = minimize(function, {"x": Float(0, 1)}, budget=1, **options)
    assert (str(second.trials[0].state), second.trials[0].value) == ("finished", 0.5)
    assert second.trials[0].seconds > 0.8
    assert steps == list(range(1, 41))


@pytest.mark.parametrize(
    ("devices", "workers", "hours"), [(None, 4, 12), (8, 4, 12), (1, 1, 12), (1, 2, 6.5), (1, 4, 4), (2, 4, 7.5)]
)
def test_trials_that_share_a_device_count_it_once(
    devices: int | None, workers: int, hours: float, tmp_path: Path
) -> None:
    """Four trials of 2, 2.5, 3.5 and 4 hours, in two sessions."""

    def search(budget: str) -> Spent:
        backend = SimulatedBackend(lambda settings: [CurvePoint(1.0, 900.0)] * settings["quarters"], workers, devices)
        points = [{"quarters": count} for count in (8, 10, 14, 16)]
        optimize(lambda: backend, {"quarters": Int(1, 16)}, budget=budget, initial=points, out=tmp_path)
        study = optuna.load_study(study_name="tune", storage=f"sqlite:///{tmp_path / 'study.db'}")
        return Spent(*study.user_attrs["spent"])

    assert 1 <= search("1 gpu-hour, 4 trials").device_seconds / 3600 < 4
    assert search("100 gpu-hours, 4 trials").device_seconds == hours * 3600


def test_runs_that_are_killed_have_costs() -> None:
    def killed_once(trial: TrialContext) -> float:
        if not (trial.folder / "again").exists():
            (trial.folder / "again").touch()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    result = minimize(killed_once, {"x": Float(0, 1)}, budget=1, engine="processes", workers=1)
    assert result.trials[0].state == "finished"
    assert result.trials[0].seconds >= 0.5
