"""Studies in Optuna's storage: read again, also from PostgreSQL, and shown by its dashboard."""

import json
import os
import random
from pathlib import Path

import optuna
import pytest

from posttrain.jobs.memory import Memory
from posttrain.store.errors import LockedError, UserError, WorkError
from posttrain.testing.samplers import SPACE
from posttrain.tune.budget import Spent
from posttrain.tune.goal import Goal
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.parameters import Choice, Float
from posttrain.tune.space import Space
from posttrain.tune.study import Study, read_study_events
from posttrain.tune.trial import Report, Trial, TrialState, best_trial

LORA = {"rate": 1e-4, "method": "lora", "rank": 8, "batch": 8, "accumulation": 2}
FULL = {"rate": 1e-5, "method": "full", "batch": 16, "accumulation": 1}


def fill(study: Study) -> None:
    """Three trials: one that was paused, promoted and finished, one that was stopped, one that failed."""
    study.start(LORA, 1, {"bracket": 0}, clock=1.0)
    study.report(0, Report(1, 0.5, 2.0, 10), clock=3.0)
    study.set_running(0, False)
    study.start(FULL, 3, {}, clock=3.5)
    study.resume(0, 3, clock=4.0)
    study.report(1, Report(2, 0.75, 1.0, 20), clock=4.5)
    study.end(1, TrialState.STOPPED, 4.5, value=0.75)
    study.report(0, Report(3, 0.25, 6.0, 30), clock=8.0)
    study.end(0, TrialState.FINISHED, 9.0, value=0.25, seconds=6.5, tokens=31, memory=Memory(1000, 500))
    study.start(FULL, None, {}, clock=9.0)
    study.end(2, TrialState.FAILED, 10.0, error="out of memory")
    study.start(FULL, None, {}, clock=11.0)


def test_a_study_in_memory() -> None:
    with Study(Goal(SPACE)) as study:
        fill(study)
        assert [trial.state for trial in study.trials] == ["finished", "stopped", "failed", "running"]
        first = study.trials[0]
        assert first.settings["alpha"] == 16
        assert [report.value for report in first.reports] == [0.5, 0.25]
        assert (first.seconds, first.tokens, first.resource) == (6.5, 31, 3)
        assert (first.memory_bytes, first.gpu_memory_bytes) == (1000, 500)
        assert study.best is first


def test_time_that_passed_without_an_event_stays_spent(tmp_path: Path) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        study.start(LORA, 1, clock=2.0)
        study.keep_spent(Spent(40.0, 0))
    with Study(Goal(SPACE), folder=tmp_path) as study:
        assert study.clock == 40.0


