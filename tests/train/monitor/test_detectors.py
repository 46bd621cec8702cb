"""Planted faults are detected at once or within their patience; clean runs raise nothing."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.detectors import DeadLayers, EarlyLimit, Explosion, LossDivergence, Plateau
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.monitor import Monitor

pytestmark = pytest.mark.slow

MakeValues = Callable[..., StepValues]
Simulate = Callable[..., list[StepValues]]
Losses = Callable[[np.ndarray], np.ndarray]
Follow = Callable[[Monitor, list[StepValues]], list[MonitorDecision]]


@pytest.mark.parametrize(("noise", "spread"), [(0.0, 0.0), (0.02, 0.1), (0.05, 0.25), (0.1, 0.35), (0.15, 0.45)])
def test_clean_runs_raise_nothing(simulate: Simulate, follow: Follow, noise: float, spread: float) -> None:
    for seed in range(3 if noise else 1):
        monitor = Monitor()
        follow(monitor, simulate(seed, noise=noise, spread=spread))
        assert monitor.report() == []


@pytest.mark.parametrize("seed", range(4))
def test_an_explosion_is_detected_at_its_step(simulate: Simulate, follow: Follow, seed: int) -> None:
    run = simulate(seed, steps=400)
    fault_step = int(np.random.default_rng(seed).integers(20, 400))
    run[fault_step] = replace(run[fault_step], grad_norm=100 * run[fault_step].grad_norm)
    (decision,) = follow(Monitor(), run)
    assert (decision.finding.kind, decision.finding.step, decision.action) == ("explosion", fault_step, "skip")
    assert decision.finding.since == fault_step
    assert decision.finding.value == run[fault_step].grad_norm
    assert decision.finding.limit is not None
    assert decision.finding.limit < run[fault_step].grad_norm


def test_constant_norms_have_a_floor_for_outliers(make_values: MakeValues) -> None:
    detector = Explosion()
    for step in range(100):
        assert detector.observe(make_values(step, grad_norm=1.0)) is None
    assert detector.observe(make_values(100, grad_norm=4.0)) is None, "below exp(7 * 0.25)"
    assert detector.observe(make_values(101, grad_norm=0.001)) is None, "small is not an explosion"
    assert detector.observe(make_values(102, grad_norm=8.0)) is not None


def test_a_new_level_of_norms_is_learned(make_values: MakeValues) -> None:
    detector = Explosion()
    norms = [1.0] * 100 + [50.0] * 100
    result = [step for step, norm in enumerate(norms) if detector.observe(make_values(step, grad_norm=norm))]
    assert result[0] == 100
    assert result[-1] < 100 + 40


@pytest.mark.parametrize("norm", [math.inf, math.nan, 0.0])
def test_the_explosion_detector_ignores_norms_without_a_logarithm(make_values: MakeValues, norm: float) -> None:
    detector = Explosion()
    for step in range(20):
        assert detector.observe(make_values(step, grad_norm=norm)) is None
    assert detector.state() == {"logs": []}


@pytest.mark.parametrize(
    ("name", "value", "fault_step"),
    [("loss", math.nan, 0), ("grad_norm", math.inf, 1), ("loss", -math.inf, 250), ("grad_norm", math.nan, 250)],
)
def test_nan_and_infinite_values_are_detected_at_once(
    simulate: Simulate, follow: Follow, name: str, value: float, fault_step: int
) -> None:
    run = simulate(1, steps=300)
    run[fault_step] = replace(run[fault_step], **{name: value})
    (decision,) = follow(Monitor(), run)
    assert (decision.finding.kind, decision.finding.step, decision.action) == ("nan", fault_step, "rollback")
    assert str(value) in decision.finding.what
    assert decision.finding.value is None


@pytest.mark.parametrize("seed", range(3))
def test_divergence_is_detected_within_its_patience(simulate: Simulate, follow: Follow, seed: int) -> None:
    run = simulate(seed, steps=800, noise=0.1)
    fault_step = int(np.random.default_rng(seed).integers(100, 700))
    run = [replace(values, loss=values.loss * (3 if values.step >= fault_step else 1)) for values in run]
    result = follow(Monitor(), run)
    first = next(decision for decision in result if decision.finding.kind == "divergence")
    window, patience = LossDivergence.WINDOW, LossDivergence.PATIENCE
    assert first.action == "rollback"
    assert fault_step - 2 <= first.finding.since <= fault_step + 1, "to the step, but for noise"
    assert fault_step + patience <= first.finding.step <= fault_step + window // 2 + patience


VOCABULARY = 49_152
SFT, DPO = (EarlyLimit.of_objective(name, VOCABULARY) for name in ("sft", "dpo"))


@pytest.mark.parametrize(
    ("limit", "losses", "expected"),
    [
        # A far too high rate.
        (SFT, [5.5, 26.0, 310.0, 1900.0, 8300.0], 3),
        # As bad as chance, for a model that was nearly right: twice chance is the limit.
        (SFT, [0.2, 12.0, 12.0, 12.0, 21.7, 21.7, 21.7], 6),
        (SFT, [40.0, 70.0, 79.0, 81.0, 81.0, 81.0], 5),
        (SFT, [5.5, 26.0, 26.0, 5.5, 26.0, 26.0], None),
        (DPO, [0.69, 12.0, 90.0, 300.0, 330.0, 400.0, 500.0, 900.0, 4000.0], 8),
    ],
)
def test_early_divergence_is_detected_within_its_patience(
    make_values: MakeValues, limit: EarlyLimit, losses: list[float], expected: int | None
) -> None:
    detector = LossDivergence(limit)
    findings = [detector.observe(make_values(step, loss=loss)) for step, loss in enumerate(losses)]
    assert [finding.step for finding in findings if finding] == ([] if expected is None else [expected])
    for finding in filter(None, findings):
        assert finding.since == finding.step - limit.patience, "the step before the first of them moved the weights"
        assert f"after {losses[0]:.4g} at first" in finding.what


def test_early_divergence_is_detected_after_a_resume(make_values: MakeValues) -> None:
    whole, first, second = (LossDivergence(SFT) for _ in range(3))
    losses = [5.5, 26.0, 310.0, 1900.0]
    expected = [whole.observe(make_values(step, loss=loss)) for step, loss in enumerate(losses)]
    for step in (0, 1):
        first.observe(make_values(step, loss=losses[step]))
    second.load(first.state())
    assert [second.observe(make_values(step, loss=losses[step])) for step in (2, 3)] == expected[2:]


@pytest.mark.parametrize(
    "losses",
    [
        lambda draws: 3 * (1 + 0.5 * draws),
        lambda draws: 3 * np.exp(draws),
        # From scratch, with a hump in the warm-up.
        lambda draws: 10.8 * (1 + 0.5 * np.exp(-(((np.arange(36) - 10) / 5) ** 2))) * np.exp(0.1 * draws),
        # Batches of one record, the first of which is known by heart.
        lambda draws: np.where(np.arange(36) == 0, 0.01, 5 * np.exp(0.5 * draws)),
    ],
    ids=["normal", "log-normal", "from scratch", "known"],
)
def test_supervised_fine_tuning_starts_without_a_false_alarm(make_values: MakeValues, losses: Losses) -> None:
    assert _alarms(make_values, SFT, losses) == 0


@pytest.mark.parametrize(
    "losses",
    [
        lambda draws: np.log1p(np.exp(-draws)),
        lambda draws: np.log1p(np.exp(-10 * draws)),
        lambda draws: (3 * draws - 5) ** 2,  # IPO
        lambda draws: 1000 * np.exp(0.5 * draws),  # distances of hidden states
    ],
    ids=["dpo", "noisy dpo", "ipo", "hidden states"],
)
def test_other_objectives_start_without_a_false_alarm(make_values: MakeValues, losses: Losses) -> None:
    assert _alarms(make_values, DPO, losses) == 0


def _alarms(make_values: MakeValues, limit: EarlyLimit, losses: Losses, runs: int = 100) -> int:
    """Count the findings in as many simulated starts."""
    count = 0
    for seed in range(runs):
        detector = LossDivergence(limit)
        for step, loss in enumerate(losses(np.random.default_rng(seed).standard_normal(36))):
            count += detector.observe(make_values(step, loss=float(loss))) is not None
    return count


@pytest.mark.parametrize("lowest", [0.01, 1.0])
def test_slow_divergence_is_detected(simulate: Simulate, follow: Follow, lowest: float) -> None:
    """A loss that grows e-fold in 60 steps up to chance, from a small and from a usual minimum."""
    run = simulate(0, steps=600)
    losses = [lowest * values.loss / 3 * math.exp(max(values.step - 300, 0) / 60) for values in run]
    run = [replace(values, loss=min(loss, 11.0)) for values, loss in zip(run, losses, strict=True)]
    assert "divergence" in [decision.finding.kind for decision in follow(Monitor(), run)]


def test_single_bad_batches_are_no_divergence(simulate: Simulate, follow: Follow) -> None:
    run = [replace(values, loss=values.loss * (50 if values.step % 10 == 9 else 1)) for values in simulate(0, 600)]
    assert follow(Monitor(), run) == []


def test_a_memorised_loss_may_rise_a_little(simulate: Simulate, follow: Follow) -> None:
    """From 3 to 0.01, then up to 0.1: ten times the lowest loss, but little against the improvement."""
    run = simulate(0, steps=600)
    levels = [3 * math.exp(-values.step / 50) + 0.01 if values.step < 400 else 0.1 for values in run]
    run = [replace(values, loss=level) for values, level in zip(run, levels, strict=True)]
    assert [decision.finding.kind for decision in follow(Monitor(), run)] == []


def noisy_losses(seed: int, steps: int, gain: float, noise: float) -> list[float]:
    """A loss of 1.5 that improves by the share ``gain`` in 500 steps."""
    draws = np.random.default_rng(seed).standard_normal(steps)
    return list(1.5 * (1 - gain) ** (np.arange(steps) / 500) * (1 + noise * draws))


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.02, 1), (0.05, 2), (0.05, 3)])
def test_a_flat_loss_is_a_plateau(make_values: MakeValues, seed: int, noise: float) -> None:
    detector = Plateau()
    result = [
        detector.observe(make_values(step, loss=loss)) for step, loss in enumerate(noisy_losses(seed, 2000, 0, noise))
    ]
    first = next(finding for finding in result if finding is not None)
    assert first.step >= 499
    assert "over the last 500 steps" in first.what
    assert first.since == first.step - 499
    assert sum(finding is not None for finding in result) <= 4, "at most once a window"


@pytest.mark.parametrize(("noise", "seed"), [(0.0, 0), (0.02, 1), (0.05, 2), (0.05, 3)])
def test_a_slow_improvement_is_no_plateau(make_values: MakeValues, seed: int, noise: float) -> None:
    detector = Plateau()
    for step, loss in enumerate(noisy_losses(seed, 3000, 0.06, noise)):
        assert detector.observe(make_values(step, loss=loss)) is None


def test_the_improvement_of_a_line_is_exact(make_values: MakeValues, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss on a line from 1 down to 1 - 0.009 has improved by 0.01 (ten steps' worth) of its mean."""
    monkeypatch.setattr(Plateau, "WINDOW", 10)
    detector = Plateau()
    result = [detector.observe(make_values(step, loss=1 - 0.001 * step)) for step in range(10)]
    assert result[:9] == [None] * 9
    assert result[9] is not None
    assert result[9].value == pytest.approx(0.01 / 0.9955, rel=1e-6)


