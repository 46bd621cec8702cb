"""Studies whose space changes: every sampler goes on, costs still count, and what was left behind comes back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from posttrain.store.errors import UserError
from posttrain.tune import Choice, Float, Int, TrialContext, minimize
from posttrain.tune.result import TuneResult
from posttrain.tune.samplers.registry import SAMPLERS
from posttrain.tune.space import Space
from posttrain.tune.study import Study
from posttrain.tune.trial import TrialState

FULL = {"a": Float(0, 1), "b": Float(1e-3, 1, log=True), "c": Choice(["x", "y", "z"])}
"""Three parameters, of which each test takes some."""

FEW = {"population": 4}

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"startup": 4} for name in ("tpe", "gp", "rgpe")},
    **dict.fromkeys(("cmaes", "evolutionary", "nsga2", "nsga3", "regularized_evolution"), FEW),
    "staged": {"coarse": 4, "refined": 3},
    "bohb": {},
}

ASHA = {"name": "asha", "max_resource": 9}


def distance(trial: TrialContext) -> float:
    return float(abs(trial["a"] - 0.3) + trial.settings.get("b", 0.1))


def curve(trial: TrialContext) -> None:
    """Goes on from its checkpoint; each step takes ten tokens."""
    path = trial.folder / "step"
    step = int(path.read_text()) if path.exists() else 0
    while step < (trial.resource or 9):
        step += 1
        path.write_text(str(step))
        trial.report(step, abs(trial["a"] - 0.3) + 1 / step, tokens=10)


def states(result: TuneResult) -> list[TrialState]:
    return [trial.state for trial in result.trials]


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS.builtin) - {"perturb", "pb2"}))
def test_a_parameter_goes_and_comes_back(sampler: str, tmp_path: Path) -> None:
    options = {"sampler": {"name": sampler, **OPTIONS.get(sampler, {})}, "out": tmp_path, "seed": 1}
    two = {name: FULL[name] for name in ("a", "b")}
    first = minimize(distance, FULL, budget=9, **options)
    second = minimize(distance, two, budget=16, migrate=True, **options)
    assert states(second)[:9] == [TrialState.EXCLUDED] * 9
    assert len(second.trials) == (16 if sampler != "grid" else 9 + 3 * 3 - 2)
    assert all(trial.settings.keys() == {"a", "b"} for trial in second.trials[9:])
    third = minimize(distance, FULL, budget=20, migrate=True, **options)
    # But for what samplers had noted about the space as it was.
    assert replace(third.trials[0], notes={}) == replace(first.trials[0], notes={})
    assert {state for trial, state in zip(second.trials, states(third), strict=False) if "c" not in trial.settings} == {
        TrialState.EXCLUDED
    }
    assert len(third.trials) == 20


@pytest.mark.parametrize("objectives", [(), ("value", "seconds")])
def test_no_best_settings_are_left_where_none_is_a_point_any_more(objectives: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 3, "out": tmp_path, "sampler": "random", "objectives": objectives}
    minimize(distance, {"a": Float(0, 0.4)}, **options)
    files = [tmp_path / "best.yaml", *([tmp_path / "front"] if objectives else [])]
    assert all(file.exists() for file in files)
    result = minimize(distance, {"a": Float(0.5, 1)}, migrate=True, **options)
    assert states(result) == [TrialState.EXCLUDED] * 3
    assert result.best is None
    assert not any(file.exists() for file in files)


def test_a_grid_begins_anew_in_a_wider_space(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "grid", "budget": 30, "out": tmp_path}
    assert len(minimize(distance, {"a": Float(0, 0.5)}, **options).trials) == 3
    wider = minimize(distance, {"a": Float(0, 1)}, migrate=True, **options)
    assert [trial.settings["a"] for trial in wider.trials] == [0, 0.25, 0.5, 0, 0.5, 1]


def test_a_staged_search_looks_into_what_is_new(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": {"name": "staged", **OPTIONS["staged"]}, "out": tmp_path}
    minimize(distance, {"a": Float(0, 0.5)}, budget=10, **options)
    wider = minimize(distance, {"a": Float(0, 5)}, budget=14, migrate=True, **options)
    assert max(trial.settings["a"] for trial in wider.trials[10:]) == 5


def test_the_order_of_parameters_is_part_of_the_space(tmp_path: Path) -> None:
    minimize(distance, {"a": Float(0, 1), "b": Float(0, 1)}, budget=3, sampler="cmaes", out=tmp_path)
    with pytest.raises(UserError, match="the space has changed: the order is b, a"):
        minimize(distance, {"b": Float(0, 1), "a": Float(0, 1)}, budget=6, sampler="cmaes", out=tmp_path)


def test_a_process_learns_nothing_from_excluded_trials(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": {"name": "gp", "startup": 5}, "out": tmp_path, "seed": 2}
    minimize(distance, {"a": Float(0, 1), "kept": 1}, budget=12, **options)
    changed = minimize(distance, {"a": Float(0, 1), "kept": 2}, budget=30, migrate=True, **options)
    assert changed.best is not None
    assert changed.best.number >= 12
    assert changed.best.value == pytest.approx(0.1, abs=0.01)


def test_paused_trials_are_paused_again_once_the_space_is_back(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "random", "scheduler": ASHA, "out": tmp_path, "seed": 4}
    first = minimize(curve, {"a": Float(0, 1)}, budget=12, **options)
    paused = [trial.number for trial in first.trials if trial.state is TrialState.PAUSED]
    minimize(curve, {"a": Float(0, 0.2)}, budget=12, migrate=True, **options)
    folders = {path.name for path in (tmp_path / "trials").iterdir()}
    assert {f"{number:04d}" for number in paused} <= folders
    third = minimize(curve, {"a": Float(0, 1)}, budget=12, migrate=True, **options)
    assert [trial.reports for trial in third.trials] == [trial.reports for trial in first.trials]
    fourth = minimize(curve, {"a": Float(0, 1)}, budget=20, **options)
    assert any(trial.step > before.step for trial, before in zip(fourth.trials, first.trials, strict=False))


def test_what_was_spent_before_counts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": "random", "out": tmp_path, "budget": "900 tokens"}
    first = minimize(curve, {"a": Float(0, 1)}, **options)
    assert sum(trial.tokens for trial in first.trials) == 900
    second = minimize(curve, {"a": Float(0, 0.2)}, migrate=True, **options)
    assert len(second.trials) == len(first.trials)
    assert sum(trial.tokens for trial in second.trials) == 900


def test_a_child_whose_parent_is_excluded(tmp_path: Path) -> None:
    scheduler = {"name": "pb2", "max_resource": 8, "population": 6, "quantile": 0.5, "interval": 2}
    options: dict[str, Any] = {"scheduler": scheduler, "out": tmp_path, "seed": 0}

    def function(trial: TrialContext) -> None:
        path = trial.folder / "state"
        step = int(path.read_text()) if path.exists() else 0
        if step:
            trial.report(step, 1 / step + trial["a"])
        while step < 8:
            step += 1
            path.write_text(str(step))
            trial.report(step, 1 / step + trial["a"])

    minimize(function, {"a": Float(0, 1)}, budget=16, **options)
    result = minimize(function, {"a": Float(0, 0.317)}, budget=40, migrate=True, **options)
    assert any(trial.fork and result.trials[trial.fork.parent].state is TrialState.EXCLUDED for trial in result.trials)
    assert result.best is not None


@pytest.mark.parametrize("migrate", [False, True])
def test_a_kill_while_a_version_begins(migrate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study is there, and nothing says yet what it is about."""
    if migrate:
        minimize(distance, {"a": Float(0, 1)}, budget=3, out=tmp_path)
    space = {"a": Int(0, 1)}

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "set_study_user_attr", killed)
        with pytest.raises(KeyboardInterrupt):
            minimize(distance, space, budget=5, out=tmp_path, migrate=migrate)
    assert len(minimize(distance, space, budget=5, out=tmp_path, migrate=migrate).trials) == 5


def test_a_strangers_study_of_the_same_name_stays(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=url, study_name="tune").add_trial(optuna.trial.create_trial(value=1.0))
    space = Space({"a": Float(0, 1)})
    with Study(space, folder=tmp_path) as study:
        study.start({"a": 0.5})
    with Study(space, folder=tmp_path) as study:
        assert len(study.trials) == 1
    assert len(optuna.load_study(study_name="tune", storage=url).trials) == 1
