"""The page of a study with several objectives: its front, and what mattered for each objective."""

import re
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.tune.events import Event
from posttrain.tune.goal import Goal
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.parameters import Choice, Float
from posttrain.tune.report.front import front_charts
from posttrain.tune.report.study import study_page
from posttrain.tune.space import Space
from posttrain.tune.study import Study, read_study_events
from posttrain.tune.trial import Report, Trial, TrialState
from posttrain.web.page import PAGE_BYTES, render_page, write_page

EVIL = "<b>evil</b></script>"
SPACE = Space({"rate": Float(1e-5, 1e-1, log=True), "batch": Choice([8, 16, 32]), EVIL: Float(0, 1)})
TWO = Objectives((Objective("loss"), Objective("accuracy", True)))
WITHIN = f"{EVIL} within 5%"
THREE = Objectives(
    (Objective(EVIL), Objective("accuracy", True), Objective("seconds", limit=30.0)), f"{EVIL} within 5%"
)


def finished(number: int, *values: float, state: TrialState = TrialState.FINISHED) -> Trial:
    return Trial(number, {"rate": 1e-3}, {"rate": 1e-3}, state, value=values[0], others=values[1:])


TRIALS = [
    finished(0, 3.0, 0.1),
    finished(1, 2.0, 0.6),
    finished(2, 0.5, 0.9, state=TrialState.STOPPED),
    finished(3, 1.0, 0.5),
    finished(4, 4.0, 0.7),
    finished(5, 4.0, 0.2),
]


def series(chart: Any, name: str) -> list[Any]:
    (entry,) = [entry for entry in chart.option["series"] if entry["name"] == name]
    return [item["value"] if isinstance(item, dict) else item for item in entry["data"]]


def test_the_scatter_has_every_finished_trial_once() -> None:
    front = TWO.front(TRIALS)
    (chart,), note = front_charts(TWO, TRIALS, front, front[0])
    assert note == ""
    assert [trial.number for trial in front] == [1, 3, 4]
    assert series(chart, "other trials") == [(3.0, 0.1), (4.0, 0.2)]
    assert series(chart, "front") == [(1.0, 0.5), (4.0, 0.7)]
    assert series(chart, "chosen") == [(2.0, 0.6)]
    assert series(chart, "border") == [(1.0, 0.5), (2.0, 0.6), (4.0, 0.7)]
    (border,) = [entry for entry in chart.option["series"] if entry["name"] == "border"]
    # Between two trials an accuracy has been reached at the loss of the first of them.
    assert border["step"] == "end"
    tips = [item["tip"] for entry in chart.option["series"][1:] for item in entry["data"]]
    assert "trial 1: loss 2, accuracy 0.6" in tips
    assert chart.rows == [("3", "1", "0.5"), ("1", "2", "0.6"), ("4", "4", "0.7")]


def test_three_objectives_are_three_pairs() -> None:
    generator = np.random.default_rng(0)
    trials = [finished(number, *point) for number, point in enumerate(generator.random((3000, 3)).tolist())]
    front = THREE.front(trials)
    charts, note = front_charts(THREE, trials, front, front[0])
    assert [chart.heading for chart in charts] == [f"accuracy by {EVIL}", f"seconds by {EVIL}", "seconds by accuracy"]
    assert note == f"Of {3000 - len(front):,} trials that are on no front 1,000 are drawn, at random."
    for chart in charts:
        assert len(series(chart, "front")) + 1 == len(front)
        assert all(entry["name"] != "border" for entry in chart.option["series"])


def fill(study: Study, count: int) -> None:
    generator = np.random.default_rng(1)
    for number in range(count):
        trial = study.start(study.space.draw(generator), None, {}, clock=float(number))
        loss = abs(float(np.log10(trial.settings["rate"])) + 3)
        values = (loss, 1 - trial.settings["batch"] / 100, 10 + 30 * float(generator.random()))
        study.report(number, Report(1, values[0] + 1, 1.0, 10, (values[1], 1.0)), float(number))
        if number % 5 == 1:
            study.end(number, TrialState.STOPPED, number + 0.5, values=values)
        elif number % 5 != 2:
            study.end(number, TrialState.FINISHED, number + 0.5, values=values, tokens=10)


