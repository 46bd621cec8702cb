"""Studies of several objectives: the same promises as with one, a front, and costs that the study measures itself."""

import io
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml
from optuna._hypervolume import compute_hypervolume

from posttrain.store.errors import UserError, WorkError
from posttrain.tune import Choice, Float, Int, Objective, Space, TrialContext, minimize
from posttrain.tune.api import optimize
from posttrain.tune.goal import Goal
from posttrain.tune.objectives import read_objectives
from posttrain.tune.runs import CurvePoint, replay
from posttrain.tune.samplers.registry import make_sampler
from posttrain.tune.study import read_study_events
from posttrain.tune.trial import Trial, TrialState

SPACE = {"x": Float(0, 1), "depth": Int(1, 8), "kind": Choice(["a", "b"])}
OBJECTIVES = ["loss", {"metric": "accuracy", "maximize": True}]


def values(settings: Mapping[str, Any], step: int) -> dict[str, float]:
    return {
        "loss": (settings["x"] - 0.3) ** 2 + settings["depth"] / 10 + 1 / step,
        "accuracy": 1 - abs(settings["x"] - 0.8) - 0.01 * (settings["kind"] == "a") - 0.1 / step,
    }


def anytime(trial: TrialContext) -> None:
    path = trial.folder / "step"
    step = int(path.read_text()) if path.exists() else 0
    if step:
        trial.report(step, values(trial.settings, step))
    while step < 9:
        step += 1
        path.write_text(str(step))
        trial.report(step, values(trial.settings, step), tokens=10 * trial["depth"])


def comparable(trials: Any) -> list[Any]:
    return [
        (trial.settings, trial.state, trial.values, [(report.step, report.values) for report in trial.reports])
        for trial in trials
    ]


def brute_front(trials: Any, signs: tuple[int, ...]) -> list[int]:
    finished = [trial for trial in trials if trial.state is TrialState.FINISHED]
    losses = {trial.number: np.array(trial.values) * signs for trial in finished}
    return [
        number
        for number, loss in losses.items()
        if not any((other <= loss).all() and (other < loss).any() for other in losses.values())
    ]


@pytest.mark.slow
def test_the_front_its_files_and_optunas_study(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> tuple[float, float]:
        loss, accuracy = values(trial.settings, 9).values()
        return loss, accuracy

    result = minimize(function, SPACE, budget="40 trials", objectives=OBJECTIVES, seed=3, out=tmp_path)
    assert [trial.number for trial in result.front] == brute_front(result.trials, (1, -1))
    assert 2 <= len(result.front) < 40
    assert result.best in result.front
    assert result.values == result.best.values  # type: ignore[union-attr]
    assert result.value == result.values[0]
    # Optuna has the same front.
    (stored,) = optuna.get_all_study_summaries(f"sqlite:///{tmp_path}/study.db")
    study = optuna.load_study(study_name=stored.study_name, storage=f"sqlite:///{tmp_path}/study.db")
    assert sorted(trial.number for trial in study.best_trials) == [trial.number for trial in result.front]
    assert study.metric_names == ["loss", "accuracy"]
    # The chosen settings, and those of the others.
    text = (tmp_path / "best.yaml").read_text()
    assert yaml.safe_load(text) == result.settings
    assert text.startswith(f"# trial {result.best.number}: loss {result.value:.6g}, accuracy ")  # type: ignore[union-attr]
    assert f"# Chosen of the {len(result.front)} trials of the front by the rule: knee. front/ has" in text
    configs = {path.name: yaml.safe_load(path.read_text()) for path in (tmp_path / "front").iterdir()}
    assert configs == {f"{trial.number:04d}.yaml": trial.settings for trial in result.front}
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["values"] for line in lines] == [list(trial.values or ()) for trial in result.trials]
    goal, trials, _ = read_study_events(tmp_path)
    assert goal.objectives == read_objectives(OBJECTIVES)
    assert trials == list(result.trials)


@pytest.mark.slow
def test_a_study_in_many_sessions_is_the_study_in_one(tmp_path: Path) -> None:
    sampler = {"name": "nsga2", "population": 4}
    options: dict[str, Any] = {
        "sampler": sampler,
        "scheduler": {"name": "none", "max_resource": 9},
        "objectives": OBJECTIVES,
        "seed": 5,
    }
    whole = minimize(anytime, SPACE, budget=10, **options)
    generator, sessions = random.Random(1), 0

    def interrupted(trial: TrialContext) -> None:
        report = trial.report

        def report_or_stop(step: int, value: Any, *, tokens: int = 0) -> None:
            if generator.random() < 0.1:
                raise KeyboardInterrupt
            report(step, value, tokens=tokens)

        trial.report = report_or_stop  # type: ignore[method-assign]
        anytime(trial)

    while True:
        sessions += 1
        try:
            parts = minimize(interrupted, SPACE, budget=10, out=tmp_path, **options)
            break
        except KeyboardInterrupt:
            continue
    assert sessions > 2
    assert comparable(parts.trials) == comparable(whole.trials)
    assert comparable(parts.front) == comparable(whole.front)
    assert parts.settings == whole.settings
    assert {path.stem for path in (tmp_path / "front").iterdir()} == {f"{trial.number:04d}" for trial in parts.front}