@pytest.mark.parametrize("where", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def test_a_study_is_read_again(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("postgres_url") if where == "postgres" else None
    with Study(Goal(SPACE), folder=tmp_path, url=url) as study:
        fill(study)
        if where == "postgres":
            with pytest.raises(LockedError, match="another process works on this study"):
                Study(Goal(SPACE), folder=tmp_path, url=url)
        before, clock = list(study.trials), study.clock
        goal, trials, _ = read_study_events(tmp_path, url)
        assert (trials, goal.space.to_json(), goal.maximize) == (before, SPACE.to_json(), False)
    with Study(Goal(SPACE), folder=tmp_path, url=url) as study:
        assert study.trials == before
        assert study.clock == clock == 11.0
        assert [(event.kind, event.trial.number, event.clock) for event in study.events] == [
            *[("start", 0, 1.0), ("report", 0, 3.0), ("start", 1, 3.5), ("start", 0, 4.0), ("report", 1, 4.5)],
            *[("end", 1, 4.5), ("report", 0, 8.0), ("end", 0, 9.0), ("start", 2, 9.0), ("end", 2, 10.0)],
            ("start", 3, 11.0),
        ]
        assert [event.order for event in study.events] == list(range(11))
        assert study.events[3].trial.resource == 3
        assert study.start(LORA).number == 4
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines] == ["finished", "stopped", "failed", "running", "running"]
    assert lines[0]["reports"] == [[1, 0.5, 2.0, 10], [3, 0.25, 6.0, 30]]


@pytest.mark.slow
def test_optuna_and_its_dashboard_open_the_file(tmp_path: Path) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        fill(study)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    opened = optuna.load_study(study_name="tune", storage=url)
    assert [trial.state.name for trial in opened.trials] == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    assert opened.best_value == 0.25
    assert opened.best_params == {name: LORA[name] for name in opened.best_params}
    assert opened.trials[0].intermediate_values == {1: 0.5, 3: 0.25}
    assert opened.trials[0].user_attrs == {"alpha": 16, "epochs": 3}
    assert opened.trials[2].user_attrs["error"] == "out of memory"

    from optuna_dashboard import wsgi

    status: list[str] = []
    environment = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/studies", "wsgi.input": None, "wsgi.errors": None}
    app = wsgi(optuna.storages.RDBStorage(url))
    body = b"".join(app(environment, lambda line, headers, *rest: status.append(line)))
    assert status == ["200 OK"]
    assert json.loads(body)["study_summaries"][0]["study_name"] == "tune"


def test_what_a_kill_left_unfinished_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        study.start(LORA)
        study.start(FULL)
        # Killed between an event and what Optuna shows of it.
        with monkeypatch.context() as patch:
            patch.setattr(study, "_show_state", lambda trial: None)
            study.report(0, Report(1, 0.5))
            study.end(1, TrialState.FINISHED, value=0.25)
        trials = list(study.trials)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert [trial.state.name for trial in optuna.load_study(study_name="tune", storage=url).trials] == ["RUNNING"] * 2
    with Study(Goal(SPACE), folder=tmp_path) as study:
        assert study.trials == trials
    opened = optuna.load_study(study_name="tune", storage=url)
    assert [trial.state.name for trial in opened.trials] == ["RUNNING", "COMPLETE"]
    assert opened.trials[0].intermediate_values == {1: 0.5}
    assert opened.best_value == 0.25


def test_a_changed_space_is_refused(tmp_path: Path) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        fill(study)
    changed = SPACE.replace("rate", Float(5e-5, 1e-2, log=True)).replace("method", Choice(["full", "lora", "dora"]))
    with pytest.raises(UserError) as error:
        Study(Goal(changed), folder=tmp_path)
    line = str(error.value)
    assert (
        "the space has changed: `rate` was float [1e-06, 0.001], log True and is float [5e-05, 0.01], log True" in line
    )
    assert "`method` was" in line
    assert line.endswith("take that back, or name another --out and this folder as warm_start")


@pytest.mark.slow
def test_a_study_that_was_killed_as_it_began_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "set_study_user_attr", killed)
        with pytest.raises(KeyboardInterrupt):
            Study(Goal(SPACE), folder=tmp_path)
    with Study(Goal(SPACE), folder=tmp_path) as study:
        fill(study)
    assert len(optuna.get_all_study_summaries(f"sqlite:///{tmp_path / 'study.db'}")) == 1


def test_another_objective_is_refused(tmp_path: Path) -> None:
    with Study(Goal(SPACE, Objectives((Objective("accuracy", maximize=True),))), folder=tmp_path):
        pass
    for objective, maximize in (("loss", False), ("accuracy", False)):
        with pytest.raises(UserError, match="the study searches the greatest accuracy"):
            Study(Goal(SPACE, Objectives((Objective(objective, maximize),))), folder=tmp_path)


