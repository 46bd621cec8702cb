"""Budgets are read, spent and shown."""

from typing import Any

import pytest

from posttrain.store.errors import UserError
from posttrain.tune.budget import Budget, format_seconds


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
        ("2M tokens", Budget(tokens=2_000_000)),
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
    assert not budget.is_spent(59, 999)
    assert budget.is_spent(60, 0)
    assert budget.is_spent(0, 1000)
    assert budget.left(1, 20, 400) == "1 trials, 40s, 600 tokens left"
    assert budget.left(5, 100, 4000) == "0 trials, 0s, 0 tokens left"


def test_durations() -> None:
    assert [format_seconds(seconds) for seconds in (0.1234, 59, 61, 3700)] == ["0.123s", "59s", "1m 1s", "1h 1m"]
