"""A watch over whole runs: what it says before and after a step, and how it is resumed and rolled back."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.train.monitor.config import MonitorConfig
from posttrain.train.monitor.decisions import ACTIONS, KINDS, Decision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.monitor import Monitor

MakeValues = Callable[..., StepValues]
Simulate = Callable[..., list[StepValues]]
Follow = Callable[[Monitor, list[StepValues]], list[Decision]]


def config(**changes: Any) -> MonitorConfig:
    return MonitorConfig.read(changes, "test")


def test_only_the_first_finding_above_a_warning_counts_before_a_step(make_values: MakeValues) -> None:
    watch = Monitor(config(no_supervised={"action": "warn"}, explosion={"action": "warn", "warmup": 3}))
    for step in range(10):
        assert watch.before_step(1.0, 1.0, 5, step) is None
    warned = watch.before_step(1.0, 1e6, 0, 10)
    assert warned is not None
    assert warned.finding.kind == "no_supervised"
    assert [decision.finding.kind for decision in watch.decisions] == ["no_supervised", "explosion"]
    gone = watch.before_step(math.nan, math.nan, 0, 11)
    assert gone is not None
    assert (gone.finding.kind, gone.action) == ("nan", "rollback")


def test_after_a_step_the_gravest_comes_first(make_values: MakeValues) -> None:
    watch = Monitor(config(divergence={"window": 3, "patience": 1}, dead_layers={"patience": 5}))
    for step in range(4):
        assert watch.observe(make_values(step, loss=1.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0})) == []
    for step in range(4, 8):
        watch.observe(make_values(step, loss=1.0, group_norms={"a": 1.0, "b": 1.0, "c": 1.0}))
    for step in range(8, 11):
        watch.observe(make_values(step, loss=1.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0}))
    watch.observe(make_values(11, loss=9.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0}))
    result = watch.observe(make_values(12, loss=9.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0}))
    assert [(decision.finding.kind, decision.action) for decision in result] == [
        ("divergence", "rollback"),
        ("dead_layers", "warn"),
    ]


def test_each_decision_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="posttrain")
    watch = Monitor(MonitorConfig())
    watch.before_step(math.inf, 1.0, 5, 7)
    watch.before_step(1.0, 1.0, 0, 8)
    watch.before_step(1.0, math.nan, 5, 9)
    assert caplog.messages == [
        "step 7: loss is inf: rollback",
        "step 8: the batch has no supervised token: skip",
        "step 9: gradient norm is nan: lower rate (rollback at step 7 did not help)",
    ]
    assert json.loads(json.dumps(watch.report(), allow_nan=False))[2] == {
        "kind": "nan",
        "step": 9,
        "what": "gradient norm is nan",
        "value": None,
        "limit": None,
        "since": 9,
        "action": "lower_rate",
        "why": "rollback at step 7 did not help",
        "can_go_back": True,
    }


def test_going_back_forgets_what_was_measured_and_not_what_was_decided(simulate: Simulate, follow: Follow) -> None:
    run = simulate(0, steps=60)
    watch = Monitor(MonitorConfig())
    follow(watch, run[:40])
    kept = watch.state()
    run[50] = replace(run[50], loss=math.nan)
    follow(watch, run[40:])
    watch.roll_back(kept)
    assert watch.state()["detectors"] == kept["detectors"]
    assert len(watch.decisions) == 1
    again = watch.before_step(math.nan, 1.0, 5, 45)
    assert again is not None
    assert again.action == "lower_rate"


def test_what_was_told_goes_with_what_was_measured() -> None:
    watch = Monitor(MonitorConfig())
    skipped = watch.before_step(1.0, 1.0, 0, 2)
    assert skipped is not None
    watch.record(2, [skipped])
    watch.record(3, [])
    kept = json.loads(json.dumps(watch.state()))
    watch.record(5, [skipped, skipped])
    watch.roll_back(kept)
    resumed = Monitor(MonitorConfig())
    resumed.load(kept)
    assert watch.reported == resumed.reported == {2: [skipped]}


def test_a_new_stage_may_have_another_loss(simulate: Simulate, follow: Follow) -> None:
    easy, hard = simulate(0, steps=300), simulate(1, steps=600)[300:]
    hard = [replace(values, loss=4 * values.loss, grad_norm=100 * values.grad_norm) for values in hard]
    informed, uninformed = Monitor(MonitorConfig()), Monitor(MonitorConfig())
    follow(informed, easy)
    informed.before_step(math.nan, 1.0, 5, 299)
    informed.reset()
    follow(informed, hard)
    assert [decision.finding.kind for decision in informed.decisions] == ["nan"]
    follow(uninformed, easy + hard)
    assert {"explosion", "divergence"} <= {decision.finding.kind for decision in uninformed.decisions}


# Short windows, so that every detector has something to say in 200 steps.
NERVOUS = MonitorConfig.read(
    {
        "explosion": {"z": 3.0, "window": 12, "warmup": 3, "floor": 0.05},
        "divergence": {"rise": 0.05, "z": 1.0, "window": 5, "patience": 2},
        "plateau": {"window": 30, "improvement": 0.2},
        "dead_layers": {"share": 0.2, "patience": 3},
        "again_within": 40,
        "max_rollbacks": 1000,
    },
    "test",
)


def troubled(run: list[StepValues], seed: int) -> list[StepValues]:
    """A run with faults of all kinds strewn in."""
    rng = np.random.default_rng(seed)
    faults = [
        {"loss": math.nan},
        {"grad_norm": math.inf},
        {"grad_norm": 90.0},
        {"supervised_tokens": 0},
        {"loss": 9.0},
    ]
    for step in rng.integers(0, len(run), 12):
        run[step] = replace(run[step], **faults[rng.integers(len(faults))])
    return run


@pytest.mark.slow
@given(seed=st.integers(0, 1000), split=st.integers(0, 200))
@settings(max_examples=60)
def test_a_watch_that_is_resumed_goes_on_as_if_it_had_never_stopped(
    simulate: Simulate, follow: Follow, seed: int, split: int
) -> None:
    run = troubled(simulate(seed, steps=200, noise=0.3, spread=0.5), seed)
    whole = Monitor(NERVOUS)
    follow(whole, run)
    first = Monitor(NERVOUS)
    follow(first, run[:split])
    second = Monitor(NERVOUS)
    second.load(json.loads(json.dumps(first.state(), allow_nan=False)))
    follow(second, run[split:])
    assert second.decisions == whole.decisions
    assert second.state() == whole.state()


def test_the_troubled_runs_have_findings_of_every_kind(simulate: Simulate, follow: Follow) -> None:
    """Else the test above would prove little."""
    watch = Monitor(NERVOUS)
    for seed in range(5):
        follow(watch, troubled(simulate(seed, steps=200, noise=0.3, spread=0.5), seed))
        watch.reset()
    assert {decision.finding.kind for decision in watch.decisions} == set(KINDS)
    assert {decision.action for decision in watch.decisions} == set(ACTIONS)
