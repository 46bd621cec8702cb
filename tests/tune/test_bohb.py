"""BOHB's model: its kernels are densities, its split follows the paper, and it learns from the greatest step."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import dblquad, quad
from scipy.stats import truncnorm

from posttrain.store.errors import UserError
from posttrain.testing.samplers import MakeSampler, SamplerContract
from posttrain.tune.parameters import Choice, Float
from posttrain.tune.samplers.bohb import BohbSampler, kernel_bandwidths, log_density
from posttrain.tune.space import Space
from posttrain.tune.trial import Report, Trial, TrialState


class TestBohb(SamplerContract):
    @pytest.fixture
    def make(self) -> MakeSampler:
        return BohbSampler


PLANE = Space({"x": Float(0, 1), "y": Float(0, 1)})

NUMBERS = np.zeros(2, dtype=int)


def test_the_density_of_numbers_integrates_to_one() -> None:
    points = np.array([[0.02, 0.5], [0.3, 0.9], [0.6, 0.99]])
    bandwidths = kernel_bandwidths(points, NUMBERS)
    total, _ = dblquad(
        lambda y, x: math.exp(log_density(np.array([[x, y]]), points, bandwidths, NUMBERS)[0]), 0, 1, 0, 1, epsabs=1e-6
    )
    assert total == pytest.approx(1, abs=1e-4)


def test_the_density_of_numbers_and_a_choice() -> None:
    kinds = np.array([0, 3])
    points = np.array([[0.2, 0.5 / 3], [0.5, 1.5 / 3], [0.9, 0.5 / 3], [0.4, 0.5 / 3]])
    bandwidths = kernel_bandwidths(points, kinds)
    # 1.06 σ n^(-1 / (4 + d)), where a choice counts by its index.
    np.testing.assert_allclose(
        bandwidths, [1.06 * points[:, 0].std() * 4 ** (-1 / 6), min(2 / 3, 1.06 * np.std([0, 1, 0, 0]) * 4 ** (-1 / 6))]
    )

    def density(x: float, index: int) -> float:
        share = bandwidths[1]
        total = 0.0
        for value, choice in zip(points[:, 0], [0, 1, 0, 0], strict=True):
            width = bandwidths[0]
            kernel = truncnorm(-value / width, (1 - value) / width, loc=value, scale=width).pdf(x)
            total += kernel * (1 - share if choice == index else share / 2)
        return total / 4

    for x, index in ((0.1, 0), (0.7, 1), (0.95, 2)):
        ours = math.exp(log_density(np.array([[x, (index + 0.5) / 3]]), points, bandwidths, kinds)[0])
        assert ours == pytest.approx(density(x, index))
    assert sum(quad(density, 0, 1, args=(index,))[0] for index in range(3)) == pytest.approx(1)


def trial(number: int, x: float, y: float, values: list[float], state: TrialState = TrialState.PAUSED) -> Trial:
    reports = tuple(Report(step, value) for step, value in enumerate(values, 1))
    return Trial(number, {"x": x, "y": y}, {"x": x, "y": y}, state, reports=reports)


def test_the_greatest_step_with_enough_trials_counts() -> None:
    # d = 2: a model takes 5 trials. Ten have reached step 1, five step 2, four step 3.
    trials = [
        trial(number, number / 10, 0.5, [float(number)] + [-float(number)] * (number >= 5)) for number in range(10)
    ]
    trials[9] = trial(9, 0.9, 0.5, [9.0, -9.0, 0.0])
    trials += [trial(number, 0.5, 0.5, [], TrialState.FAILED) for number in (10, 11)]
    sampler = BohbSampler(PLANE)
    sampler._update(trials)
    # max(3, 0.15 * 5) good ones, and max(3, 5 - 3) bad ones: at step 2 the last trials are the best.
    assert sampler._split() == ([9, 8, 7], [7, 6, 5, 10, 11])
    # A trial that fails leaves its step, which then has too few.
    trials[5] = trial(5, 0.5, 0.5, [5.0, -5.0], TrialState.FAILED)
    sampler._update(trials)
    assert sampler._split() == ([0, 1, 2], [3, 4, 6, 7, 8, 9, 5, 10, 11])


def test_too_few_trials_are_no_model() -> None:
    sampler = BohbSampler(PLANE)
    sampler._update([trial(number, 0.5, 0.5, [1.0]) for number in range(4)])
    assert sampler._split() is None


def search(space: Space, loss: Callable[[dict[str, float]], float], count: int, seed: int, **options: float) -> float:
    sampler, trials = BohbSampler(space, seed, **options), list[Trial]()  # type: ignore[arg-type]
    for number in range(count):
        drawn = dict(sampler.propose(number, trials).drawn)
        trials.append(Trial(number, drawn, drawn, TrialState.FINISHED, value=loss(drawn)))
    return min(trial.value for trial in trials if trial.value is not None)


def test_the_model_beats_random_points() -> None:
    space = Space({"x": Float(-5, 5), "y": Float(1e-4, 1, log=True), "c": Choice(["a", "b", "c"])})

    def loss(drawn: dict[str, float]) -> float:
        return (drawn["x"] - 2) ** 2 + (math.log10(drawn["y"]) + 1) ** 2 + 2 * (drawn["c"] != "b")

    model = [search(space, loss, 60, seed) for seed in range(8)]
    chance = [search(space, loss, 60, seed, random=1.0) for seed in range(8)]
    assert np.median(model) < 0.5 * np.median(chance)


@pytest.mark.parametrize("options", [{"share": 0.0}, {"candidates": 0}, {"random": 2.0}, {"width": 0.0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"sampler.{next(iter(options))}: .* is out of range"):
        BohbSampler(PLANE, **options)  # type: ignore[arg-type]
