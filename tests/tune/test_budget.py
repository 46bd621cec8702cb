"""Budgets are read, spent and shown."""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.tune import Float, TrialContext, minimize
from posttrain.tune.budget import Budget, Spent, format_seconds


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
        *["50 trials 2h", "50 trials, 60 trials", "30m tokens", "1e3 trials", "2 gpu-hours", "5 EUR"],
    ],
)
def test_what_is_no_budget(value: Any) -> None:
    with pytest.raises(UserError, match="--budget: "):
        Budget.read(value, "--budget")


def test_spending() -> None:
    budget = Budget.read("2 trials, 1m, 1k tokens")
    assert budget.allows_start([None])  # type: ignore[list-item]
    assert not budget.allows_start([None, None])  # type: ignore[list-item]
    assert not budget.is_spent(Spent(59, 999))
    assert budget.is_spent(Spent(60, 0))
    assert budget.is_spent(Spent(0, 1000))
    assert budget.left(1, Spent(20, 400)) == "1 trial, 40s, 600 tokens left"
    assert budget.left(5, Spent(100, 4000)) == "0 trials, 0s, 0 tokens left"


def test_durations() -> None:
    assert [format_seconds(seconds) for seconds in (0.1234, 59, 61, 3700)] == ["0.123s", "59s", "1m 1s", "1h 1m"]


def test_trials_that_fail_have_costs() -> None:
    def function(trial: TrialContext) -> float:
        trial.report(1, 0.5 if trial.number == 0 else math.nan, tokens=1000)
        return 0.5

    result = minimize(function, {"x": Float(0, 1)}, budget="3k tokens, 40 trials")
    assert [trial.tokens for trial in result.trials] == [1000] * 3
    assert result.trials[1].seconds > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_in_this_process_ends_with_the_time(tmp_path: Path) -> None:
    """It continues from its checkpoint in a later session whose budget is larger."""
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

    options: dict[str, Any] = {"out": tmp_path}
    first = minimize(function, {"x": Float(0, 1)}, budget="0.3s", **options)
    assert [(str(trial.state), trial.value) for trial in first.trials] == [("paused", None)]
    assert 0.2 <= first.trials[0].seconds < 0.6  # a tenth more than the budget, in which it might have reported
    assert minimize(function, {"x": Float(0, 1)}, budget="0.3s", **options).trials == first.trials
    second = minimize(function, {"x": Float(0, 1)}, budget=1, **options)
    assert (str(second.trials[0].state), second.trials[0].value) == ("finished", 0.5)
    assert second.trials[0].seconds > 0.8
    assert steps == list(range(1, 41))


@pytest.mark.slow
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
