"""What the report takes from a workspace: the models in use, the gains as they were computed, and the time."""

import html
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.inspect.random_baseline import run_baseline
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.workspace import Workspace
from posttrain.web.report import interval_levels, render_report
from posttrain.web.report_data import Report
from posttrain.web.report_reader import read_report

pytestmark = pytest.mark.slow

# Enough for the tiny model to learn the four labels by heart.
LEARNS: dict[str, Any] = {
    "label": {"per_round": 20},
    "train": {"epochs": 12, "learning_rate": 4.0e-3, "precision": "float32"},
}


class Gathered:
    """An open workspace: turn its loop, and gather its report."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Workspace.create(root, load_config(root).store)

    def run(self, *arguments: Any, **options: Any) -> None:
        Loop(self.store, load_config(self.root)).run(*arguments, **options)

    @property
    def report(self) -> Report:
        return read_report(self.store, load_config(self.root))


@pytest.fixture
def gathered(small: Any) -> Iterator[Gathered]:
    """A workspace whose first round is deployed and whose second is refused, with a roll-back by hand in between."""
    root = small(evaluate={"bootstrap": {"level": 0.8}}, **LEARNS)
    result = Gathered(root)
    result.run(1)
    ModelRegistry(result.store).rollback("found bad in service")
    small.configure(root, evaluate={"bootstrap": {"level": 0.9}}, gate={"deploy": ["accuracy > 2"]}, **LEARNS)
    result.run(2)
    yield result
    result.store.close()


def test_the_models_in_use_are_those_that_were_deployed(gathered: Gathered) -> None:
    base, first, second = (entry.detail["metrics"]["accuracy"] for entry in gathered.store.metadata.rounds())
    assert base < min(first, second)
    assert [row.champions for row in gathered.report.rounds] == [(base,), (first, base), (base,)]
    ModelRegistry(gathered.store).promote(str(gathered.store.metadata.rounds()[2].candidate), round=None)
    assert [row.champions for row in gathered.report.rounds] == [(base,), (first, base), (base, second)]
    # A model out of a round that is not done has no figures, and the page is drawn all the same.
    gathered.run(3, until="train")
    trained = gathered.store.metadata.runs(stage="train", status="done")[-1]
    ModelRegistry(gathered.store).promote(str(trained.output), round=None)
    report = gathered.report
    assert [row.champions for row in report.rounds] == [(base,), (first, base), (base, second, None)]
    assert report.metric == "accuracy"
    assert "accuracy of each round" in render_report(report)


def test_a_gain_keeps_the_level_and_the_metric_that_it_was_computed_with(gathered: Gathered) -> None:
    intervals = [row.interval for row in gathered.report.rounds]
    assert intervals[0] is None
    assert [(gain.metric, gain.level) for gain in intervals if gain] == [("accuracy", 0.8), ("accuracy", 0.9)]
    assert interval_levels(gathered.report) == "80% or 90%"


def test_each_rounds_training_is_drawn_from_what_is_at_hand(gathered: Gathered) -> None:
    runs = {run.round: run for run in gathered.store.metadata.runs(stage="train", status="done")}
    trainings = gathered.report.trainings
    assert [item.name for item in trainings] == ["round 1", "round 2"]
    for number, item in enumerate(trainings, 1):
        model = gathered.store.artifacts.path(str(runs[number].output))
        lines = json.loads((model / "training.json").read_bytes())
        assert item.values["loss"].tolist() == [line["loss"] for line in lines]
    # With times, where the workspace has kept them.
    timed = gathered.store.home / "metrics" / f"{runs[2].key}.jsonl"
    timed.parent.mkdir(exist_ok=True)
    timed.write_text(json.dumps({"step": 0, "loss": 7.0, "seconds": 2.5}) + "\n")
    assert gathered.report.trainings[1].values["seconds"].tolist() == [2.5]
    # And said, where nothing is left.
    timed.unlink()
    (gathered.store.home / "artifacts" / str(runs[2].output) / "training.json").unlink()
    report = gathered.report
    assert [item.name for item in report.trainings] == ["round 1"]
    assert "The record of its training is not at hand." in report.rounds[2].note
    assert "not at hand" not in report.rounds[0].note + report.rounds[1].note


def test_the_times_add_up_whatever_they_are(gathered: Gathered) -> None:
    timings = gathered.report.timings
    assert timings["everything else"] > 0
    assert timings["all rounds"] == pytest.approx(timings["model compute"] + timings["everything else"])
    for number in range(3):
        gathered.store.metadata.update_round(number, seconds=0.0)
    assert gathered.report.timings["everything else"] == -timings["model compute"] < 0


def test_the_random_loop_is_drawn_with_what_came_of_it(small: Any) -> None:
    root = small(rounds=1, **LEARNS)
    result = Gathered(root)
    result.run()
    assert result.report.baseline is None
    assert "Against drawing at random" not in render_report(result.report)
    compared = run_baseline(result.store, load_config(root))
    assert compared is not None
    assert result.report.baseline == compared
    page = render_report(result.report)
    assert compared.conclusion in html.unescape(page)
    assert "round 1, drawn at random" in page
    shutil.rmtree(result.store.artifacts.path(compared.random[-1].evaluation))
    assert result.report.baseline is None, "what is damaged is left out, and the rest is shown"
    result.store.close()
