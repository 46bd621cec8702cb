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
from posttrain.tune.samplers.bohb import BohbSampler
from posttrain.tune.samplers.cmaes import CmaEsSampler
from posttrain.tune.samplers.optuna_sampler import OptunaSampler
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.space import Settings
from posttrain.tune.study import read_study
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
        ("bohb", 1, 50),
        ("cmaes", 1, 50),
        ({"name": "evolutionary", "population": 10}, 1, 50),
        ({"name": "nsga2", "population": 10}, 2, 50),
        ({"name": "nsga3", "population": 10}, 2, 50),
        pytest.param({"name": "gp", "startup": 5}, 1, 30, marks=pytest.mark.slow),
        pytest.param({"name": "gp", "startup": 3}, 2, 16, marks=pytest.mark.slow),
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


@pytest.mark.parametrize("name", ["tpe", "bohb", "cmaes", "nsga2", "nsga3", "regularized_evolution", "gp"])
def test_a_killed_trial_teaches_nothing(name: str) -> None:
    """The settings of killed trials may be any: the proposal is the same."""
    directions = (False, False) if name == "nsga3" else False
    sampler = make_sampler(name, CUBE, 3, directions)
    others = (0.5,) if name == "nsga3" else ()
    trials = [replace(run(number, drawn, others), lost=True) for number, drawn in enumerate(points(24))]
    assert sum(trial.latest is None for trial in trials) > 5
    moved = [
        trial if trial.latest is not None else replace(trial, drawn=other, settings=other)
        for trial, other in zip(trials, points(24, seed=1), strict=True)
    ]
    assert sampler.propose(24, trials) == make_sampler(name, CUBE, 3, directions).propose(24, moved)


@pytest.mark.parametrize("objectives", [1, 2, 3])
@pytest.mark.parametrize("name", ["tpe", {"name": "nsga2", "population": 4}, {"name": "nsga3", "population": 4}])
def test_where_all_but_a_first_point_fail_the_search_goes_on(name: Any, objectives: int) -> None:
    directions: Any = True if objectives == 1 else (True,) * objectives
    sampler, low = make_sampler(name, CUBE, 1, directions), dict.fromkeys("xyz", 0.1)
    trials = [run(0, low, (0.5,) * (objectives - 1))]
    for number in range(1, 25):
        proposal = sampler.propose(number, trials)
        assert proposal is not None
        trials.append(Trial(number, proposal.drawn, proposal.drawn, TrialState.FAILED, notes=proposal.notes))
    assert len({repr(trial.drawn) for trial in trials}) > 15


def test_bohb_counts_bad_settings_among_the_bad_points() -> None:
    sampler = BohbSampler(CUBE)
    trials = [run(number, drawn) for number, drawn in enumerate(points(30))]
    trials[-1] = replace(trials[-1], lost=True)
    sampler._update(trials)
    split = sampler._split()
    assert split is not None
    good, bad = split
    failed = [trial.number for trial in trials if trial.has_bad_settings]
    assert len(failed) > 10
    assert bad[-len(failed) :] == failed
    assert not set(good) & set(failed)


def test_a_generation_of_cmaes_has_bad_settings_among_its_worst() -> None:
    sampler = CmaEsSampler(CUBE, seed=1)
    size = sampler._optimizer.population_size
    trials: list[Trial] = []
    while sampler._generation == 0:
        proposal = sampler.propose(len(trials), trials)
        assert len(trials) < 30
        # All fail but three, which is the half that moves the distribution.
        drawn, state = proposal.drawn, TrialState.FINISHED if len(trials) in (2, 3, 9) else TrialState.FAILED
        value = None if state is TrialState.FAILED else float(len(trials))
        trials.append(Trial(len(trials), drawn, drawn, state, value=value, notes=proposal.notes))
    solutions = trials[-1].notes["space:solutions"]
    assert len(trials) == 11  # the last of them is of the next generation
    assert len(solutions) == size
    assert [number for number, _ in solutions[:3]] == [2, 3, 9]
    assert [loss for _, loss in solutions[3:]] == [9.0] * (size - 3)


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
    _, trials = read_study(tmp_path / "study")
    assert [trial.state is TrialState.FAILED for trial in trials] == [True, True, True, True, False]
    assert [trial.has_bad_settings for trial in trials] == [True, True, True, False, False]
