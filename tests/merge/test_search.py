"""The search: where it converges, when it stops trials and itself, and that a killed one resumes exactly."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm, t

from posttrain.merge.search import Evaluate, SearchMethod, Variable, expected_improvement, search
from posttrain.merge.trials import Scores, mean_score, paired_difference
from posttrain.store.errors import UserError

METHODS: tuple[SearchMethod, ...] = ("coordinate", "bayesian", "evolutionary")

VARIABLES = [Variable("x", 0.0, 1.0, 0.9), Variable("y", -1.0, 3.0, 2.5)]


def quadratic(values: Mapping[str, float]) -> Iterator[Scores]:
    """A score with its highest value, 0, at x = 0.3 and y = 0.5."""
    yield [[-((values["x"] - 0.3) ** 2) - ((values["y"] - 0.5) / 4) ** 2]]


@pytest.mark.parametrize(("method", "trials", "distance"), [("coordinate", 80, 1 / 64), ("bayesian", 30, 0.06)])
def test_the_best_of_a_smooth_score_is_near_its_maximum(method: SearchMethod, trials: int, distance: float) -> None:
    result = search(quadratic, VARIABLES, [1], method=method, trials=trials, patience=100)
    values = result.best.values
    assert abs(values["x"] - 0.3) <= distance
    assert abs(values["y"] - 0.5) / 4 <= distance
    assert result.trials[0].values == {"x": 0.9, "y": 2.5}
    assert result.best.score == max(trial.score for trial in result.trials)


def test_differential_evolution_comes_near_the_maximum() -> None:
    result = search(quadratic, VARIABLES, [1], method="evolutionary", trials=90, patience=90)
    assert result.best.score > -0.005
    assert result.best.score > 50 * result.trials[0].score


def test_compass_search_polls_in_the_order_of_its_definition() -> None:
    result = search(quadratic, [Variable("x", 0.0, 1.0, 0.5), VARIABLES[1]], [1], method="coordinate", trials=6)
    # y starts at 2.5, a share of 0.875: up to the end of its range, and down by a quarter of it.
    points = [(trial.values["x"], trial.values["y"]) for trial in result.trials]
    assert points == [(0.5, 2.5), (0.75, 2.5), (0.25, 2.5), (0.25, 3.0), (0.25, 1.5), (0.5, 1.5)]


def test_compass_search_ends_when_its_step_is_small() -> None:
    result = search(quadratic, VARIABLES, [1], method="coordinate", trials=500, patience=500)
    assert result.end == "coordinate search has converged"
    assert len(result.trials) < 60


@pytest.mark.parametrize(("mean", "deviation", "best"), [(0.1, 0.5, 0.3), (-2.0, 0.7, 0.0), (1.0, 0.1, 0.2)])
def test_expected_improvement_is_the_integral_of_the_gain(mean: float, deviation: float, best: float) -> None:
    integral, _ = quad(lambda x: (x - best) * norm.pdf(x, mean, deviation), best, best + 20, points=[mean + 1])
    value = expected_improvement(np.array([mean]), np.array([deviation]), best)
    assert value[0] == pytest.approx(integral, rel=1e-6, abs=1e-9)


def test_expected_improvement_without_deviation_is_the_gain() -> None:
    assert expected_improvement(np.array([1.0, -1.0]), np.array([0.0, 0.0]), 0.5).tolist() == [0.5, 0.0]


class Killed(Exception):
    pass


def counted(function: Evaluate, calls: list[Mapping[str, float]], limit: int = 10**6) -> Evaluate:
    def evaluate(values: Mapping[str, float]) -> Iterator[Scores]:
        if len(calls) == limit:
            raise Killed
        calls.append(values)
        yield from function(values)

    return evaluate


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_search_goes_on_as_if_it_had_not_been(method: SearchMethod, tmp_path: Path) -> None:
    journal, calls = tmp_path / "search.jsonl", list[Mapping[str, float]]()
    whole = search(quadratic, VARIABLES, [1], method=method, trials=12, patience=12, seed=3)
    for limit in (0, 1, 7):
        with pytest.raises(Killed):
            search(
                *(counted(quadratic, calls, limit), VARIABLES, [1]),
                **{"method": method, "trials": 12, "patience": 12, "seed": 3, "journal": journal},
            )
        assert journal.exists() == (limit > 0), "a mistake before the first trial leaves nothing"
    with journal.open("ab") as file:
        file.write(b'{"checksum":"0123')  # a line that the kill cut off
    again = search(
        counted(quadratic, calls), VARIABLES, [1], method=method, trials=12, patience=12, seed=3, journal=journal
    )
    assert again == whole
    assert len(calls) == 12, "no trial is measured twice"
    last = search(counted(quadratic, calls), VARIABLES, [1], method=method, trials=12, seed=3, journal=journal)
    assert len(calls) == 12
    assert last.best == whole.best


def test_a_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "search.jsonl"
    search(quadratic, VARIABLES, [1], trials=2, journal=journal, settings={"suite": "a"})
    for changes in ({"settings": {"suite": "b"}}, {"seed": 1}, {"method": "coordinate"}):
        with pytest.raises(UserError, match="holds the trials of another search; remove it"):
            search(quadratic, VARIABLES, [1], **{"trials": 2, "journal": journal, "settings": {"suite": "a"}} | changes)
    content = journal.read_bytes()
    journal.write_bytes(content.replace(b'"number":0', b'"number":9'))
    with pytest.raises(UserError, match="line 2 is damaged"):
        search(quadratic, VARIABLES, [1], trials=2, journal=journal, settings={"suite": "a"})


def test_the_search_ends_without_gain_and_without_trials() -> None:
    flat = search(lambda values: iter([[[0.5]]]), VARIABLES, [1], method="bayesian", trials=100, patience=5)
    assert flat.end == "no higher score in 5 proposals"
    assert len(flat.trials) == 6
    assert flat.best is flat.trials[0], "the first of equal ones"
    assert search(quadratic, VARIABLES, [1], trials=1).end == "1 trials"
    with pytest.raises(UserError, match="no number to search"):
        search(quadratic, [], [1])


def parts_of(scores: Scores, count: int) -> Iterator[Scores]:
    for part in range(count):
        yield [suite[len(suite) * part // count : len(suite) * (part + 1) // count] for suite in scores]


def race(first: Scores, second: Scores, parts: int = 4) -> tuple[int, bool]:
    """Runs two trials and returns how many records of the second were read, and whether it was stopped."""
    read: list[int] = []

    def evaluate(values: Mapping[str, float]) -> Iterator[Scores]:
        scores = second if read else first
        read.append(0)
        for part in parts_of(scores, parts):
            read[-1] += sum(map(len, part))
            yield part

    sizes = [len(suite) for suite in first]
    result = search(evaluate, [Variable("x", 0, 1, 0)], sizes, method="coordinate", trials=2)
    return read[1], result.trials[1].stopped


def test_a_trial_that_cannot_win_is_read_in_part() -> None:
    generator = np.random.default_rng(0)
    good = [(generator.random(80) < 0.9).astype(float).tolist()]
    bad = [(generator.random(80) < 0.3).astype(float).tolist()]
    assert race(good, bad) == (20, True)
    assert race(bad, good) == (80, False)
    assert race(good, good) == (80, False), "no difference is no reason"
    # Fewer records than a variance needs are never enough.
    assert race([good[0][:24]], [[0.0] * 24])[0] > 12


def test_the_bound_is_the_papers_formula() -> None:
    best, own = [[1.0, 1, 0, 1, 1, 1, 0, 1], [0.5, 1, 1, 1]], [[0.0, 1, 0, 0], [0.5, 0]]
    mean, variance = paired_difference(own, best, [8, 4])
    first, second = np.array([-1.0, 0, 0, -1]), np.array([0.0, -1])
    assert mean == pytest.approx((first.mean() + second.mean()) / 2)
    # Two strata, each without replacement: Cochran, Sampling Techniques (1977), equations 2.20 and 5.14.
    of_first, of_second = first.var(ddof=1) / 4 * (1 - 4 / 8), second.var(ddof=1) / 2 * (1 - 2 / 4)
    assert variance == pytest.approx((of_first + of_second) / 4)
    assert paired_difference([[0.0, 1], []], best, [8, 4])[0] == -0.5, "of a suite not yet read nothing is known"
    assert mean_score([[1.0, 0.0], [1.0]]) == 0.75


def test_equal_trials_are_seldom_stopped() -> None:
    generator = np.random.default_rng(5)
    stopped = 0
    for _ in range(300):
        first, second = ([(generator.random(120) < 0.6).astype(float).tolist()] for _ in range(2))
        # Equal on the whole suite, in another order: the least favourable case of those that must not be stopped.
        second = [generator.permutation(first[0]).tolist()]
        stopped += race(first, second)[1]
    assert stopped / 300 < 0.05


def test_a_stopped_trial_is_judged_against_the_best() -> None:
    best, bad = [[1.0] * 10 + [0.0] * 30], [[0.0] * 40]
    result_parts = iter([best, bad])

    def evaluate(values: Mapping[str, float]) -> Iterator[Scores]:
        yield from parts_of(next(result_parts), 2)

    result = search(evaluate, [Variable("x", 0, 1, 0)], [40], method="coordinate", trials=2)
    trial = result.trials[1]
    differences = np.array([-1.0] * 10 + [0.0] * 10)
    bound = differences.mean() + t.ppf(0.95, 19) * (differences.var(ddof=1) / 20 * 0.5) ** 0.5
    assert trial.stopped
    assert bound < 0
    assert trial.score == pytest.approx(0.25 - 0.5)
    assert result.best.number == 0
