"""The sampler `gp` with each acquisition: with failures, with trials that run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.tune.losses import newest_and_best, standardize, to_normal
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.samplers import gaussian
from posttrain.tune.samplers.gaussian import GaussianProcessSampler
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Trial, TrialState

LINE = Space({"x": Float(0, 1)})


def trial(number: int, x: float, value: float | None, **values: Any) -> Trial:
    state = TrialState.FAILED if value is None else TrialState.FINISHED
    return Trial(number, {"x": x}, {"x": x}, state, value=value, **values)


def search(acquisition: str, loss: Callable[[float], float | None], count: int, seed: int) -> list[Trial]:
    sampler = GaussianProcessSampler(LINE, seed, startup=4, acquisition=acquisition)
    trials: list[Trial] = []
    for number in range(count):
        proposal = sampler.propose(number, trials)
        x = proposal.drawn["x"]
        trials.append(trial(number, x, loss(x), seconds=1.0, notes=proposal.notes))
    return trials


@pytest.mark.slow
@pytest.mark.parametrize("acquisition", ["ei", "pi", "ucb"])
def test_every_acquisition_finds_the_least_value(acquisition: str) -> None:
    trials = search(acquisition, lambda x: (x - 0.3) ** 2, 12, seed=0)
    assert min(abs(entry.drawn["x"] - 0.3) for entry in trials) < 0.02


@pytest.mark.parametrize("acquisition", get_args(gaussian.Acquisition))
def test_failures_push_the_search_away(acquisition: str) -> None:
    """The loss falls towards 1, but trials above 0.6 fail; were they killed, nothing would keep the search away."""
    trials = [trial(at, x, None if x > 0.6 else 1 - x, seconds=1.0) for at, x in enumerate(np.linspace(0, 1, 11))]

    def points(trials: list[Trial]) -> list[float]:
        samplers = [GaussianProcessSampler(LINE, seed, startup=4, acquisition=acquisition) for seed in range(3)]
        return [sampler.propose(11, trials).drawn["x"] for sampler in samplers]

    assert max(points(trials)) < 0.7
    killed = [replace(entry, lost=entry.value is None) for entry in trials]
    assert min(points(killed)) > 0.8 or acquisition == "pi"  # which stays near the best


@pytest.mark.slow
@pytest.mark.parametrize("acquisition", ["ei", "ucb"])
def test_a_search_beside_settings_that_fail(acquisition: str) -> None:
    """Beyond 0.5 all trials fail, and the least value would lie there: of three searches two leave it."""
    runs = [search(acquisition, lambda x: None if x > 0.5 else (x - 0.7) ** 2, 20, seed) for seed in range(3)]
    shares = [np.mean([entry.value is None for entry in trials[-8:]]) for trials in runs]
    assert np.sum(np.array(shares) <= 0.5) >= 2, shares
    assert all(min(abs(entry.drawn["x"] - 0.5) for entry in trials if entry.value) < 0.02 for trials in runs)


def test_what_runs_is_not_proposed_again() -> None:
    trials = [trial(at, x, (x - 0.5) ** 2) for at, x in enumerate([0.0, 0.2, 0.8, 1.0])]
    first = GaussianProcessSampler(LINE, 1, startup=4, acquisition="ucb").propose(4, trials).drawn["x"]
    running = replace(trial(4, first, None), state=TrialState.RUNNING)
    second = GaussianProcessSampler(LINE, 1, startup=4, acquisition="ucb").propose(5, [*trials, running]).drawn["x"]
    assert abs(first - second) > 1e-3


def test_a_grid_is_searched_without_a_point_twice() -> None:
    space = Space({"x": Int(0, 3), "kind": Choice(["a", "b"])})
    sampler, trials = GaussianProcessSampler(space, 2, startup=3), list[Trial]()
    for number in range(10):
        proposal = sampler.propose(number, trials)
        drawn = proposal.drawn
        value = float(drawn["x"]) + (drawn["kind"] == "a")
        trials.append(Trial(number, drawn, drawn, TrialState.FINISHED, value=value, notes=proposal.notes))
    points = [tuple(entry.drawn.items()) for entry in trials]
    assert len(set(points[:8])) == 8  # all that there are; then some come again
    assert set(points[8:]) <= set(points[:8])


def test_diverged_trainings_do_not_hide_differences() -> None:
    values = standardize([0.1, 0.2, 0.3, 0.4, 0.5, 1e9])
    assert values.max() < 3
    assert len(set(values[:5])) == 5


def test_losses_become_normal_in_the_same_order() -> None:
    """The power is the likeliest of a dense grid, by the definition of Yeo and Johnson."""
    generator = np.random.default_rng(3)
    values = standardize(generator.gamma(3.0, size=40).tolist())

    def transform(power: float) -> np.ndarray:
        up, down = np.maximum(values, 0), np.maximum(-values, 0)
        return ((up + 1) ** power - 1) / power - ((down + 1) ** (2 - power) - 1) / (2 - power)

    def likelihood(power: float) -> float:
        jacobian = (power - 1) * (np.sign(values) * np.log1p(np.abs(values))).sum()
        return float(jacobian - len(values) / 2 * np.log(transform(power).var()))

    expected = transform(max(np.arange(0.0005, 2, 0.001), key=likelihood))
    result = to_normal(values)
    np.testing.assert_allclose(result, (expected - expected.mean()) / expected.std(), atol=1e-3)
    assert np.array_equal(np.argsort(result), np.argsort(values))


@pytest.mark.parametrize("losses", [[0.0] * 9, [1.0, 2.0, 3.0], [0.0] * 8 + [1e-12], [*range(20), 1e300]])
def test_odd_losses_stay_finite_and_in_order(losses: list[float]) -> None:
    result = to_normal(standardize(losses))
    assert np.isfinite(result).all()
    assert (np.diff(result) >= 0).all()


@pytest.mark.slow
def test_once_the_best_stalls_the_search_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The basin at 0.2 has been searched to its floor; that at 0.85, hardly worse, has not."""
    points = [*np.linspace(0, 1, 11), *(0.2 + 0.001 * (at - 6) for at in range(13))]
    trials = [trial(at, x, min((x - 0.2) ** 2, 0.01 + (x - 0.85) ** 2)) for at, x in enumerate(points)]

    def share_elsewhere() -> float:
        samplers = [GaussianProcessSampler(LINE, seed, startup=4) for seed in range(10)]
        return float(np.mean([sampler.propose(24, trials).drawn["x"] > 0.5 for sampler in samplers]))

    assert share_elsewhere() > 0.5
    monkeypatch.setattr(gaussian, "_STALLED", 24)
    assert share_elsewhere() == 0


