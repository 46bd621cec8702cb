"""Samplers learn from settings that made trials fail, and not from trials that were killed."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState as OptunaState

from posttrain.tune import Float, Infeasible, Space, TrialContext, minimize
from posttrain.tune.samplers.base import Sampler
from posttrain.tune.samplers.optuna_sampler import OptunaSampler
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.space import Settings
from posttrain.tune.study import read_study_events
from posttrain.tune.trial import Trial, TrialState

CUBE = Space({name: Float(0, 1) for name in "xyz"})

LIMIT = 1.3  # of the sum, which 69% of random points exceed


def fails(drawn: Settings) -> bool:
    return bool(sum(drawn.values()) > LIMIT)


def run(number: int, drawn: Settings, others: tuple[float, ...] = (), **values: Any) -> Trial:
    """The loss falls towards a point beyond the limit, as that of a larger model would."""
    if fails(drawn):
        return Trial(number, drawn, drawn, TrialState.FAILED, error="too large", **values)
    loss = float(sum((value - 0.7) ** 2 for value in drawn.values()))
    return Trial(number, drawn, drawn, TrialState.FINISHED, value=loss, others=others, **values)


def search(sampler: Sampler, count: int) -> list[Trial]:
    trials: list[Trial] = []
    for number in range(count):
        proposal = sampler.propose(number, trials)
        assert proposal is not None
        others = (float(proposal.drawn["x"]),) * (len(sampler.directions) - 1)
        trials.append(run(number, proposal.drawn, others, notes=proposal.notes))
    return trials


@pytest.mark.parametrize(
    ("name", "objectives", "count"),
    [
        ("tpe", 1, 50),
        ("tpe", 2, 50),
        ({"name": "nsga2", "population": 10}, 1, 50),
        ({"name": "nsga2", "population": 10}, 2, 50),
        pytest.param({"name": "gp", "startup": 5}, 1, 30, marks=pytest.mark.long),
        pytest.param({"name": "gp", "startup": 3}, 2, 16, marks=pytest.mark.long),
    ],
)
def test_fewer_proposals_fail_than_at_random(name: Any, objectives: int, count: int) -> None:
    """Of three searches at least two have at most 60% failures among the last 40% of their trials."""
    directions: Any = False if objectives == 1 else (False,) * objectives
    runs = [search(make_sampler(name, CUBE, seed, directions), count) for seed in range(3)]
    shares = [np.mean([trial.state is TrialState.FAILED for trial in trials[-2 * count // 5 :]]) for trials in runs]
    assert np.sum(np.array(shares) <= 0.6) >= 2, shares


def points(count: int, seed: int = 0) -> list[dict[str, float]]:
    generator = np.random.default_rng(seed)
    return [CUBE.draw(generator) for _ in range(count)]


def shown(sampler: Sampler, trials: Sequence[Trial]) -> list[tuple[OptunaState, dict[str, float]]]:
    assert isinstance(sampler, OptunaSampler)
    sampler.propose(len(trials), trials)
    return [(item.state, item.constraints) for item in sampler._storage.trials]


def test_bad_settings_break_a_constraint_in_the_eyes_of_optuna() -> None:
    sampler, low, high = make_sampler("tpe", CUBE), dict.fromkeys("xyz", 0.2), dict.fromkeys("xyz", 0.6)
    failed = run(0, high)
    # Before a trial has a value nothing is better than another, so that points stay random.
    assert shown(sampler, [failed]) == [(OptunaState.FAIL, {})]
    killed = replace(failed, number=2, lost=True)
    assert shown(sampler, [failed, run(1, low), killed]) == [
        (OptunaState.COMPLETE, {"settings": 1.0}),
        (OptunaState.COMPLETE, {"settings": -1.0}),
        (OptunaState.FAIL, {"settings": -1.0}),
    ]
    assert shown(make_sampler("tpe", CUBE), [run(0, low), replace(killed, number=1)])[0] == (OptunaState.COMPLETE, {})


@pytest.mark.parametrize("name", ["tpe", "nsga2", "gp"])
def test_a_killed_trial_teaches_nothing(name: str) -> None:
    """The settings of killed trials may be any: the proposal is the same."""
    sampler = make_sampler(name, CUBE, 3)
    trials = [replace(run(number, drawn), lost=True) for number, drawn in enumerate(points(24))]
    assert sum(trial.latest is None for trial in trials) > 5
    moved = [
        trial if trial.latest is not None else replace(trial, drawn=other, settings=other)
        for trial, other in zip(trials, points(24, seed=1), strict=True)
    ]
    assert sampler.propose(24, trials) == make_sampler(name, CUBE, 3).propose(24, moved)


@pytest.mark.parametrize("objectives", [1, 2, 3])
@pytest.mark.parametrize("name", ["tpe", {"name": "nsga2", "population": 4}])
def test_where_all_but_a_first_point_fail_the_search_goes_on(name: Any, objectives: int) -> None:
    directions: Any = True if objectives == 1 else (True,) * objectives
    sampler, low = make_sampler(name, CUBE, 1, directions), dict.fromkeys("xyz", 0.1)
    trials = [run(0, low, (0.5,) * (objectives - 1))]
    for number in range(1, 25):
        proposal = sampler.propose(number, trials)
        assert proposal is not None
        trials.append(Trial(number, proposal.drawn, proposal.drawn, TrialState.FAILED, notes=proposal.notes))
    assert len({repr(trial.drawn) for trial in trials}) > 15


@pytest.mark.slow
def test_what_is_the_fault_of_settings_is_kept_with_the_study(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> float:
        """Each trial fails in another way."""
        if trial.number == 0:
            raise Infeasible("too large")
        if trial.number == 1:
            raise MemoryError
        if trial.number == 2:
            return float("nan")
        if trial.number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    minimize(function, {"x": Float(0, 1)}, budget=5, engine="processes", workers=1, out=tmp_path / "study")
    _, trials, _ = read_study_events(tmp_path / "study")
    assert [trial.state is TrialState.FAILED for trial in trials] == [True, True, True, True, False]
    assert [trial.has_bad_settings for trial in trials] == [True, True, True, False, False]
