"""Settings of a population: children are points of the space, perturbed as in the paper."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from posttrain.testing.samplers import SPACE as MIXED_SPACE
from posttrain.testing.samplers import MakeSampler, SamplerContract
from posttrain.tune import Choice, Float, Int, Space
from posttrain.tune.gaussian_process import encode
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.samplers.population import PerturbSampler, perturb
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.trial import Fork, Report, Trial


class TestPerturb(SamplerContract):
    @pytest.fixture
    def make(self) -> MakeSampler:
        return lambda space, seed, maximize: make_sampler("perturb", space, seed, maximize)


def test_numbers_are_perturbed_by_the_factors_within_their_ranges() -> None:
    space = Space({"x": Float(1e-4, 1, log=True), "n": Int(1, 100), "m": Int(1, 8), "zero": Float(0, 0.5)})
    values: dict[str, set[Any]] = {name: set() for name in space.parameters}
    for number in range(40):
        drawn = perturb(space, {"x": 0.9, "n": 50, "m": 2, "zero": 0.0}, np.random.default_rng(number), 0.0)
        for name, value in drawn.items():
            values[name].add(value)
    assert values == {"x": {0.9 * 0.8, 1.0}, "n": {40, 60}, "m": {1, 3}, "zero": {0.0, 0.01}}


def test_choices_of_numbers_move_to_a_neighbour_and_others_are_drawn_anew() -> None:
    space = Space({"batch": Choice([32, 8, 16, 64]), "kind": Choice(["a", "b", "c"])})
    children = [perturb(space, {"batch": 16, "kind": "b"}, np.random.default_rng(seed), 0.0) for seed in range(20)]
    assert {child["batch"] for child in children} == {8, 32}
    assert {child["kind"] for child in children} == {"b"}
    drawn = [perturb(space, {"batch": 16, "kind": "b"}, np.random.default_rng(seed), 1.0) for seed in range(40)]
    assert {child["batch"] for child in drawn} == {8, 16, 32, 64}
    assert {child["kind"] for child in drawn} == {"a", "b", "c"}


def family(sampler: Sampler, space: Space, generations: int = 6, size: int = 4) -> Iterator[Trial]:
    """Trials of a population on a made-up objective, with their proposals from a sampler."""
    assert isinstance(sampler, PerturbSampler)
    trials: list[Trial] = []
    members: list[int] = []
    curves: dict[int, float] = {}
    for step in range(1, generations + 1):
        for _ in range(size):
            number = len(trials)
            if step == 1:
                proposal: Proposal | None = sampler.propose(number, trials)
                assert proposal is not None
                trials.append(Trial(number, space.complete(proposal.drawn), proposal.drawn, notes=proposal.notes))
                members.append(number)
        ranked = sorted(members, key=lambda number: curves.get(number, number))
        if step > 1:
            number, fork = len(trials), Fork(ranked[0], step - 1, ranked[-1])
            proposal = sampler.propose_child(number, trials, fork)
            trials.append(Trial(number, space.complete(proposal.drawn), proposal.drawn, fork=fork))
            curves[number] = curves[fork.parent]
            members[members.index(fork.replaces)] = number
            yield trials[-1]
        for number in members:
            trial = trials[number]
            curves[number] = curves.get(number, 5.0) - number % 3 / (1 + step)
            report = Report(step, curves[number])
            trials[number] = Trial(
                number,
                trial.settings,
                trial.drawn,
                reports=(*trial.reports, report),
                notes=trial.notes,
                fork=trial.fork,
            )


@pytest.mark.parametrize("seed", range(3))
def test_children_are_points_of_the_space(seed: int) -> None:
    children = list(family(make_sampler("perturb", MIXED_SPACE, seed), MIXED_SPACE))
    assert len(children) == 5
    for child in children:
        assert child.settings in MIXED_SPACE, child.settings


def test_a_conditional_setting_comes_and_goes() -> None:
    drawn = {"rate": 1e-4, "method": "full", "batch": 16, "accumulation": 2}
    children = [perturb(MIXED_SPACE, drawn, np.random.default_rng(seed), 0.5) for seed in range(60)]
    assert {"rank" in child for child in children} == {True, False}
    for child in children:
        assert MIXED_SPACE.complete(child) in MIXED_SPACE


def test_settings_stay_where_no_change_meets_the_constraints() -> None:
    space = Space({"a": Int(1, 4), "b": Int(1, 4)}, ["a == 2", "b == 2"])
    assert perturb(space, {"a": 2, "b": 2}, np.random.default_rng(0), 0.0) == {"a": 2, "b": 2}


def test_choices_are_equally_far_from_each_other() -> None:
    space = Space({"kind": Choice(["a", "b", "c"]), "n": Int(1, 3, when="kind == 'a'")})
    a, b, c = (encode(space, drawn) for drawn in ({"kind": "a", "n": 2}, {"kind": "b"}, {"kind": "c"}))
    for first, second in ((a, b), (a, c), (b, c)):
        assert np.linalg.norm(first - second) == pytest.approx(1)