def shown(page: str) -> str:
    main = page[page.index("<header") : page.index("</main>")]
    return " ".join(unescape(re.sub("<[^>]+>", " ", re.sub("<script.*?</script>", "", main, flags=re.DOTALL))).split())


@pytest.mark.slow
def test_the_page_says_what_was_chosen_and_what_mattered(tmp_path: Path) -> None:
    with Study(Goal(SPACE, THREE), folder=tmp_path) as study:
        fill(study, 40)
        best, front = study.best, study.front
    assert best is not None
    goal, trials, events = read_study_events(tmp_path)
    built = study_page(goal, trials, events, "study")
    page, sentence = render_page(built), built.sentence
    text = shown(page)
    assert sentence.startswith(f"{len(front)} of 24 finished trials are on the front; the rule {EVIL} within 5% takes")
    assert f"takes trial {best.number}: {THREE.describe(best.values or ())}. {EVIL}: rate explains " in sentence
    assert "; accuracy: batch explains " in sentence
    assert "(limit 30)" in text
    for heading in ("seconds by accuracy", "accuracy by trial", "seconds by step"):
        assert heading in text
    assert EVIL not in page
    assert page.count("</script>") == page.count("<script")
    assert "built-in" not in page
    # The front comes first in the table, by the first objective.
    cells = r"<tr><th[^>]*>(\d+)</th><td[^>]*>finished</td>"
    rows = re.findall(cells, page[page.index("The best 20") :])
    ordered = sorted(front, key=lambda trial: THREE.losses(trial.values or ()))
    assert [int(number) for number in rows[: len(front)]] == [trial.number for trial in ordered][:20]


def test_a_study_without_a_finished_trial(tmp_path: Path) -> None:
    with Study(Goal(SPACE, TWO), folder=tmp_path) as study:
        for _ in range(2):
            study.start({"rate": 1e-3, "batch": 8, EVIL: 0.5}, None, {})
        study.report(0, Report(1, 0.5, others=(0.25,)))
        text = shown(render_page(study_page(*read_study_events(tmp_path), "study")))
    assert "No trial has finished yet." in text
    assert "the best trial has loss 0.5 at step 1" in text


@pytest.mark.slow
def test_a_page_of_many_trials_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.tune.importance._TREES", 4)  # the forests take most of the time
    monkeypatch.setattr("posttrain.tune.importance.MOST", 200)
    generator = np.random.default_rng(0)
    trials = []
    for number in range(5000):
        drawn = SPACE.draw(generator)
        values = generator.random(3).tolist()
        reports = tuple(Report(step, values[0], others=tuple(values[1:])) for step in range(1, 6))
        trials.append(Trial(number, drawn, drawn, TrialState.FINISHED, reports, values[0], others=tuple(values[1:])))
    events = [Event("end", trial.number, float(trial.number), {}, trial) for trial in trials]
    goal = Goal(SPACE, THREE)
    write_page(tmp_path / "page.html", partial(study_page, goal, trials, events, "many", ()))
    assert (tmp_path / "page.html").stat().st_size < PAGE_BYTES


@pytest.mark.slow
def test_the_page_in_a_browser(open_in_view: Callable[[Path], Any], tmp_path: Path) -> None:
    with Study(Goal(SPACE, THREE), folder=tmp_path / "study") as study:
        fill(study, 40)
    write_page(tmp_path / "page.html", partial(study_page, *read_study_events(tmp_path / "study"), EVIL, ()))
    loaded = open_in_view(tmp_path / "page.html")
    loaded.assert_self_contained()
    loaded.assert_has_sections(["result", "front", "history", "curves", "importance", "settings", "trials"])
    loaded.assert_charts_are_named()
    loaded.assert_fits()
