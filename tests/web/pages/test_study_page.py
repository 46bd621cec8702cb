"""The page of a study: its numbers are those of the study, in every state of one, and nothing is left out silently."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.tune.events import Event
from posttrain.tune.goal import Goal
from posttrain.tune.importance import measure_importance
from posttrain.tune.objectives import Objective, Objectives
from posttrain.tune.parameters import Choice, Derived, Float, Int
from posttrain.tune.report.charts import StudyCharts, parameter_labels, study_charts
from posttrain.tune.report.study import study_page
from posttrain.tune.space import Space
from posttrain.tune.study import Study, read_study_events
from posttrain.tune.trial import Report, Trial, TrialState
from posttrain.web.page import PAGE_BYTES, render_page, write_page

EVIL = "<b>evil</b></script>"

SPACE = Space(
    {
        "rate": Float(1e-5, 1e-1, log=True),
        "method": Choice(["full", "lora", EVIL]),
        "rank": Int(2, 64, log=True, when="method == 'lora'"),
        "alpha": Derived("2 * rank"),
        "batch": Choice([8, 16, [1, 2], None]),
        EVIL: Float(0, 1),
        "epochs": 3,
    }
)

LORA = {"rate": 1e-3, "method": "lora", "rank": 8, "batch": 8, EVIL: 0.5}
FULL = {"rate": 1e-2, "method": "full", "batch": [1, 2], EVIL: 0.25}


def fill(study: Study) -> None:
    """A finished trial that was paused before, one that was stopped, one that failed, a paused and a running one."""
    study.start(LORA, 1, {}, clock=1.0)
    study.report(0, Report(1, 0.75, 2.0, 100), clock=3.0)
    study.set_running(0, False)
    study.start(FULL, 3, {}, clock=3.0)
    study.report(1, Report(1, 0.875, 1.0, 50), clock=4.0)
    study.end(1, TrialState.STOPPED, 4.0, value=0.875)
    study.resume(0, 2, clock=4.0)
    study.report(0, Report(2, 0.5, 4.0, 200), clock=6.0)
    study.end(0, TrialState.FINISHED, 6.0, value=0.5, seconds=4.5, tokens=210)
    study.start(FULL, None, {}, clock=6.0)
    study.report(2, Report(1, 0.9, 1.0, 50), clock=7.0)
    study.end(2, TrialState.FAILED, 7.5, error=f"out of memory {EVIL}")
    study.start(LORA, 2, {}, clock=8.0)
    study.report(3, Report(1, 0.625, 3.0, 100), clock=12.0)
    study.set_running(3, False)
    study.start(FULL, 2, {}, clock=12.0)


def draw(folder: Path, detail: float = 1.0) -> StudyCharts:
    goal, trials, events = read_study_events(folder)
    importance = measure_importance(goal.space, trials, maximize=goal.maximize)
    return study_charts(goal, trials, events, importance, detail)


def render(folder: Path) -> str:
    return render_page(study_page(*read_study_events(folder), folder.name))


def shown(page: str) -> str:
    main = page[page.index("<header") : page.index("</main>")]
    return " ".join(unescape(re.sub("<[^>]+>", " ", re.sub("<script.*?</script>", "", main, flags=re.DOTALL))).split())


def items(chart: Any) -> Iterator[tuple[str, float, float]]:
    """State, position and value of each point."""
    for series in chart.option["series"]:
        if series["type"] == "scatter":
            yield from ((series["name"], *item["value"]) for item in series["data"])


def line(chart: Any, name: str) -> list[tuple[float, float | None]]:
    (series,) = [series for series in chart.option["series"] if series["name"] == name]
    return list(series["data"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Study(Goal(SPACE, Objectives((Objective("held-out loss"),))), folder=tmp_path / "study") as study:
        fill(study)
    return tmp_path / "study"


def test_the_history_has_every_value_where_its_cost_was_spent(folder: Path) -> None:
    by_trial, by_seconds = draw(folder).history
    assert list(items(by_trial)) == [("finished", 0, 0.5), ("stopped", 1, 0.875), ("paused", 3, 0.625)]
    # By the clock of the study.
    assert list(items(by_seconds)) == [("finished", 6.0, 0.5), ("stopped", 4.0, 0.875), ("paused", 12.0, 0.625)]
    assert line(by_seconds, "best so far") == [(6.0, 0.5), (12.0, 0.5)]
    assert by_seconds.rows == [("0", "0.5", "6.0 s")]
    tips = [item["tip"] for series in by_seconds.option["series"] for item in series["data"] if isinstance(item, dict)]
    assert tips[1] == "trial 1 (stopped at step 1): held-out loss 0.875, 4.0 s into the study"


def test_curves_end_in_the_state_of_their_trial(folder: Path) -> None:
    chart = draw(folder).curves
    assert list(items(chart)) == [("finished", 2, 0.5), ("stopped", 1, 0.875), ("paused", 1, 0.625), ("failed", 1, 0.9)]
    assert line(chart, "best trial") == [(1, 0.75), (2, 0.5)]
    others = [(1, 0.875), (1, None), (1, 0.9), (1, None), (1, 0.625), (1, None)]
    assert line(chart, "others") == others


def test_the_page_says_what_it_leaves_out(folder: Path) -> None:
    page = render(folder)
    text = shown(page)
    assert "3 trials with comparable values cannot show which setting mattered" in text
    assert "the best trial has held-out loss 0.5, the median at step 1 is 0.75." in text
    assert "Not drawn: 2 trials without a value (1 failed, 1 running)." in text
    assert f"out of memory {EVIL}" in text
    assert EVIL not in page
    assert "<b>" not in page[page.index("<main") :]
    assert page.count("</script>") == page.count("<script")


def fill_many(study: Study, count: int, value: Callable[[dict[str, Any]], float], seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(count):
        trial = study.start(study.space.draw(generator), None, {}, clock=study.clock)
        result = value(dict(trial.settings))
        study.end(trial.number, TrialState.FINISHED, study.clock + 1.0, value=result, tokens=10)


def loss(settings: dict[str, Any]) -> float:
    return abs(float(np.log10(settings["rate"])) + 3) + 0.1 * settings.get("rank", 10) / 64


@pytest.mark.slow
def test_slices_and_importance(tmp_path: Path) -> None:
    with Study(Goal(SPACE, Objectives((Objective("loss"),))), folder=tmp_path) as study:
        fill_many(study, 40, loss)
        trials = list(study.trials)
    view = draw(tmp_path)
    slices = {chart.heading: chart for chart in view.slices}
    assert set(slices) == set(SPACE.parameters)
    assert view.slices[0].heading == "rate"
    for name, chart in slices.items():
        rows = [trial for trial in trials if name in trial.drawn]
        expected = [("finished", SPACE.parameters[name].to_unit(t.drawn[name]), t.value) for t in rows]
        assert list(items(chart)) == expected
        assert sum(int(row[1]) for row in chart.rows) == len(rows)
    with_rank = sum("rank" in trial.drawn for trial in trials)
    assert slices["rank"].note == f"in {with_rank} of 40 trials"
    best = min(trials, key=lambda trial: trial.value or 0)
    importance = measure_importance(SPACE, trials)
    assert view.importance is not None
    assert [item["value"] for item in view.importance.option["series"][0]["data"]] == list(importance.shares.values())
    text = shown(render(tmp_path))
    assert f"rate explains {100 * importance.shares['rate']:.0f}% of the differences (fANOVA over 40 trials)" in text
    assert f"the best trial has loss {best.value:.4g}, the median is" in text
    assert f"fANOVA leaves out rank, which exists in {with_rank} of 40 trials." in text
    assert "without a share of their own: alpha, epochs (derived or fixed)." in text


@pytest.mark.slow
def test_a_maximised_metric(tmp_path: Path) -> None:
    with Study(Goal(SPACE, Objectives((Objective("accuracy", maximize=True),))), folder=tmp_path) as study:
        fill_many(study, 30, lambda settings: -loss(settings))
        values = [trial.value or 0.0 for trial in study.trials]
    view = draw(tmp_path)
    best = line(view.history[0], "best so far")
    assert [value for _, value in best[:-1]] == sorted({max(values[: n + 1]) for n in range(30)})
    assert view.history[0].rows[-1][1] == f"{max(values):.4g}"
    assert f"the best trial has accuracy {max(values):.4g}" in shown(render(tmp_path))


@pytest.mark.parametrize(
    ("count", "state", "expected"),
    [
        (0, TrialState.FINISHED, "No trial has been started."),
        (1, TrialState.FINISHED, "1 trial with comparable values cannot show which setting mattered (it takes 10)"),
        (2, TrialState.FINISHED, "the best trial has loss 1, the median is 1."),
        (3, TrialState.FAILED, "None of 3 trials has a value: 3 failed."),
        (2, TrialState.RUNNING, "None of 2 trials has a value: 2 running."),
        (20, TrialState.FINISHED, "All 20 trials have the same value, so that no setting mattered"),
    ],
)
def test_studies_with_little_to_show(tmp_path: Path, count: int, state: TrialState, expected: str) -> None:
    with Study(Goal(SPACE, Objectives((Objective("loss"),))), folder=tmp_path) as study:
        for number in range(count):
            study.start(LORA, None, {}, clock=1.0)
            if state is TrialState.FAILED:
                study.end(number, state, 2.0, error="no memory")
            elif state is TrialState.FINISHED:
                study.end(number, state, 2.0, value=1.0)
        # While the study is open.
        text = shown(render(tmp_path))
    assert expected in text
    assert ("No trial has a value yet." in text) == (count == 0 or state is not TrialState.FINISHED)
    assert ("no memory 3 0" in text) == (state is TrialState.FAILED)


@pytest.mark.slow
def test_noise_is_not_called_a_finding(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    with Study(Goal(SPACE), folder=tmp_path) as study:
        fill_many(study, 30, lambda settings: float(noise.standard_normal()))
    assert "Which setting mattered cannot be told: over 30 trials the settings hardly predict" in shown(
        render(tmp_path)
    )


def test_the_best_on_an_edge_is_reported(tmp_path: Path) -> None:
    with Study(Goal(SPACE), folder=tmp_path) as study:
        study.start(LORA | {"rate": 1e-5}, None, {})
        study.end(0, TrialState.FINISHED, 1.0, value=1.0)
    assert "The best rate, 1e-05, is on the lower edge of its range; widen it in a study" in shown(render(tmp_path))


@pytest.mark.slow
def test_a_page_of_ten_thousand_trials_is_small_and_says_what_it_draws(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    trials, events = [], []
    for number in range(10_000):
        drawn = SPACE.draw(generator)
        settings = SPACE.complete(drawn)
        value = loss(settings)
        reports = tuple(Report(step, value + 1 / step, float(step), 10 * step) for step in range(1, 10))
        trials.append(Trial(number, settings, drawn, TrialState.FINISHED, reports, value, seconds=9.0, tokens=90))
        events.append(Event("end", number, float(number), {}, trials[-1]))
    goal = Goal(SPACE, Objectives((Objective("loss"),)))
    built = write_page(tmp_path / "page.html", partial(study_page, goal, trials, events, "many", ()))
    page, sentence = (tmp_path / "page.html").read_text(), built.sentence
    assert len(page.encode()) < PAGE_BYTES
    assert re.match(r"rate explains \d+% of the differences \(fANOVA over 2,000 trials\); the best", sentence)
    text = shown(page)
    for note in (
        "10,000 trials: of each 20 that follow each other the one with the lowest and the one with the highest",
        "60 of 10,000 learning curves are drawn: the best 12, and 48 of the others at random.",
        "1,200 of 10,000 trials are drawn: the best 240, and 960 of the others at random.",
        "Computed from 2,000 of 10,000 trials, drawn at random.",
    ):
        assert note in text
    first = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page)[0])
    (points,) = [entry for entry in first["option"]["series"] if entry["type"] == "scatter"]
    values = [item["value"][1] for item in points["data"]]
    every = [trial.value or 0.0 for trial in trials]
    assert (min(values), max(values)) == (pytest.approx(min(every), rel=1e-5), pytest.approx(max(every), rel=1e-5))


def test_labels_of_axes_are_values_at_their_positions() -> None:
    for parameter in [*SPACE.parameters.values(), Int(1, 3), Float(-2, 3), Int(16, 4096, log=True)]:
        labels = parameter_labels(parameter)
        assert 2 <= len(labels) <= 6
        assert all(0 <= position <= 1 for position, _ in labels)
        assert [position for position, _ in labels] == sorted({position for position, _ in labels})
    assert [text for _, text in parameter_labels(SPACE.parameters["batch"])] == ["8", "16", "[1, 2]", "null"]


@pytest.mark.slow
def test_the_page_in_a_browser(open_in_view: Callable[[Path], Any], tmp_path: Path) -> None:
    with Study(Goal(SPACE, Objectives((Objective("loss"),))), folder=tmp_path / "study") as study:
        fill(study)
        fill_many(study, 30, loss)
    write_page(tmp_path / "page.html", partial(study_page, *read_study_events(tmp_path / "study"), EVIL, ()))
    loaded = open_in_view(tmp_path / "page.html")
    loaded.assert_self_contained()
    loaded.assert_has_sections(["result", "history", "curves", "importance", "settings", "trials"])
    loaded.assert_charts_are_named()
    loaded.assert_fits()
