"""The report on a workspace: the champions, the recorded gains, and the time."""

import html
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.inspect.champion import last_rollback
from posttrain.inspect.random_baseline import run_random_loop
from posttrain.inspect.status import status
from posttrain.loop.config import load_config
from posttrain.loop.loop import Loop
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.stages.decide import decided_gain
from posttrain.report.section import Pairs
from posttrain.store.workspace import Workspace
from posttrain.train.curves import TrainingCurves, read_round_training
from posttrain.web.loop_report import (
    LoopReport,
    champion_metrics,
    headline,
    read_loop,
    report_page,
    time_section,
)
from posttrain.web.page import render_page
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
    def report(self) -> LoopReport:
        return read_loop(self.store, load_config(self.root))

    @property
    def page(self) -> str:
        return html.unescape(render_page(report_page(self.store, load_config(self.root))))

    @property
    def champions(self) -> list[tuple[float | None, ...]]:
        return list(champion_metrics(self.report).values())

    @property
    def timings(self) -> dict[str, str]:
        (pairs,) = [block for block in time_section(self.report).blocks if isinstance(block, Pairs)]
        return dict(pairs.rows)


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
    assert reported_loop.champions == [(base,), (first, base), (base,)]
    ModelRegistry(reported_loop.store).promote(str(reported_loop.store.metadata.rounds()[2].candidate), round=None)
    assert reported_loop.champions == [(base,), (first, base), (base, second)]
    # A model of an unfinished round has no metrics; the page is drawn without them.
    reported_loop.run(3, until="train")
    training_run = reported_loop.store.metadata.runs(stage="train", status="done")[-1]
    ModelRegistry(reported_loop.store).promote(str(training_run.output), round=None)
    assert reported_loop.champions == [(base,), (first, base), (base, second, None)]
    assert reported_loop.report.metric == "accuracy"
    assert "accuracy of each round" in reported_loop.page


def test_rounds_and_labels_are_counted_as_everywhere(reported_loop: ReportedLoop) -> None:
    page = reported_loop.page
    assert "<title>workspace: 2 rounds, rolled back</title>" in page
    tiles = {name: (value, remark) for value, name, remark in headline(reported_loop.report)}
    assert tiles["rounds done"][0] == "2 / 2"
    assert tiles["labels answered"] == ("40", "of 40 asked")
    assert page.count("20 asked: 20 used.") == 2


def test_the_headline_says_who_rolled_back(reported_loop: ReportedLoop) -> None:
    """The second round was refused, so that what a roll-back by hand restored is still in service."""
    sentence = "Rolled back by hand, from the model of round 1 to the base model: found bad in service"
    assert status(reported_loop.store, load_config(reported_loop.root))["rollback"]["sentence"] == sentence
    assert sentence in reported_loop.page
    rollback = last_rollback(reported_loop.store)
    assert rollback is not None
    chinese = Translator("zh").line(rollback.sentence)
    assert chinese == "已手动回滚：由第 1 轮的模型回到基础模型：found bad in service"
    by_gate = replace(rollback, round=2, source_round=2, target_round=1)
    assert by_gate.sentence.startswith("The gate rolled back in round 2, from the model of round 2 to the model of")
    ModelRegistry(reported_loop.store).promote(rollback.source, round=None)
    assert reported_loop.report.rollback == ""
    assert "<title>workspace: 2 rounds</title>" in reported_loop.page


def test_a_gain_keeps_its_confidence_level_and_metric(reported_loop: ReportedLoop) -> None:
    gains = [decided_gain(record) for record in reported_loop.report.rounds]
    assert gains[0] is None
    assert [(gain.metric, gain.level) for gain in gains if gain] == [("accuracy", 0.8), ("accuracy", 0.9)]
    assert "Upright bars are the 80% or 90% paired interval" in reported_loop.page


def test_each_rounds_training_is_read_from_the_files_that_exist(reported_loop: ReportedLoop) -> None:
    runs = {run.round: run for run in reported_loop.store.metadata.runs(stage="train", status="done")}

    def read(number: int) -> TrainingCurves | None:
        return read_round_training(reported_loop.store, runs[number], f"round {number}")

    for number, run in runs.items():
        model = reported_loop.store.artifacts.path(str(run.output))
        lines = json.loads((model / "training.json").read_bytes())
        training = read(int(number or 0))
        assert training is not None
        assert training.values["loss"].tolist() == [line["loss"] for line in lines]
    # With times, if the workspace has the metrics file.
    metrics_file = reported_loop.store.home / "metrics" / f"{runs[2].key}.jsonl"
    metrics_file.parent.mkdir(exist_ok=True)
    metrics_file.write_text(json.dumps({"step": 0, "loss": 7.0, "seconds": 2.5}) + "\n")
    training = read(2)
    assert training is not None
    assert training.values["seconds"].tolist() == [2.5]
    assert "not at hand" not in reported_loop.page
    # Without either file there is a note.
    metrics_file.unlink()
    (reported_loop.store.home / "artifacts" / str(runs[2].output) / "training.json").unlink()
    assert read(2) is None
    assert "The record of round 2's training is not at hand." in reported_loop.page


def test_times_may_be_negative(reported_loop: ReportedLoop) -> None:
    assert set(reported_loop.timings) == {"all rounds", "model compute", "everything else"}
    for number in range(3):
        reported_loop.store.metadata.update_round(number, seconds=0.0)
    assert reported_loop.timings["all rounds"] == "0 s"
    assert not reported_loop.timings["everything else"].startswith("0.")


def test_the_random_baseline_is_drawn_with_its_conclusion(finished_copy: Path) -> None:
    loop = ReportedLoop(finished_copy)
    assert "Against drawing at random" not in loop.page
    baseline = run_random_loop(loop.store, load_config(loop.root))
    assert baseline is not None
    page = loop.page
    assert baseline.conclusion in page
    assert "round 1, drawn at random" in page
    shutil.rmtree(loop.store.artifacts.path(baseline.random[-1].evaluation))
    assert "Against drawing at random" not in loop.page, "a damaged baseline is omitted"
    loop.store.close()
