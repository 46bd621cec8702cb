"""Trials that fail, and studies that cannot continue: each says why, and loses nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.store.errors import StorageError, WorkError
from posttrain.tune import Choice, Float, Int, TrialContext, minimize
from posttrain.tune.study import Study
from posttrain.tune.trial import TrialState

SPACE = {"x": Float(0, 1), "depth": Int(1, 8), "kind": Choice(["a", "b"])}

ASHA = {"name": "asha", "max_resource": 9}


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (math.nan, "its value is nan"),
        (math.inf, "its value is inf"),
        (None, "it reported no value and returned none"),
        (ValueError("bad\nluck"), "ValueError: bad luck"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory: CUDA out of memory"),
        (MemoryError(), "out of memory"),
        (ValueError("half \ud83d of it\0"), "ValueError: half \ufffd of it\ufffd"),
        ("text", "ValueError: could not convert string to float"),
    ],
)
def test_failures_are_recorded_and_the_study_goes_on(outcome: Any, error: str) -> None:
    def function(trial: TrialContext) -> Any:
        if trial.number % 2 == 0:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        return trial["x"]

    result = minimize(function, SPACE, budget=8, sampler="random")
    for trial in result.trials:
        assert (trial.state is TrialState.FAILED) == (trial.number % 2 == 0)
        assert trial.error.startswith(error) if trial.number % 2 == 0 else not trial.error
    assert result.best is not None
    assert result.best.number % 2 == 1


def test_a_reported_nan_fails_the_trial_at_once() -> None:
    reached = []

    def function(trial: TrialContext) -> float:
        trial.report(1, 0.5)
        trial.report(2, math.nan if trial.number == 0 else 0.1)
        reached.append(trial.number)
        return 0.1

    result = minimize(function, SPACE, budget=3, scheduler=ASHA | {"min_resource": 9})
    assert result.trials[0].error == "the value at step 2 is nan"
    assert reached == [1, 2]
    assert result.best is not None
    assert result.best.number == 1


def test_a_study_whose_first_trials_all_fail_ends() -> None:
    def function(trial: TrialContext) -> float:
        raise FileNotFoundError("train.jsonl")

    with pytest.raises(WorkError, match=r"the first 5 trials have failed; the last: FileNotFoundError: train\.jsonl"):
        minimize(function, SPACE, budget=50)


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_a_study_whose_first_trials_all_report_nan_ends(engine: str) -> None:
    with pytest.raises(WorkError, match="the first 5 trials have failed; the last: the value at step 1 is nan"):
        minimize(lambda trial: trial.report(1, math.nan), SPACE, budget=50, engine=engine, workers=1)


@pytest.mark.parametrize("method", ["report", "keep_spent"])
def test_an_error_of_the_study_is_none_of_the_trial(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: object) -> None:
        raise StorageError("no space left on device")

    def function(trial: TrialContext) -> float:
        for step in (1, 2):
            trial.show_life()
            trial.report(step, 0.5)
        return 0.5

    monkeypatch.setattr(Study, method, refuse)
    monkeypatch.setattr("posttrain.tune.driver._CLOCK_SECONDS", 0.0)
    with pytest.raises(StorageError, match="no space left"):
        minimize(function, SPACE, budget=3, out=tmp_path)


def test_a_result_without_a_value_says_why() -> None:
    result = minimize(lambda trial: math.nan, SPACE, budget=2)
    assert result.best is None
    with pytest.raises(ValueError, match="no trial has a value: its value is nan"):
        _ = result.value


def test_a_trial_cannot_report_nonsense() -> None:
    def function(trial: TrialContext) -> None:
        trial.report([0, -1, 1.5][trial.number], 0.1)  # type: ignore[arg-type]

    result = minimize(function, SPACE, budget=3)
    assert all("a step is a positive integer" in trial.error for trial in result.trials)


def test_a_function_that_swallows_exceptions_is_ended_all_the_same() -> None:
    steps: list[int] = []

    def function(trial: TrialContext) -> None:
        for step in range(1, 10):
            try:
                trial.report(step, 1.0)
            except Exception:  # noqa: BLE001
                raise AssertionError from None
            steps.append(step)

    minimize(function, SPACE, budget=1, scheduler=ASHA)
    assert steps == []


def test_where_a_function_failed_is_kept(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> float:
        return 1.0 if trial.number else {}["y"]

    assert minimize(function, SPACE, budget=2, out=tmp_path).trials[0].error == "KeyError: 'y'"
    assert 'return 1.0 if trial.number else {}["y"]' in (tmp_path / "trials" / "errors" / "0000.txt").read_text()


@pytest.mark.parametrize("step", [2**31, 2**63, 10**400, math.inf, math.nan, 0, -1, 1.5])
def test_a_step_that_no_database_holds_fails_its_trial_alone(step: Any, tmp_path: Path) -> None:
    def function(trial: TrialContext) -> float:
        trial.report(step if trial.number == 0 else 2**31 - 1, 0.5)
        return 0.25

    first, second = minimize(function, SPACE, budget=2, sampler="random", out=tmp_path / "study").trials
    assert (first.state, second.state) == (TrialState.FAILED, TrialState.FINISHED)
    assert "integer" in first.error
    assert second.reports[0].step == 2**31 - 1


def test_half_a_surrogate_in_an_error_ends_no_study_on_disk(tmp_path: Path) -> None:
    def function(trial: TrialContext) -> float:
        if trial.number == 0:
            raise OSError("cannot open b\udcff.txt")
        return 0.25

    first, second = minimize(function, SPACE, budget=2, sampler="random", out=tmp_path / "study").trials
    assert (first.error, second.state) == ("OSError: cannot open b\ufffd.txt", TrialState.FINISHED)
    (log,) = (tmp_path / "study" / "trials" / "errors").iterdir()
    assert "b\\udcff.txt" in log.read_text(encoding="utf-8")


def test_a_function_that_changes_its_settings_changes_no_result(tmp_path: Path) -> None:
    seen = []

    def function(trial: TrialContext) -> float:
        seen.append((dict(trial.settings), list(trial["layers"])))
        trial.settings["x"] = -1.0  # type: ignore[index]
        trial.settings["extra"] = 1  # type: ignore[index]
        trial["layers"].append(3)
        return float(trial.number)

    space = {**SPACE, "layers": {"value": [1, 2]}}
    result = minimize(function, space, budget=3, sampler="random", out=tmp_path / "study")
    best = yaml.safe_load((tmp_path / "study" / "best.yaml").read_text())
    assert all(layers == [1, 2] and set(settings) == set(space) for settings, layers in seen)
    assert all(0 <= trial.settings["x"] <= 1 and trial.settings["layers"] == [1, 2] for trial in result.trials)
    assert 0 <= best["x"] <= 1
    assert (best["layers"], set(best)) == ([1, 2], set(space))