@pytest.mark.parametrize("norm", [0.0, 1e-6])
def test_a_dead_layer_is_detected_within_its_patience(simulate: Simulate, follow: Follow, norm: float) -> None:
    run = [
        replace(values, group_norms=values.group_norms | ({"layers.1": norm} if values.step >= 50 else {}))
        for values in simulate(0, steps=200)
    ]
    (decision,) = follow(Monitor(), run)
    assert (decision.finding.kind, decision.finding.step, decision.action) == ("dead_layers", 69, "warn")
    assert decision.finding.since == 50
    assert decision.finding.what.endswith("in layers.1")
    assert decision.finding.value == norm


def test_a_recovered_layer_may_die_again(make_values: MakeValues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadLayers, "PATIENCE", 3)
    detector = DeadLayers()
    norms = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    values = [make_values(step, group_norms={"a": norm, "b": 1.0, "c": 2.0}) for step, norm in enumerate(norms)]
    assert [step for step, item in enumerate(values) if detector.observe(item)] == [5, 11]


def test_dead_layers_ignore_steps_with_nan_norms(make_values: MakeValues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadLayers, "PATIENCE", 2)
    detector = DeadLayers()
    for step, norm in enumerate([0.0, math.nan, math.inf]):
        assert detector.observe(make_values(step, group_norms={"a": 0.0, "b": 1.0, "c": norm})) is None
    assert detector.observe(make_values(3, group_norms={"a": 0.0, "b": 1.0, "c": 1.0})) is not None
    assert detector.observe(make_values(4, group_norms={})) is None


def test_a_batch_without_a_supervised_token_is_skipped(simulate: Simulate, follow: Follow) -> None:
    run = simulate(0, steps=60)
    # Its mean loss is 0 / 0 in some trainers; that is the same fault, not another.
    run[33] = replace(run[33], supervised_tokens=0, grad_norm=0.0, loss=math.nan)
    (decision,) = follow(Monitor(), run)
    assert (decision.finding.kind, decision.finding.step, decision.action) == ("no_supervised", 33, "skip")


def test_the_first_norms_are_no_explosion(make_values: MakeValues) -> None:
    """A median of few steps says nothing, and the first steps have the largest norms of all."""
    detector = Explosion()
    for step in range(Explosion.WARMUP):
        assert detector.observe(make_values(step, grad_norm=1e12**step)) is None
