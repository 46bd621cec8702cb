"""Every sampler passes the contract and finds the least value; grids and sequences are what they say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.testing.samplers import SPACE, MakeSampler, SamplerContract
from posttrain.tune.parameters import Choice, Float, Int
from posttrain.tune.samplers.base import Sampler
from posttrain.tune.samplers.initial import InitialPoints, read_points
from posttrain.tune.samplers.registry import SAMPLERS, make_sampler
from posttrain.tune.space import Space
from posttrain.tune.trial import Fork, Trial, TrialState


class NamedSamplerContract(SamplerContract):
    name: Any = ""

    @pytest.fixture
    def make(self) -> MakeSampler:
        return lambda space, seed, maximize: make_sampler(self.name, space, seed, maximize)


class TestRandom(NamedSamplerContract):
    name = "random"


class TestQuasiRandom(NamedSamplerContract):
    name = "quasi_random"


class TestGrid(NamedSamplerContract):
    name = "grid"
    trials = 200


class TestTpe(NamedSamplerContract):
    name = "tpe"


@pytest.mark.slow
class TestGaussianProcess(NamedSamplerContract):
    name: Any = {"name": "gp", "startup": 4}  # noqa: RUF012
    trials = 7


class TestNsga2(NamedSamplerContract):
    name: Any = {"name": "nsga2", "population": 6}  # noqa: RUF012


@pytest.mark.parametrize("name", ["random", "quasi_random", "tpe", {"name": "nsga2", "population": 6}])
class TestSeveralObjectives(SamplerContract):
    objectives = 2

    @pytest.fixture
    def make(self, name: Any) -> MakeSampler:
        return lambda space, seed, maximize: make_sampler(name, space, seed, (maximize, maximize))


@pytest.mark.slow
class TestGaussianProcessOfSeveralObjectives(SamplerContract):
    objectives, trials = 2, 7

    @pytest.fixture
    def make(self) -> MakeSampler:
        options = {"name": "gp", "startup": 4}
        return lambda space, seed, maximize: make_sampler(options, space, seed, (maximize, maximize))


class TestStaged(NamedSamplerContract):
    name: Any = {"name": "staged", "coarse": 6, "refined": 4}  # noqa: RUF012


INITIAL = [
    {"rate": 1e-4, "method": "full", "batch": 8, "accumulation": 2},
    {"rate": 1e-5, "method": "lora", "rank": 8, "alpha": 16, "batch": 16, "accumulation": 1, "epochs": 3},
]


@pytest.mark.parametrize("name", ["random", "quasi_random", "grid", "tpe", "nsga2"])
class TestInitialPoints(SamplerContract):
    @pytest.fixture
    def make(self, name: str) -> MakeSampler:
        return lambda space, seed, maximize: InitialPoints(
            make_sampler(name, space, seed, maximize), read_points(INITIAL if space is SPACE else [], space)
        )


LINE = Space({"x": Float(-5, 5)})

PLANE = Space({"x": Float(-5, 5), "y": Float(1e-4, 1, log=True)})


def search(sampler: Sampler, count: int, maximize: bool = False) -> list[Trial]:
    trials: list[Trial] = []
    for number in range(count):
        proposal = sampler.propose(number, trials)
        if proposal is None:
            break
        drawn = proposal.drawn
        value = (drawn["x"] - 2) ** 2 + (np.log10(drawn["y"]) + 1) ** 2
        state = TrialState.FINISHED
        trials.append(Trial(number, drawn, drawn, state, value=-value if maximize else value, notes=proposal.notes))
    return trials


def least(trials: Sequence[Trial]) -> float:
    return min(trial.value for trial in trials if trial.value is not None)


def median_least(name: Any, count: int, seeds: int = 5) -> float:
    return float(np.median([least(search(make_sampler(name, PLANE, seed), count)) for seed in range(seeds)]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("tpe", 50), ({"name": "nsga2", "population": 10}, 100), ("staged", 50)])
def test_samplers_that_learn_beat_random(name: str, count: int) -> None:
    assert median_least(name, count) < 0.5 * median_least("random", count, 15)


@pytest.mark.slow
def test_the_gaussian_process_comes_close_to_the_least_value() -> None:
    assert median_least("gp", 18, 3) < 0.01


def test_tpe_keeps_workers_apart() -> None:
    """Seven workers ask at once; if the sampler does not see what runs, more of their points lie close together."""
    near = {True: 0, False: 0}
    for seed in range(4):
        sampler, trials = make_sampler("tpe", LINE, seed), search(make_sampler("random", PLANE, seed), 25)
        trials = [replace(trial, drawn={"x": trial.drawn["x"]}, settings={"x": trial.drawn["x"]}) for trial in trials]
        for known in near:
            running: list[Trial] = []
            for number in range(25, 32):
                proposal = sampler.propose(number, [*trials, *running] if known else trials)
                assert proposal is not None
                running.append(Trial(number, proposal.drawn, proposal.drawn, notes=proposal.notes))
            points = np.sort([trial.drawn["x"] for trial in running])
            near[known] += int((np.diff(points) < 0.1).sum())
    assert near[True] < 0.6 * near[False], near


def test_a_grid_tries_each_point_once() -> None:
    space = Space({"a": Choice(["u", "v"]), "b": Int(1, 3, when="a == 'v'"), "c": Float(0, 1)}, ["c < 1 or a == 'u'"])
    sampler = make_sampler({"name": "grid", "points": 2}, space)
    trials: list[Trial] = []
    while (proposal := sampler.propose(len(trials), trials)) is not None:
        trials.append(Trial(len(trials), {}, proposal.drawn, notes=proposal.notes))
    assert [dict(trial.drawn) for trial in trials] == [
        {"a": "u", "c": 0.0},
        {"a": "u", "c": 1.0},
        {"a": "v", "c": 0.0, "b": 1},
        {"a": "v", "c": 0.0, "b": 3},
    ]


def test_a_staged_search_narrows_the_ranges_to_those_of_the_best_points() -> None:
    # On the grid x is -5, 0, 5 and y 1e-4, 1e-2, 1. Of the nine points (0, 1e-2) and (0, 1) are the best, and one with
    # x = 5 follows.
    options = {"name": "staged", "coarse": 9, "refined": 4}
    trials = search(make_sampler(options, PLANE, 1), 20)
    assert [trial.notes["stage"] for trial in trials] == ["coarse"] * 9 + ["refined"] * 4 + ["model"] * 7
    assert len({(trial.drawn["x"], trial.drawn["y"]) for trial in trials[:9]}) == 9
    # Half of the distance of two points beyond, within the range: from -2.5, and from 1e-3.
    assert trials[9].notes["ranges"]["x"] == pytest.approx([-2.5, 5])
    assert trials[9].notes["ranges"]["y"] == pytest.approx([1e-3, 1])
    for trial in trials[9:]:
        assert trial.drawn["x"] >= -2.5
        assert trial.drawn["y"] >= 0.999e-3


def test_a_staged_search_leaves_ranges_that_its_constraints_need() -> None:
    # The best coarse points lie at small x, where `y` never exists.
    space = Space({"x": Float(0, 1), "y": Float(0, 1, when="x > 0.9")})
    sampler = make_sampler({"name": "staged", "coarse": 3, "refined": 2}, space)
    trials: list[Trial] = []
    for number in range(12):
        proposal = sampler.propose(number, trials)
        assert proposal is not None
        state, value = TrialState.FINISHED, proposal.drawn["x"]
        trials.append(Trial(number, proposal.drawn, proposal.drawn, state, value=value, notes=proposal.notes))
        assert trials[-1].settings in space


def test_quasi_random_points_are_a_sobol_sequence() -> None:
    from scipy.stats import qmc

    sampler, trials = make_sampler("quasi_random", PLANE, 4), list[Trial]()
    for number in range(100):
        proposal = sampler.propose(number, trials)
        assert proposal is not None
        trials.append(Trial(number, proposal.drawn, proposal.drawn, notes=proposal.notes))
    points = np.array([PLANE.to_unit(trial.drawn) for trial in trials])
    np.testing.assert_allclose(points, qmc.Sobol(2, rng=np.random.default_rng(4)).random_base2(7)[:100], atol=1e-12)
    # More even than random points: each quarter of a power of two of them holds the same number.
    quarters = np.floor(points[:64] * 2).astype(int) @ [1, 2]
    assert np.bincount(quarters).tolist() == [16, 16, 16, 16]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("tpee", "there is no sampler `tpee`; did you mean `tpe`?"),
        ({"name": "grid", "pionts": 3}, "sampler: unknown key `pionts`; did you mean `points`?"),
        ({"name": "grid", "points": 0}, "sampler: `points`: Input should be greater than or equal to 1"),
        ({"name": "nsga2", "population": 1}, "sampler: `population`: Input should be greater than or equal to 2"),
        ({"name": "nsga2", "crossover": "sbx"}, "sampler: unknown key `crossover`"),
        ({"name": "gp", "acquisition": 3}, "sampler: `acquisition`: Input should be 'ei', 'pi' or 'ucb'"),
        ({"name": "grid", "points": 2.5}, "`points`: Input should be a valid integer"),
        ("cmaes", "there is no sampler `cmaes`"),
        (7, "names no sampler"),
    ],
)
def test_mistakes_are_named(value: object, problem: str) -> None:
    with pytest.raises(UserError, match="sampler") as error:
        make_sampler(value, PLANE)
    assert problem in str(error.value)


def test_all_samplers_are_named() -> None:
    assert set(SAMPLERS.builtin) == {"random", "quasi_random", "grid", "tpe", "gp", "nsga2", "staged", "perturb"}


@pytest.mark.parametrize("name", ["grid", "quasi_random", "random"])
def test_points_come_first_and_the_sampler_skips_nothing(name: str) -> None:
    points = read_points([{"x": 1.5, "y": 0.5}, {"x": -1, "y": 0.25}, {"x": 1.5, "y": 0.5}], PLANE)
    assert points == [{"x": 1.5, "y": 0.5}, {"x": -1, "y": 0.25}]
    trials = search(InitialPoints(make_sampler(name, PLANE, 3), points), 11)
    assert [trial.drawn for trial in trials[:2]] == points
    alone = [trial.drawn for trial in search(make_sampler(name, PLANE, 3), 11)]
    # A random trial depends on its own number; a grid and a sequence continue from their own last point.
    assert [trial.drawn for trial in trials[2:]] == (alone[2:] if name == "random" else alone[:9])


def test_a_population_may_begin_with_points_and_has_children_as_without() -> None:
    points, fork = read_points([{"x": 1.5, "y": 0.5}], PLANE), Fork(parent=0, step=1, replaces=1)
    sampler = make_sampler("perturb", PLANE, 3)
    trials = search(InitialPoints(sampler, points), 4)
    assert trials[0].drawn == points[0]
    child = InitialPoints(sampler, points).propose_child(4, trials, fork)
    assert child == make_sampler("perturb", PLANE, 3).propose_child(4, trials, fork)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "point",
    [
        {"rate": 1.0, "method": "full", "batch": 8, "accumulation": 2},
        {"rate": "high", "method": "full", "batch": 8, "accumulation": 2},
        {"rate": 1e-4, "method": "lora", "batch": 8, "accumulation": 2},
        {"rate": 1e-4, "method": "full", "batch": 32, "accumulation": 8},
        {"rate": 1e-4, "method": "lora", "rank": "four", "batch": 8, "accumulation": 2},
        {**INITIAL[1], "alpha": 15},
        {**INITIAL[0], "rank": 8},
        {**INITIAL[0], "wramup": 0.1},
    ],
)
def test_a_point_outside_the_space_is_refused(point: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not a point of the space"):
        read_points([point], SPACE)


def test_a_staged_search_lists_no_large_grid() -> None:
    space = Space({f"x{index}": Float(0, 1) for index in range(30)})
    trials = [make_sampler({"name": "staged", "coarse": 5}, space, 1).propose(0, [])]
    assert trials[0] is not None
    assert set(trials[0].drawn.values()) <= {0.0, 0.5, 1.0}


def test_a_large_grid_is_not_listed_either() -> None:
    space = Space({f"x{index}": Float(0, 1) for index in range(30)})
    proposal = make_sampler("grid", space).propose(0, [])
    assert proposal is not None
    assert set(proposal.drawn.values()) == {0.0}


def test_a_grid_without_a_point_is_named() -> None:
    space = Space({"a": Float(0, 1), "b": Float(0, 1)}, ["a > 0.6 and a < 0.9"])
    with pytest.raises(UserError, match="no point of the grid meets the constraints"):
        make_sampler("grid", space).propose(0, [])
