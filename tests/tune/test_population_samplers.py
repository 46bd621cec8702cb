"""Settings of a population: children are points of the space, perturbed as in the paper, or of PB2's process."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from posttrain.testing.samplers import SPACE as MIXED_SPACE
from posttrain.testing.samplers import MakeSampler, SamplerContract
from posttrain.tune import Choice, Float, Int, Space
from posttrain.tune.gaussian_process import GaussianProcess, encode
from posttrain.tune.samplers.base import Proposal, Sampler
from posttrain.tune.samplers.pb2 import Pb2Sampler, TimeVaryingKernel, improvements, likeliest_gp
from posttrain.tune.samplers.population import PerturbSampler, perturb
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.trial import Fork, Report, Trial


class TestPerturb(SamplerContract):
    @pytest.fixture
    def make(self) -> MakeSampler:
        return lambda space, seed, maximize: make_sampler("perturb", space, seed, maximize)


class TestPb2Sampler(SamplerContract):
    @pytest.fixture
    def make(self) -> MakeSampler:
        return lambda space, seed, maximize: make_sampler("pb2", space, seed, maximize)


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


@pytest.mark.parametrize("name", ["perturb", "pb2"])
@pytest.mark.parametrize("seed", range(3))
def test_children_are_points_of_the_space(name: str, seed: int) -> None:
    children = list(family(make_sampler(name, MIXED_SPACE, seed), MIXED_SPACE))
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


def test_the_gaussian_process_is_that_of_the_formulas() -> None:
    generator = np.random.default_rng(0)
    points, times = generator.random((9, 3)), np.array([0, 0, 0, 1, 1, 1, 2, 2, 2], np.float64)
    values, new = generator.normal(size=9), generator.random((4, 3))
    gp = GaussianProcess(np.column_stack([points, times]), TimeVaryingKernel(length=0.5, forgetting=0.1), noise=0.1)

    def kernel(x: np.ndarray, t: float, y: np.ndarray, s: float) -> float:
        return float(math.exp(-sum((x - y) ** 2) / (2 * 0.5**2)) * 0.9 ** (abs(t - s) / 2))

    matrix = np.array([[kernel(x, t, y, s) for y, s in zip(points, times)] for x, t in zip(points, times)])  # noqa: B905
    inverse = np.linalg.inv(matrix + 0.1 * np.eye(9))
    across = np.array([[kernel(x, t, y, 3.0) for y in new] for x, t in zip(points, times)])  # noqa: B905
    at = np.column_stack([new, np.full(4, 3.0)])
    np.testing.assert_allclose(gp.mean(values, at), across.T @ inverse @ values, rtol=1e-10)
    np.testing.assert_allclose(gp.deviation(at), np.sqrt(1 - np.diag(across.T @ inverse @ across)), rtol=1e-10)
    variance = values @ inverse @ values / 9
    assert gp.variance(values) == pytest.approx(variance, rel=1e-10)
    whole = variance * (matrix + 0.1 * np.eye(9))
    density = -0.5 * (values @ np.linalg.inv(whole) @ values + np.linalg.slogdet(2 * math.pi * whole)[1])
    assert gp.log_likelihood(values) == pytest.approx(density, rel=1e-10)


def test_the_likeliest_process_has_the_length_of_the_values() -> None:
    points = np.column_stack([np.linspace(0, 1, 30), np.zeros(30)])
    rough, smooth = (likeliest_gp(points, values) for values in (np.sin(15 * points[:, 0]), points[:, 0] - 0.5))
    assert isinstance(rough.kernel, TimeVaryingKernel)
    assert isinstance(smooth.kernel, TimeVaryingKernel)
    assert rough.kernel.length <= 0.2
    assert smooth.kernel.length >= 0.5


def test_improvements_over_the_intervals() -> None:
    def trial(number: int, reports: Sequence[float], fork: Fork | None = None) -> Trial:
        first = 1 + (fork.step if fork else 0)
        return Trial(number, {}, {}, reports=tuple(Report(first + at, x) for at, x in enumerate(reports)), fork=fork)

    trials = [trial(0, [5.0, 3.0]), trial(1, [4.0]), trial(2, [6.0]), trial(3, [2.0], Fork(1, 1, 2))]
    rows = [(trial.number, interval, round(value, 12)) for trial, interval, value in improvements(trials, [1, 2])]
    spread = math.sqrt(2 / 3)
    first = [(0, 0, 0.0), (1, 0, round(1 / spread, 12)), (2, 0, round(-1 / spread, 12))]
    assert rows == [*first, (0, 1, 0.0), (3, 1, 0.0)]
    greatest = [round(value, 12) for *_, value in improvements(trials, [1, 2], maximize=True)]
    assert greatest[:3] == [-value for *_, value in first]


def test_choices_are_equally_far_from_each_other() -> None:
    space = Space({"kind": Choice(["a", "b", "c"]), "n": Int(1, 3, when="kind == 'a'")})
    a, b, c = (encode(space, drawn) for drawn in ({"kind": "a", "n": 2}, {"kind": "b"}, {"kind": "c"}))
    for first, second in ((a, b), (a, c), (b, c)):
        assert np.linalg.norm(first - second) == pytest.approx(1)


def test_pb2_learns_where_improvements_are() -> None:
    """Improvements are greatest at x = 0.7: children come from there, and spread while several are chosen at a time."""
    space = Space({"x": Float(0, 1)})
    points = np.linspace(0.02, 0.98, 12)
    trials = []
    for number, x in enumerate(points):
        reports = tuple(Report(step, -step * (1 - (x - 0.7) ** 2)) for step in (1, 2))
        trials.append(Trial(number, {"x": x}, {"x": x}, reports=reports))
    sampler, fork = Pb2Sampler(space, 1), Fork(8, 2, 0)
    first = sampler.propose_child(12, trials, fork).drawn["x"]
    assert abs(first - 0.7) < 0.15
    child = Trial(12, {"x": first}, {"x": first}, fork=fork)
    assert sampler.propose_child(13, [*trials, child], fork).drawn["x"] != first
    # What a sibling has reported since changes nothing.
    later = Trial(12, {"x": first}, {"x": first}, reports=(Report(3, -9.0),), fork=fork)
    assert sampler.propose_child(13, [*trials, child], fork) == sampler.propose_child(13, [*trials, later], fork)
    # The greatest is searched by the least negative.
    negative = [
        Trial(t.number, t.settings, t.drawn, reports=tuple(Report(r.step, -r.value) for r in t.reports)) for t in trials
    ]
    assert Pb2Sampler(space, 1, maximize=True).propose_child(12, negative, fork).drawn["x"] == first
