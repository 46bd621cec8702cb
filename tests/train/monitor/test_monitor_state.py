"""A monitor over complete runs: its decisions before and after a step, its resumption and rollback."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.train.monitor import decisions
from posttrain.train.monitor.decisions import ACTIONS, KINDS, POLICIES, MonitorDecision
from posttrain.train.monitor.detectors import DeadLayers, Explosion, LossDivergence, Plateau
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.monitor import Monitor

MakeValues = Callable[..., StepValues]
Simulate = Callable[..., list[StepValues]]
Follow = Callable[[Monitor, list[StepValues]], list[MonitorDecision]]


def test_before_a_step_the_first_finding_above_a_warning_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "normal", POLICIES["normal"] | {"no_supervised": "warn", "explosion": "warn"})
    monitor = Monitor()
    for step in range(10):
        assert monitor.before_step(1.0, 1.0, 5, step) is None
    warning = monitor.before_step(1.0, 1e6, 0, 10)
    assert warning is not None
    assert warning.finding.kind == "no_supervised"
    assert [decision.finding.kind for decision in monitor.decisions] == ["no_supervised", "explosion"]
    rollback = monitor.before_step(math.nan, math.nan, 0, 11)
    assert rollback is not None
    assert (rollback.finding.kind, rollback.action) == ("nan", "rollback")


def test_after_a_step_the_gravest_decision_comes_first(
    make_values: MakeValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LossDivergence, "WINDOW", 3)
    monkeypatch.setattr(LossDivergence, "PATIENCE", 1)
    monkeypatch.setattr(DeadLayers, "PATIENCE", 5)
    monitor = Monitor()
    for step in range(4):
        assert monitor.observe(make_values(step, loss=1.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0})) == []
    for step in range(4, 8):
        monitor.observe(make_values(step, loss=1.0, group_norms={"a": 1.0, "b": 1.0, "c": 1.0}))
    for step in range(8, 11):
        monitor.observe(make_values(step, loss=1.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0}))
    monitor.observe(make_values(11, loss=9.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0}))
    result = monitor.observe(make_values(12, loss=9.0, group_norms={"a": 0.0, "b": 1.0, "c": 1.0}))
    assert [(decision.finding.kind, decision.action) for decision in result] == [
        ("divergence", "rollback"),
        ("dead_layers", "warn"),
    ]


def test_each_decision_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="posttrain")
    monitor = Monitor()
    monitor.before_step(math.inf, 1.0, 5, 7)
    monitor.before_step(1.0, 1.0, 0, 8)
    monitor.before_step(1.0, math.nan, 5, 9)
    assert caplog.messages == [
        "step 7: loss is inf: rollback",
        "step 8: the batch has no supervised token: skip",
        "step 9: gradient norm is nan: lower rate (rollback at step 7 did not help)",
    ]
    assert json.loads(json.dumps(monitor.report(), allow_nan=False))[2] == {
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


def test_a_rollback_keeps_the_decisions(simulate: Simulate, follow: Follow) -> None:
    run = simulate(0, steps=60)
    monitor = Monitor()
    follow(monitor, run[:40])
    state = monitor.state()
    run[50] = replace(run[50], loss=math.nan)
    follow(monitor, run[40:])
    monitor.roll_back(state)
    assert monitor.state()["detectors"] == state["detectors"]
    assert len(monitor.decisions) == 1
    decision = monitor.before_step(math.nan, 1.0, 5, 45)
    assert decision is not None
    assert decision.action == "lower_rate"


def test_a_rollback_drops_later_reports() -> None:
    monitor = Monitor()
    skip = monitor.before_step(1.0, 1.0, 0, 2)
    assert skip is not None
    monitor.record(2, [skip])
    monitor.record(3, [])
    state = json.loads(json.dumps(monitor.state()))
    monitor.record(5, [skip, skip])
    monitor.roll_back(state)
    resumed = Monitor()
    resumed.load(state)
    assert monitor.reported == resumed.reported == {2: [skip]}


def test_a_reset_allows_another_loss(simulate: Simulate, follow: Follow) -> None:
    first_run, second_run = simulate(0, steps=300), simulate(1, steps=600)[300:]
    second_run = [replace(values, loss=4 * values.loss, grad_norm=100 * values.grad_norm) for values in second_run]
    reset_monitor, plain_monitor = Monitor(), Monitor()
    follow(reset_monitor, first_run)
    reset_monitor.before_step(math.nan, 1.0, 5, 299)
    reset_monitor.reset()
    follow(reset_monitor, second_run)
    assert [decision.finding.kind for decision in reset_monitor.decisions] == ["nan"]
    follow(plain_monitor, first_run + second_run)
    assert {"explosion", "divergence"} <= {decision.finding.kind for decision in plain_monitor.decisions}


def test_strict_stops_at_the_first_fault_and_off_looks_for_none() -> None:
    decision = Monitor("strict").before_step(math.nan, 1.0, 5, 3)
    assert decision is not None
    assert decision.action == "stop"
    assert Monitor("off").before_step(math.nan, math.nan, 0, 3) is None


@contextmanager
def sensitive() -> Iterator[None]:
    """Short windows, so that every detector has findings within 200 steps."""
    limits: dict[type, dict[str, float]] = {
        Explosion: {"Z": 3.0, "WINDOW": 12, "WARMUP": 3, "FLOOR": 0.05},
        LossDivergence: {"RISE": 0.05, "Z": 1.0, "WINDOW": 5, "PATIENCE": 2},
        Plateau: {"WINDOW": 30, "IMPROVEMENT": 0.2},
        DeadLayers: {"SHARE": 0.2, "PATIENCE": 3},
    }
    with pytest.MonkeyPatch.context() as patch:
        for detector, values in limits.items():
            for name, value in values.items():
                patch.setattr(detector, name, value)
        patch.setattr(decisions, "AGAIN_WITHIN", 40)
        patch.setattr(decisions, "MAX_ROLLBACKS", 1000)
        yield


def with_faults(run: list[StepValues], seed: int) -> list[StepValues]:
    """A run with random faults of all kinds."""
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
@settings(max_examples=20)
def test_a_resumed_monitor_decides_the_same(simulate: Simulate, follow: Follow, seed: int, split: int) -> None:
    run = with_faults(simulate(seed, steps=200, noise=0.3, spread=0.5), seed)
    with sensitive():
        uninterrupted, interrupted, resumed = Monitor(), Monitor(), Monitor()
        follow(uninterrupted, run)
        follow(interrupted, run[:split])
        resumed.load(json.loads(json.dumps(interrupted.state(), allow_nan=False)))
        follow(resumed, run[split:])
    assert resumed.decisions == uninterrupted.decisions
    assert resumed.state() == uninterrupted.state()


def test_the_faults_cause_every_kind_of_finding(simulate: Simulate, follow: Follow) -> None:
    """Otherwise the test above would prove little."""
    with sensitive():
        monitor = Monitor()
        for seed in range(5):
            follow(monitor, with_faults(simulate(seed, steps=200, noise=0.3, spread=0.5), seed))
            monitor.reset()
    assert {decision.finding.kind for decision in monitor.decisions} == set(KINDS)
    assert {decision.action for decision in monitor.decisions} == set(ACTIONS)