def test_of_many_trials_the_best_and_the_newest_are_kept() -> None:
    numbers = newest_and_best({number: float(number) for number in range(1000)})
    assert numbers == [*range(100), *range(900, 1000)]


@pytest.mark.slow
def test_choices_are_searched() -> None:
    space = Space({"kind": Choice(["a", "b", "c"]), "x": Float(0, 1)})
    sampler, trials = GaussianProcessSampler(space, 3, startup=5), list[Trial]()
    for number in range(14):
        drawn = sampler.propose(number, trials).drawn
        value = (drawn["x"] - 0.6) ** 2 + (drawn["kind"] != "b")
        trials.append(Trial(number, drawn, drawn, TrialState.FINISHED, value=value))
    assert min(entry.value or 0.0 for entry in trials) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acquisition": "ie"}, "`acquisition`: Input should be 'ei', 'pi' or 'ucb'"),
        ({"startup": "many"}, "`startup`: a number is expected, not `many`"),
        ({"startup": 0}, "`startup`: Input should be greater than or equal to 1"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_sampler({"name": "gp", **options}, LINE)


@pytest.mark.slow
def test_a_choice_that_looked_poor_is_tried_again_once_the_best_stalls() -> None:
    """One poor value of `b` is all that the process has seen of it; the best of `a` is at its optimum."""
    space = Space({"kind": ["a", "b"], "a": Float(0, 1, when="kind == 'a'"), "b": Float(0, 1, when="kind == 'b'")})

    def proposed_kinds(count: int) -> list[str]:
        settings = [{"kind": "b", "b": 0.0}, *({"kind": "a", "a": 0.4 + 0.01 * (at % 3)} for at in range(count))]
        values = [5.0, *(0.001 * (at % 3) for at in range(count))]
        trials = [Trial(at, row, row, TrialState.FINISHED, value=values[at]) for at, row in enumerate(settings)]
        samplers = [GaussianProcessSampler(space, seed, startup=4) for seed in range(20, 30)]
        return [sampler.propose(len(trials), trials).drawn["kind"] for sampler in samplers]

    assert "b" not in proposed_kinds(8)
    assert "b" in proposed_kinds(16)
