"""The report's data from a workspace: the champions, the recorded gains, and the time."""

import html
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.inspect.random_baseline import run_random_loop
from posttrain.inspect.status import status
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.loop.model_registry import ModelRegistry
from posttrain.store.workspace import Workspace
from posttrain.web.loop_view import loop_tiles, rollback_text
from posttrain.web.report import interval_levels, render_report
from posttrain.web.report_data import Report
from posttrain.web.report_reader import read_report
from posttrain.web.translations import Translator

pytestmark = pytest.mark.slow

# Enough for the tiny model to learn the four labels by heart.
LEARNS: dict[str, Any] = {
    "label": {"per_round": 20},
    "train": {"epochs": 12, "learning_rate": 4.0e-3, "precision": "float32"},
}


class ReportedLoop:
    """An open workspace: runs its loop and reads its report."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Workspace.create(root, load_config(root).store)

    def run(self, *arguments: Any, **options: Any) -> None:
        Loop(self.store, load_config(self.root)).run(*arguments, **options)

    @property
    def report(self) -> Report:
        return read_report(self.store, load_config(self.root))


@pytest.fixture(scope="module")
def reported_workspace(small_anywhere: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a deployed first round, a manual rollback, and a refused second round."""
    small = small_anywhere(tmp_path_factory.mktemp("reported"))
    root: Path = small(evaluate={"bootstrap": {"level": 0.8}}, **LEARNS)
    result = ReportedLoop(root)
    result.run(1)
    ModelRegistry(result.store).rollback("found bad in service")
    small.configure(root, evaluate={"bootstrap": {"level": 0.9}}, gate={"deploy": ["accuracy > 2"]}, **LEARNS)
    result.run(2)
    result.store.close()
    return root


@pytest.fixture
def reported_loop(reported_workspace: Path, tmp_path: Path) -> Iterator[ReportedLoop]:
    """The loop of a copy of `reported_workspace`."""
    result = ReportedLoop(Path(shutil.copytree(reported_workspace, tmp_path / "workspace", symlinks=True)))
    yield result
    result.store.close()


def test_the_champions_of_each_round_are_the_deployed_models(reported_loop: ReportedLoop) -> None:
    base, first, second = (entry.detail["metrics"]["accuracy"] for entry in reported_loop.store.metadata.rounds())
    assert base < min(first, second)
    assert [row.champions for row in reported_loop.report.rounds] == [(base,), (first, base), (base,)]
    ModelRegistry(reported_loop.store).promote(str(reported_loop.store.metadata.rounds()[2].candidate), round=None)
    assert [row.champions for row in reported_loop.report.rounds] == [(base,), (first, base), (base, second)]
    # A model of an unfinished round has no metrics; the page is drawn without them.
    reported_loop.run(3, until="train")
    training_run = reported_loop.store.metadata.runs(stage="train", status="done")[-1]
    ModelRegistry(reported_loop.store).promote(str(training_run.output), round=None)
    report = reported_loop.report
    assert [row.champions for row in report.rounds] == [(base,), (first, base), (base, second, None)]
    assert report.metric == "accuracy"
    assert "accuracy of each round" in render_report(report)


def test_rounds_and_labels_are_counted_as_everywhere(reported_loop: ReportedLoop) -> None:
    report = reported_loop.report
    config = load_config(reported_loop.root)
    state = status(reported_loop.store, config)
    assert report.title == "workspace: 2 rounds, rolled back"
    assert report.rounds_done == 2
    assert (report.batches.asked, report.batches.learned) == (40, 40)
    assert [row.batch.learned for row in report.rounds[1:]] == [
        entry["batch"]["learned"] for entry in state["rounds"][1:]
    ]
    tiles = {name: (value, remark) for value, name, remark in loop_tiles(report, state, Translator("en"))}
    assert tiles["rounds done"][0] == "2 / 2"
    assert tiles["labels learned"] == ("40", "of 40 asked")
    page = render_report(report)
    assert "of 40 asked, in 2 rounds" in page
    assert "20 asked: 20 learned." in page


