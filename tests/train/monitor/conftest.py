"""Simulated trainings: values of their steps, without a model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.train.monitor.decisions import MonitorDecision
from posttrain.train.monitor.metrics import StepValues
from posttrain.train.monitor.monitor import Monitor

MakeValues = Callable[..., StepValues]
Simulate = Callable[..., list[StepValues]]
Follow = Callable[[Monitor, list[StepValues]], list[MonitorDecision]]

GROUPS = ("embedding", "layers.0", "layers.1", "layers.2", "norm")


def step_values(step: int = 0, **changes: Any) -> StepValues:
    defaults = StepValues(
        step=step,
        epoch=0,
        loss=1.5,
        loss_count=900,
        grad_norm=0.8,
        group_norms={"layers.0": 0.5, "layers.1": 0.6},
        update_ratio=1e-3,
        lr=1e-4,
        tokens=4000,
        supervised_tokens=900,
        seconds=2.0,
        tokens_per_second=2000.0,
        memory_bytes=3_000_000_000,
        data_wait=0.01,
        mfu=0.5,
    )
    return replace(defaults, **changes)


def clean_run(seed: int, steps: int = 2000, noise: float = 0.05, spread: float = 0.25) -> list[StepValues]:
    """A run that keeps learning: the loss is a noisy power law, the gradient norms settle and have heavy tails.

    Args:
        noise: deviation of the logarithm of a step's loss.
        spread: scale of the logarithm of the gradient norm, Student's t with 8 degrees of freedom.
    """
    rng = np.random.default_rng(seed)
    step_numbers = np.arange(steps)
    losses = 3 * (1 + step_numbers / 50) ** -0.25 * np.exp(noise * rng.standard_normal(steps))
    norms = (0.7 + 4 * np.exp(-step_numbers / 60)) * np.exp(spread * rng.standard_t(8, steps))
    shares = np.exp(0.5 * rng.standard_normal((steps, len(GROUPS)))) * (0.5, 0.6, 0.4, 0.3, 0.01)
    return [
        step_values(
            step,
            loss=float(losses[step]),
            grad_norm=float(norms[step]),
            group_norms=dict(zip(GROUPS, (norms[step] * shares[step]).tolist(), strict=True)),
        )
        for step in range(steps)
    ]


def follow_run(monitor: Monitor, run: list[StepValues]) -> list[MonitorDecision]:
    """Show a monitor every step of a run as a trainer does, whatever it decides; returns its decisions in order."""

    def decisions() -> Iterator[MonitorDecision]:
        for values in run:
            before = monitor.before_step(values.loss, values.grad_norm, values.supervised_tokens, values.step)
            if before is not None:
                yield before
            yield from monitor.observe(values)

    return list(decisions())


@pytest.fixture(scope="session")
def make_values() -> MakeValues:
    """``make_values(step, loss=...)``: the values of a step."""
    return step_values


@pytest.fixture(scope="session")
def simulate() -> Simulate:
    """``simulate(seed, steps=..., noise=..., spread=...)``: a clean run."""
    return clean_run


@pytest.fixture(scope="session")
def follow() -> Follow:
    return follow_run
