"""Studies that start from earlier ones: which are near, and what is carried over."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.testing.samplers import SPACE, MakeSampler, SamplerContract, loss
from posttrain.tune import Choice, Float, Int, Space, TrialContext, minimize
from posttrain.tune.goal import Goal
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.transfer.past import PastStudy, distances, read_past
from posttrain.tune.transfer.warm_start import FirstPoints, carry_over, choose_warm_start, read_warm_start
from posttrain.tune.trial import Trial, TrialState

SQUARE = Space({"x": Float(0, 1), "y": Float(0, 1)})


def bowl(x: float, y: float) -> Callable[[TrialContext], float]:
    return lambda trial: float((trial["x"] - x) ** 2 + (trial["y"] - y) ** 2)


def past(
    name: str,
    function: Callable[[Any], float],
    count: int = 20,
    space: Space = SQUARE,
    seed: int = 0,
    features: dict[str, float] | None = None,
) -> PastStudy:
    """A study of random trials."""
    generator, trials = np.random.default_rng(seed), []
    for number in range(count):
        drawn = space.draw(generator)
        settings = space.complete(drawn)
        trials.append(Trial(number, settings, drawn, TrialState.FINISHED, value=function(settings), seconds=2.0))
    return PastStudy(name, Goal(space), features or {}, tuple(trials))


class TestFirstPoints(SamplerContract):
    trials = 8

    @pytest.fixture
    def make(self) -> MakeSampler:
        study = past("other", loss, 15, SPACE)
        points = [carry_over(trial.settings, SPACE) or {} for trial in study.ranked[:2]]
        return lambda space, seed, maximize: FirstPoints(make_sampler("random", space, seed, maximize), points, [study])


def test_distances_are_in_deviations_of_the_studies() -> None:
    task = {"size": 3.0, "length": 2.0}
    studies = [
        past("same", lambda _: 0.0, 1, features={"size": 3.0, "length": 2.0}),
        past("larger", lambda _: 0.0, 1, features={"size": 5.0}),
        past("unknown", lambda _: 0.0, 1),
    ]
    # Sizes 3 and 5 have a deviation of 1, more than the least scale.
    assert distances(task, studies) == [0.0, 2.0, None]


def test_the_nearest_studies_give_their_best_settings() -> None:
    goal, task = Goal(SQUARE), {"size": 3.0}
    near = past("near", lambda s: abs(s["x"] - 0.2), features={"size": 3.1}, seed=1)
    next_one = past("next", lambda s: abs(s["x"] - 0.8), features={"size": 3.4}, seed=2)
    far = past("far", lambda s: s["y"], features={"size": 9.0}, seed=3)
    start = choose_warm_start([far, next_one, near], goal, task)
    assert [study.name for study in start.sources] == ["near", "next"]
    assert [dict(point) for point in start.points] == [
        dict(trial.drawn) for trial in (near.ranked[0], next_one.ranked[0], near.ranked[1])
    ]
    assert start.sentences[0].startswith("starts from 3 settings of near (distance ")


def test_nothing_near_means_defaults_and_says_so() -> None:
    start = choose_warm_start([past("far", lambda _: 0.0, features={"size": 9.0})], Goal(SQUARE), {"size": 3.0})
    assert (start.sources, start.points) == ((), ())
    assert start.sentences == (
        "no earlier study is near: far is at 12, and near is up to 2",
        "starts from the defaults",
    )


def test_what_cannot_be_learned_from_is_left_out() -> None:
    other = Space({"z": Float(0, 1)})
    studies = [
        replace(
            past("accuracy", lambda _: 0.0), goal=Goal(SQUARE, Objectives((Objective("accuracy", maximize=True),)))
        ),
        past("other", lambda _: 0.0, space=other),
        replace(past("empty", lambda _: 0.0), trials=()),
    ]
    start = choose_warm_start(studies, Goal(SQUARE), {})
    assert start.sources == ()
    assert start.sentences == (
        "accuracy is left out: it searched the greatest accuracy",
        "other is left out: it shares no parameter",
        "empty is left out: none of its trials has a value",
        "starts from the defaults",
    )


def test_settings_of_another_space() -> None:
    space = Space(
        {
            "rate": Float(1e-4, 1e-2, log=True),
            "kind": Choice(["a", "b"]),
            "rank": Int(2, 8, when="kind == 'b'"),
            "new": Float(0, 10),
            "batch": Int(8, 32),
        },
        ["batch < 30"],
    )
    settings = {"rate": 1.0, "kind": "b", "rank": 4, "gone": 1, "batch": 16}
    assert carry_over(settings, space) == {"rate": 1e-2, "kind": "b", "rank": 4, "new": 5.0, "batch": 16}
    assert carry_over({**settings, "kind": "a"}, space, {"new": 2.0}) == {
        **{"rate": 1e-2, "kind": "a", "new": 2.0, "batch": 16},
    }
    assert carry_over({**settings, "kind": "c", "batch": True}, space, {"kind": "a"}) == {
        **{"rate": 1e-2, "kind": "a", "new": 5.0, "batch": 20},
    }
    assert carry_over({**settings, "batch": 99}, space) is None  # moved to 32, which the constraint excludes


def test_the_forest_suggests_where_ranks_are_best() -> None:
    studies = [past(f"study {at}", lambda s: (s["x"] - 0.7) ** 2, 30, seed=at) for at in range(3)]
    sampler = FirstPoints(make_sampler("random", SQUARE, 1), [], studies)
    drawn = [proposal.drawn for seed in range(2) if (proposal := sampler.propose(seed, []))]
    assert all(abs(point["x"] - 0.7) < 0.15 for point in drawn)


@pytest.mark.slow
def test_a_study_is_kept_with_its_task_and_found_again(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"sampler": "random", "features": {"size": 3.0}}
    minimize(bowl(0.3, 0.6), SQUARE, budget=12, out=tmp_path / "first", **arguments)
    (study,) = read_past(tmp_path, Path())
    assert (study.name, study.features, len(study.trials)) == ("first", {"size": 3.0}, 12)
    best = study.ranked[0]
    result = minimize(bowl(0.3, 0.6), SQUARE, budget=10, out=tmp_path / "next", warm_start=tmp_path, **arguments)
    assert dict(result.trials[0].settings) == dict(best.settings)
    kept = json.loads((tmp_path / "next" / "warm_start.json").read_text())
    assert kept["sentences"] == ["starts from 3 settings of first (distance 0, 12 trials)"]
    # A larger budget continues with the same, though there are more studies now.
    minimize(bowl(0.1, 0.1), SQUARE, budget=12, out=tmp_path / "third", **arguments)
    more = minimize(bowl(0.3, 0.6), SQUARE, budget=12, out=tmp_path / "next", warm_start=tmp_path, **arguments)
    assert more.trials[:10] == result.trials
    assert json.loads((tmp_path / "next" / "warm_start.json").read_text()) == kept


@pytest.mark.slow
def test_a_study_of_several_objectives_is_left_out(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> tuple[float, float, float]:
        trial.report(1, (1.0, 2.0, 3.0))
        return trial["x"], trial["y"], 1.0

    folder, objectives = tmp_path / "several", ["value", Objective("size", maximize=True), "third"]
    first = minimize(function, SQUARE, budget=3, sampler="random", out=folder, objectives=objectives)
    (study,) = read_past(tmp_path, Path())
    assert [trial.values for trial in study.trials] == [trial.values for trial in first.trials]
    assert [trial.reports[0].values for trial in study.trials] == [(1.0, 2.0, 3.0)] * 3
    assert study.goal.objectives.directions == (False, True, False)
    minimize(bowl(0.3, 0.6), SQUARE, budget=2, sampler="random", out=tmp_path / "next", warm_start=tmp_path)
    assert read_warm_start(tmp_path / "next" / "warm_start.json").sentences == (
        "several is left out: it searched 3 objectives at once",
        "starts from the defaults",
    )


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for value, message in (("missing", "no such folder: missing"), (["empty"], "empty holds no study")):
        with pytest.raises(UserError, match=message):
            read_past(value, tmp_path)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "task.json").write_text("{")
    with pytest.raises(UserError, match="is not a study that can be read"):
        read_past("damaged", tmp_path)


def test_the_sentence_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    minimize(bowl(0.3, 0.6), SQUARE, budget=6, sampler="random", out=tmp_path / "first")
    with caplog.at_level(logging.INFO, "posttrain"):
        minimize(bowl(0.3, 0.6), SQUARE, budget=2, sampler="random", warm_start=[tmp_path / "first"])
    assert "starts from 3 settings of first (not comparable, 6 trials)" in caplog.text


@pytest.mark.slow
def test_a_study_that_has_just_begun_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    space = {"x": Float(0, 1)}
    minimize(lambda trial: trial["x"], space, budget=3, out=tmp_path / "one")

    def function(trial: TrialContext) -> float:
        if trial.number == 0:  # of the other study, which runs its first trial
            with caplog.at_level("INFO", "posttrain"):
                minimize(lambda inner: inner["x"], space, budget=2, warm_start=str(tmp_path), out=tmp_path / "three")
        return 1.0

    minimize(function, space, budget=1, out=tmp_path / "two")
    assert any("two is left out: none of its trials has a value" in message for message in caplog.messages)
    assert any("starts from 3 settings of one" in message for message in caplog.messages)


def test_the_first_study_of_a_series_has_none_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    series = tmp_path / "series"
    for number in range(2):
        with caplog.at_level("INFO", "posttrain"):
            minimize(bowl(0.3, 0.3), SQUARE, budget=3, out=series / str(number), warm_start=str(series))
    assert any("starts from 3 settings of 0" in message for message in caplog.messages)
    # One of many that is damaged is left out; one that is named is not.
    (series / "1" / "trials.jsonl").write_text("{")
    caplog.clear()
    with caplog.at_level("WARNING", "posttrain"):
        minimize(bowl(0.3, 0.3), SQUARE, budget=1, out=tmp_path / "another", warm_start=str(series))
    assert any("left out: " in message and "is not a study that can be read" in message for message in caplog.messages)
    with pytest.raises(UserError, match="is not a study that can be read"):
        minimize(bowl(0.3, 0.3), SQUARE, budget=1, out=tmp_path / "third", warm_start=str(series / "1"))