def test_the_headline_says_who_rolled_back(reported_loop: ReportedLoop) -> None:
    """The second round was refused, so that what a roll-back by hand restored is still in service."""
    sentence = "Rolled back by hand, from the model of round 1 to the base model: found bad in service"
    assert status(reported_loop.store, load_config(reported_loop.root))["rollback"]["sentence"] == sentence
    report = reported_loop.report
    assert sentence in html.unescape(render_report(report))
    assert report.rollback is not None
    chinese = rollback_text(report.rollback, Translator("zh"))
    assert chinese == "已手动回滚：由第 1 轮的模型回到基础模型。 found bad in service"
    by_gate = replace(report.rollback, round=2, source_round=2, target_round=1)
    assert by_gate.sentence.startswith("The gate rolled back in round 2, from the model of round 2 to the model of")
    ModelRegistry(reported_loop.store).promote(report.rollback.source, round=None)
    assert reported_loop.report.rollback is None
    assert reported_loop.report.title == "workspace: 2 rounds"


def test_a_gain_keeps_its_confidence_level_and_metric(reported_loop: ReportedLoop) -> None:
    intervals = [row.interval for row in reported_loop.report.rounds]
    assert intervals[0] is None
    assert [(gain.metric, gain.level) for gain in intervals if gain] == [("accuracy", 0.8), ("accuracy", 0.9)]
    assert interval_levels(reported_loop.report) == "80% or 90%"


def test_each_rounds_training_is_read_from_the_files_that_exist(reported_loop: ReportedLoop) -> None:
    runs = {run.round: run for run in reported_loop.store.metadata.runs(stage="train", status="done")}
    trainings = reported_loop.report.trainings
    assert [training.name for training in trainings] == ["round 1", "round 2"]
    for number, training in enumerate(trainings, 1):
        model = reported_loop.store.artifacts.path(str(runs[number].output))
        lines = json.loads((model / "training.json").read_bytes())
        assert training.values["loss"].tolist() == [line["loss"] for line in lines]
    # With times, if the workspace has the metrics file.
    metrics_file = reported_loop.store.home / "metrics" / f"{runs[2].key}.jsonl"
    metrics_file.parent.mkdir(exist_ok=True)
    metrics_file.write_text(json.dumps({"step": 0, "loss": 7.0, "seconds": 2.5}) + "\n")
    assert reported_loop.report.trainings[1].values["seconds"].tolist() == [2.5]
    # Without either file there is a note.
    metrics_file.unlink()
    (reported_loop.store.home / "artifacts" / str(runs[2].output) / "training.json").unlink()
    report = reported_loop.report
    assert [training.name for training in report.trainings] == ["round 1"]
    assert "The record of its training is not at hand." in report.rounds[2].note
    assert "not at hand" not in report.rounds[0].note + report.rounds[1].note


def test_times_add_up_even_if_negative(reported_loop: ReportedLoop) -> None:
    timings = reported_loop.report.timings
    assert timings["everything else"] > 0
    assert timings["all rounds"] == pytest.approx(timings["model compute"] + timings["everything else"])
    for number in range(3):
        reported_loop.store.metadata.update_round(number, seconds=0.0)
    assert reported_loop.report.timings["everything else"] == -timings["model compute"] < 0


def test_the_random_baseline_is_drawn_with_its_conclusion(finished_copy: Path) -> None:
    loop = ReportedLoop(finished_copy)
    assert loop.report.baseline is None
    assert "Against drawing at random" not in render_report(loop.report)
    baseline = run_random_loop(loop.store, load_config(loop.root))
    assert baseline is not None
    assert loop.report.baseline == baseline
    page = render_report(loop.report)
    assert baseline.conclusion in html.unescape(page)
    assert "round 1, drawn at random" in page
    shutil.rmtree(loop.store.artifacts.path(baseline.random[-1].evaluation))
    assert loop.report.baseline is None, "a damaged baseline is omitted"
    loop.store.close()