@pytest.mark.slow
def test_the_dashboard_shows_the_front(tmp_path: Path) -> None:
    from optuna_dashboard import wsgi

    options: dict[str, Any] = {
        "sampler": "random",
        "scheduler": {"name": "none", "max_resource": 9},
        "objectives": OBJECTIVES,
        "seed": 5,
    }
    result = minimize(anytime, SPACE, budget=10, out=tmp_path, **options)
    assert {trial.state for trial in result.trials} == {TrialState.FINISHED}
    status: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/api/studies/1",
        "QUERY_STRING": "after=0",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": None,
    }
    app = wsgi(optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db"))
    shown = json.loads(b"".join(app(environment, lambda line, headers, *rest: status.append(line))))
    assert status == ["200 OK"]
    assert shown["directions"] == ["minimize", "maximize"]
    assert shown["objective_names"] == ["loss", "accuracy"]
    assert sorted(trial["number"] for trial in shown["best_trials"]) == [trial.number for trial in result.front]


def test_what_a_trial_spends_is_measured_by_the_study() -> None:
    objectives = ["tokens", "loss", "seconds"]

    def curve(settings: Mapping[str, Any]) -> Iterator[CurvePoint]:
        for step in range(1, 10):
            yield CurvePoint(settings["x"] / step, 2.0 * settings["depth"], 7)

    result = optimize(
        lambda: replay(curve),
        Goal(Space(SPACE), read_objectives(objectives)),
        budget=12,
        sampler="random",
    )
    for trial in result.trials:
        for report in trial.reports:
            step, settings = report.step, trial.settings
            assert report.values == pytest.approx((7 * step, settings["x"] / step, 2 * settings["depth"] * step))
        assert trial.values is None or trial.values == trial.reports[-1].values
    assert [trial.number for trial in result.front] == brute_front(result.trials, (1, 1, 1))


@pytest.mark.slow
def test_the_memory_of_processes_is_an_objective() -> None:
    def function(trial: Any) -> float:
        ballast = b"x" * (60_000_000 if trial["big"] else 1)
        return float(not trial["big"]) + 0 * len(ballast)

    space = {"big": Choice([True, False])}
    options: dict[str, Any] = {"objectives": ["loss", "memory_bytes"], "sampler": "grid", "budget": 2}
    result = minimize(function, space, engine="processes", workers=1, **options)
    big, small = sorted(result.trials, key=lambda trial: trial.value or 0.0)
    assert big.values is not None
    assert small.values is not None
    assert big.values[1] - small.values[1] > 30e6
    assert len(result.front) == 2
    with pytest.raises(UserError, match=r"`memory_bytes` of a trial is not known .* use --engine processes"):
        minimize(function, space, **options)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ((0.5, math.nan), "its value of accuracy is nan"),
        ({"loss": math.inf, "accuracy": 1.0}, "its value of loss is inf"),
        ({"loss": 0.5}, "ValueError: the objective accuracy is missing: there is loss"),
        (0.5, "ValueError: one value for the 2 objectives loss, accuracy"),
        ((1, 2, 3), "ValueError: 3 values for the objectives loss, accuracy"),
        (None, "it reported no value and returned none"),
    ],
)
@pytest.mark.parametrize("reported", [False, True])
def test_failures_are_recorded_and_the_study_goes_on(outcome: Any, error: str, reported: bool) -> None:
    def function(trial: TrialContext) -> Any:
        if trial.number % 2 or (reported and outcome is None):
            return (trial["x"], 1.0) if trial.number % 2 else None
        if reported:
            trial.report(1, outcome)
        return outcome

    result = minimize(function, SPACE, budget=6, sampler="random", objectives=OBJECTIVES)
    for trial in result.trials[::2]:
        assert trial.state is TrialState.FAILED
        assert (
            trial.error.replace("the value of accuracy at step 1", "its value of accuracy").replace(
                "the value of loss at step 1", "its value of loss"
            )
            == error
        )
    assert all(trial.number % 2 for trial in result.front)


def test_a_study_whose_trials_miss_a_metric_ends() -> None:
    with pytest.raises(WorkError, match="the first 5 trials have failed; the last: ValueError: the objective size is"):
        minimize(lambda trial: {"loss": 1.0}, SPACE, budget=50, objectives=["loss", "size"])


