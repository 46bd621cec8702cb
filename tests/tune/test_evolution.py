"""Regularised evolution: the contract of samplers, its rules, and convergence."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.testing.samplers import MakeSampler, SamplerContract
from posttrain.tune.parameters import Choice
from posttrain.tune.samplers.base import Sampler
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Report, Trial, TrialState

RANKS = Space({f"layer_{index}": Choice([0, 4, 8, 16]) for index in range(8)})
BEST = [0, 16, 4, 8, 8, 0, 16, 4]


class TestEvolution(SamplerContract):
    @pytest.fixture
    def make(self) -> MakeSampler:
        options = {"name": "regularized_evolution", "population": 6, "tournament": 3}
        return lambda space, seed, maximize: make_sampler(options, space, seed, maximize)


def distance(drawn: dict[str, Any]) -> float:
    return float(sum(value != best for value, best in zip(drawn.values(), BEST, strict=True)))


def search(sampler: Sampler, count: int) -> list[Trial]:
    trials: list[Trial] = []
    for number in range(count):
        proposal = sampler.propose(number, trials)
        assert proposal is not None
        drawn = dict(proposal.drawn)
        trials.append(Trial(number, drawn, drawn, TrialState.FINISHED, value=distance(drawn)))
    return trials


def test_a_child_differs_in_one_parameter_from_the_best_of_all_alive() -> None:
    # With a tournament of the whole population the parent is certain.
    trials = search(make_sampler({"name": "regularized_evolution", "population": 5, "tournament": 5}, RANKS, 1), 60)
    alive: deque[Trial] = deque(trials[:5], maxlen=5)
    for trial in trials[5:]:
        parent = min(alive, key=lambda item: (item.value, item.number))
        assert sum(trial.drawn[name] != parent.drawn[name] for name in RANKS.parameters) == 1
        alive.append(trial)
    # The best is forgotten as soon as it is the oldest.
    best = min(trials[:5], key=lambda trial: trial.value or 0.0)
    assert len({repr(trial.drawn) for trial in trials[5:]}) > 30
    assert best.drawn != trials[-1].drawn


@pytest.mark.parametrize("maximize", [False, True])
def test_values_are_compared_at_the_same_step(maximize: bool) -> None:
    """Curves fall: the last value of a poor trial that has finished is better than the first of a good one."""
    sign = -1 if maximize else 1
    trials: list[Trial] = []
    for number in range(12):
        poor = number < 4
        drawn = dict.fromkeys(RANKS.parameters, 0 if poor else 16)
        values = (1.3, 0.5) if poor else (0.9 + number / 100,)
        reports = tuple(Report(step, sign * value, 1.0) for step, value in enumerate(values, start=1))
        state = TrialState.FINISHED if poor else TrialState.PAUSED
        trials.append(Trial(number, drawn, drawn, state, reports, value=sign * 0.5 if poor else None))
    options = {"name": "regularized_evolution", "population": 12, "tournament": 12}
    proposal = make_sampler(options, RANKS, 0, maximize).propose(12, trials)
    assert proposal is not None
    assert sum(proposal.drawn[name] != 16 for name in RANKS.parameters) == 1


def test_evolution_beats_random_search() -> None:
    def median(name: Any) -> float:
        runs = [search(make_sampler(name, RANKS, seed), 80) for seed in range(5)]
        return float(np.median([min(trial.value or 0.0 for trial in trials) for trials in runs]))

    assert median({"name": "regularized_evolution", "population": 10, "tournament": 4}) <= median("random") - 1


@pytest.mark.parametrize("options", [{"population": 1}, {"tournament": 0}, {"population": 4, "tournament": 5}])
def test_options_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="out of range"):
        make_sampler({"name": "regularized_evolution", **options}, RANKS)