def test_what_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no study"):
        read_study_events(tmp_path)
    (tmp_path / "study.db").write_text("no database, and longer than the hundred bytes that its header has " * 4)
    with pytest.raises(UserError, match="is not a study"):
        Study(Goal(SPACE), folder=tmp_path)
    with pytest.raises(UserError, match="storage: `mysql` is not supported"):
        Study(Goal(SPACE), folder=tmp_path, url="mysql://host/name")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "postgresql://alice:s3cret@127.0.0.1:1/tune",
            r"://alice:\*\*\*@127.0.0.1:1/tune: the study's",
        ),
        ("postgresql://alice:${TUNE_PASSWORD}@127.0.0.1:1/tune", r"//alice:\*\*\*@127.0.0.1:1/tune: the study's"),
        ("${TUNE_URL}", r"//alice:\*\*\*@127.0.0.1:1/tune: the study's"),
        ("postgresql://alice:${UNSET}@127.0.0.1:1/tune", "storage: environment variable `UNSET` is not set"),
        ("mysql://alice:s3cret@host/tune", "storage: `mysql` is not supported"),
        ("postgresql://alice:s3cret@host:port/tune", "storage: no database URL"),
        ("s3cret", "storage: no database URL"),
    ],
)
def test_no_password_is_shown(url: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_PASSWORD", "s3cret")
    monkeypatch.setenv("TUNE_URL", "postgresql://alice:s3cret@127.0.0.1:1/tune")
    for begin in (lambda: read_study_events(None, url), lambda: Study(Goal(SPACE), folder=tmp_path, url=url)):
        with pytest.raises((UserError, WorkError), match=reason) as caught:
            begin()
        assert "s3cret" not in str(caught.value)


def test_choices_of_any_json_type(tmp_path: Path) -> None:
    space = Space({"a": Choice([[1, 2], {"b": 1}, None, True, 1]), "x": Float(0, 1)})
    with Study(Goal(space), folder=tmp_path) as study:
        for value in space.parameters["a"].grid(1):
            study.start({"a": value, "x": 0.5})
    with Study(Goal(space), folder=tmp_path) as study:
        values = [trial.settings["a"] for trial in study.trials]
        assert values == [[1, 2], {"b": 1}, None, True, 1]
        assert [type(value) for value in values[3:]] == [bool, int]


def test_the_best_is_kept_up_to_date() -> None:
    generator = random.Random(3)
    for maximize in (False, True):
        study = Study(Goal(SPACE, Objectives((Objective("value", maximize),))))
        for _ in range(300):
            open_trials = [trial for trial in study.trials if not trial.ended]
            if not open_trials or generator.random() < 0.2:
                study.start(FULL)
                continue
            trial = generator.choice(open_trials)
            value = generator.choice([0.1, 0.2, 0.3, 0.4, 0.5])
            ends = generator.random()
            if ends < 0.05:
                study.end(trial.number, TrialState.FAILED, error="x")
            elif ends < 0.1:
                study.end(trial.number, TrialState.STOPPED, value=value)
            elif ends < 0.13:
                study.end(trial.number, TrialState.FINISHED, value=value)
            else:
                study.report(trial.number, Report(trial.step + 1, value))
            assert study.best == best_trial(study.trials, maximize=maximize)


def test_the_best_trial() -> None:
    def trial(number: int, state: TrialState, value: float | None, *reports: float) -> Trial:
        steps = tuple(Report(step, report) for step, report in enumerate(reports, 1))
        return Trial(number, {}, {}, state, steps, value)

    paused, stopped = trial(0, TrialState.PAUSED, None, 0.9, 0.1), trial(1, TrialState.STOPPED, 0.05, 0.05)
    failed = trial(2, TrialState.FAILED, None, 0.3, 0.2, 0.01)
    assert best_trial([]) is None
    assert best_trial([failed]) is None
    # At different steps values cannot be compared.
    assert best_trial([stopped, paused, failed]) is paused
    first, second = trial(3, TrialState.FINISHED, 0.5), trial(4, TrialState.FINISHED, 0.5)
    third = trial(5, TrialState.FINISHED, 0.7)
    assert best_trial([paused, first, second, third]) is first
    assert best_trial([paused, first, second, third], maximize=True) is third


def test_a_folder_that_cannot_be_written_to_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        fill(study)
        trials = list(study.trials)
    before = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        access = os.access
        patch.setattr("os.access", lambda path, mode: path != tmp_path and access(path, mode))
        assert read_study_events(tmp_path)[1] == trials
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_damaged_database_is_named_with_what_is_left(tmp_path: Path) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        fill(study)
    content = (tmp_path / "study.db").read_bytes()
    (tmp_path / "study.db").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="name another --out; with this folder as warm_start it begins with what"):
        Study(Goal(SPACE), folder=tmp_path)