@pytest.mark.slow
def test_a_study_of_other_objectives_is_refused(tmp_path: Path) -> None:
    def run(objectives: Any, **options: Any) -> Any:
        return minimize(anytime, SPACE, budget=3, sampler="random", objectives=objectives, out=tmp_path, **options)

    first = run(OBJECTIVES)
    for other in (["loss", "accuracy"], ["loss"], OBJECTIVES[::-1], [*OBJECTIVES, "tokens"]):
        with pytest.raises(UserError, match="the study searches the least loss, greatest accuracy; name another --out"):
            run(other)
    with pytest.raises(UserError, match="the study searches the least loss, greatest accuracy"):
        minimize(lambda trial: 1.0, SPACE, budget=3, out=tmp_path)
    # Limits and the rule change no value, and are those of the last call.
    again = run(["loss", {"metric": "accuracy", "maximize": True, "limit": 0.5}], choose="loss within 0%")
    assert comparable(again.trials) == comparable(first.trials)
    goal, trials, _ = read_study_events(tmp_path)
    assert goal.objectives.choose == "loss within 0%"
    assert goal.objectives.items[1].limit == 0.5
    assert goal.best_trial(trials) == again.best


@pytest.mark.parametrize("sampler", ["staged", "perturb"])
def test_a_sampler_of_one_objective_is_refused(sampler: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sampler: searches one objective, and there are 2; use tpe, nsga2, gp"):
        minimize(anytime, SPACE, budget=3, sampler=sampler, objectives=OBJECTIVES, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "successive_halving", "early_stopping", "pbt"])
def test_a_scheduler_of_one_objective_is_refused(scheduler: str, tmp_path: Path) -> None:
    given = {"name": scheduler, "max_resource": 9}
    with pytest.raises(UserError, match="scheduler: compares trials by one objective, and there are 2; use none"):
        minimize(anytime, SPACE, budget=3, scheduler=given, objectives=OBJECTIVES, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"warm_start": "before"},
            "warm_start: carries over the best settings by one objective, and there are 2; leave",
        ),
        (
            {"sampler": {"name": "gp", "acquisition": "ucb"}},
            "sampler.acquisition: `ucb` is of one objective, and there are 2; leave it out",
        ),
        (
            {"sampler": {"name": "gp", "startup": 0}},
            "sampler: `startup`: Input should be greater than or equal to 1",
        ),
    ],
)
def test_what_knows_one_objective_is_refused(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        minimize(anytime, SPACE, **{"budget": 3, "objectives": OBJECTIVES, "out": tmp_path / "out"} | options)
    assert str(error.value).startswith(problem)
    assert not (tmp_path / "out").exists()


def test_a_sampler_made_for_one_objective_is_refused() -> None:
    sampler = make_sampler("tpe", Space.of(SPACE))
    with pytest.raises(UserError, match=r"was made for other objectives; make it with maximize=\(False, True\)"):
        minimize(anytime, SPACE, budget=3, sampler=sampler, objectives=OBJECTIVES)


@pytest.mark.slow
def test_one_objective_by_name_is_a_study_of_one() -> None:
    def run(function: Any, **options: Any) -> Any:
        return minimize(function, SPACE, budget=12, seed=2, **options)

    options: dict[str, Any]
    for options in ({}, {"sampler": {"name": "gp", "startup": 9, "acquisition": "pi"}}):
        named = run(lambda trial: {"loss": trial["x"]}, objectives=[Objective("loss")], **options)
        plain = run(lambda trial: trial["x"], **options)
        assert comparable(named.trials) == comparable(plain.trials)
        assert named.settings == plain.settings
        greatest = run(lambda trial: -trial["x"], objectives=[Objective("gain", maximize=True)], **options)
        assert [trial.settings for trial in greatest.trials] == [trial.settings for trial in plain.trials]


CUBE = Space({f"x{index}": Float(0, 1) for index in range(5)})


def zdt1(settings: Mapping[str, float]) -> tuple[float, float]:
    """Two objectives of Zitzler, Deb and Thiele (2000), whose front has x1 to x4 at 0."""
    first, *others = settings.values()
    rest = 1 + 9 * sum(others) / len(others)
    return first, rest * (1 - math.sqrt(first / rest))


def volume(sampler: Any, seed: int, count: int) -> float:
    proposer, trials = make_sampler(sampler, CUBE, seed, (False, False)), list[Trial]()
    for number in range(count):
        proposal = proposer.propose(number, trials)
        assert proposal is not None
        first, second = zdt1(proposal.drawn)
        finished = TrialState.FINISHED
        settings = proposal.drawn
        trials.append(Trial(number, settings, settings, finished, value=first, others=(second,), notes=proposal.notes))
    points, reference = np.array([trial.values for trial in trials]), np.array([1.0, 6.0])
    return float(compute_hypervolume(points[(points < reference).all(axis=1)], reference))


@pytest.mark.slow
def test_samplers_that_learn_beat_random_by_hypervolume() -> None:
    sampler = {"name": "nsga2", "population": 16}
    wins = [volume(sampler, seed, 100) > volume("random", seed, 100) for seed in range(6)]
    assert sum(wins) >= 5  # by chance with a probability of 0.11
