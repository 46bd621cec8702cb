"""A study ends when little is to be gained, says so, and goes on with a larger budget; not while much remains."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.tune import Float, Space, TrialContext, minimize
from posttrain.tune.budget import Budget, Gain, read_gain
from posttrain.tune.stopping import GainRule
from posttrain.tune.trial import Trial, TrialState

LINE = Space({"x": Float(0, 1)})


def bowl(trial: TrialContext) -> float:
    return float(1 + (trial["x"] - 0.3) ** 2)


@pytest.mark.slow
def test_a_study_ends_early_and_goes_on_with_a_larger_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(budget: int, gain: str = "0.1%") -> Any:
        return minimize(bowl, LINE, budget=budget, sampler="gp", stop={"gain": gain}, out=tmp_path / "study", seed=1)

    with caplog.at_level(logging.INFO, "posttrain"):
        first = run(40)
    count = len(first.trials)
    assert 10 <= count < 30
    assert first.value == pytest.approx(1, abs=1e-3)
    assert f"ended early after {count} trials: better settings would gain at most" in caplog.text
    assert "less than the 0.001 of stop.gain 0.1%, with 90% probability; a larger budget goes on" in caplog.text
    # The same command adds nothing, and a larger budget at least five.
    assert len(run(40).trials) == count
    assert count + 5 <= len(run(60).trials) < 60
    assert len(minimize(bowl, LINE, budget=35, sampler="gp", out=tmp_path / "study", seed=1).trials) == 35


def valleys(x: float) -> float:
    """The valley on the right is deeper by 0.3."""
    return float(1 - 0.5 * np.exp(-(((x - 0.25) / 0.15) ** 2)) - 0.8 * np.exp(-(((x - 0.8) / 0.12) ** 2)))


def test_it_does_not_end_while_an_improvement_remains() -> None:
    """Of 8 searches that have seen the left part alone none ends; with the whole range seen at least 7 do."""
    ended = {"left": 0, "whole": 0}
    for seed in range(8):
        generator = np.random.default_rng(seed)
        for name, points in (
            ("left", generator.uniform(0, 0.6, 14)),
            ("whole", (np.arange(40) + generator.random(40)) / 40),
        ):
            points = sorted(points, key=valleys)  # the best is not among the last
            trials = [Trial(n, {"x": x}, {"x": x}, TrialState.FINISHED, value=valleys(x)) for n, x in enumerate(points)]
            ended[name] += bool(GainRule(LINE, Gain(0.05, False, "0.05"), Budget(), seed=seed).reason(trials))
    assert ended["left"] == 0
    assert ended["whole"] >= 7


def test_settings_that_fail_promise_nothing() -> None:
    """The loss falls towards 0.6, beyond which all trials fail: what it might be there does not go on for ever."""
    points = [0.59, *np.linspace(0, 0.6, 13), *np.linspace(0.62, 1, 12)]
    trials = [
        Trial(n, {"x": x}, {"x": x}, TrialState.FAILED if x > 0.61 else TrialState.FINISHED)
        for n, x in enumerate(points)
    ]
    trials = [
        trial if trial.state is TrialState.FAILED else replace(trial, value=2 - trial.drawn["x"]) for trial in trials
    ]
    trials = sorted(trials, key=lambda trial: trial.value or 0.0)
    trials = [replace(trial, number=number) for number, trial in enumerate(trials)]
    gain = Gain(0.1, False, "0.1")
    assert GainRule(LINE, gain, Budget()).reason(trials)
    killed = [replace(trial, lost=trial.value is None) for trial in trials]
    assert not GainRule(LINE, gain, Budget()).reason(killed)


def test_a_new_best_goes_on() -> None:
    points = [*np.linspace(0, 1, 20), 0.301]
    trials = [Trial(n, {"x": x}, {"x": x}, TrialState.FINISHED, value=1 + (x - 0.3) ** 2) for n, x in enumerate(points)]
    gain = Gain(0.05, False, "0.05")
    assert not GainRule(LINE, gain, Budget()).reason(trials)
    assert GainRule(LINE, gain, Budget()).reason(trials[:-1])
    assert not GainRule(LINE, gain, Budget()).reason(trials[:9])  # too few


def test_the_bound_is_that_of_the_formula() -> None:
    """Over a dense grid, from the same process: a threshold just above the bound ends the study, one below does not."""
    from posttrain.tune.acquisition import confidence_weight
    from posttrain.tune.losses import standardize
    from posttrain.tune.samplers.gaussian import GaussianProcessSampler

    points = [0.0, 0.31, *np.linspace(0.05, 1, 12)]
    trials = [
        Trial(n, {"x": x}, {"x": x}, TrialState.FINISHED, value=np.cos(3 * x + 2) + 2) for n, x in enumerate(points)
    ]
    losses = {trial.number: trial.value or 0.0 for trial in trials}
    generator = np.random.default_rng([0, len(trials)])
    sampler = GaussianProcessSampler(LINE, 0)
    sampler.transform = False
    predictor, _ = sampler.fit(trials, losses, generator)
    scale = standardize(list(losses.values()))[1][1]
    width = np.sqrt(confidence_weight(len(trials), 1))
    mean, deviation = predictor.predict(np.linspace(0, 1, 20_001)[:, None])
    seen_mean, seen_deviation = predictor.predict(np.array(points)[:, None])
    regret = scale * ((seen_mean + width * seen_deviation).min() - (mean - width * deviation).min())
    above, below = (Gain(factor * regret, False, "") for factor in (1.02, 0.98))
    assert GainRule(LINE, above, Budget()).reason(trials)
    assert not GainRule(LINE, below, Budget()).reason(trials)


@pytest.mark.parametrize("value", ["0.1%", {"gain": "much"}, {"gain": 0}, {"gain": "-1%"}, {"gains": "1%"}, {}])
def test_mistakes(value: Any) -> None:
    with pytest.raises(UserError, match=r"^stop"):
        read_gain(value)


def test_gains() -> None:
    assert read_gain({"gain": "0.5%"}).threshold(-40.0) == pytest.approx(0.2)
    assert read_gain({"gain": 0.5}).threshold(40.0) == 0.5


def test_populations_are_refused() -> None:
    with pytest.raises(UserError, match="settings of a population change"):
        minimize(
            bowl,
            LINE,
            budget=8,
            scheduler={"name": "pbt", "population": 4, "interval": 1, "max_resource": 4},
            stop={"gain": "1%"},
        )
