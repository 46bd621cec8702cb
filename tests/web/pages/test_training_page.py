"""The page of a training: read from its folder, shown in a real browser, and small even for long trainings."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.store.errors import UserError
from posttrain.train.curves import TrainingCurves, read_training_folder, training_from_steps
from posttrain.train.monitor.decisions import Finding, MonitorDecision
from posttrain.train.report import training_page
from posttrain.web.page import render_page, write_page

pytestmark = pytest.mark.slow

MakeLines = Callable[..., list[dict[str, Any]]]

ROLLED_BACK = MonitorDecision(Finding("divergence", 90, "smoothed loss 3.1 after 1.2", 3.1, 1.8, 70), "rollback")
SKIPPED = MonitorDecision(Finding("explosion", 40, "gradient norm 90 is 100 times the median", 90.0, 5.0), "skip")


@pytest.fixture
def folder(tmp_path: Path, training_lines: MakeLines) -> Path:
    """The folder that ``posttrain train --out`` writes."""
    out = tmp_path / "support <b>"
    out.mkdir()
    rows = training_lines(200)
    rows[40]["decisions"] = [SKIPPED.to_json()]
    rows[150]["loss"] = None
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    decisions = [SKIPPED.to_json(), ROLLED_BACK.to_json()]
    (out / "summary.json").write_text(json.dumps({"steps": 200, "decisions": decisions}))
    (out / "config.yaml").write_text("model: smollm2-135m\ndata: <i>pairs</i>.jsonl\ntrain: {objective: {name: dpo}}\n")
    return out


def test_a_training_is_read_from_its_folder(folder: Path) -> None:
    result = read_training_folder(folder)
    assert result.name == "support <b>"
    assert list(result.steps) == list(range(200))
    assert math.isnan(result.values["loss"][150])
    assert list(result.groups) == [f"layers.{layer}" for layer in range(6)]
    assert result.objective["rewards/margins"][100] == 0.5
    # Each decision once: one is in both files, and the other's step was trained again.
    assert [(entry.step, entry.kind, entry.action) for entry in result.decisions] == [
        (40, "explosion", "skip"),
        (90, "divergence", "rollback"),
    ]
    assert result.phases["backward"] == pytest.approx(200)
    assert result.phases["everything else"] == pytest.approx(20)
    assert result.settings == {"model": "smollm2-135m", "data": "<i>pairs</i>.jsonl", "objective": "dpo"}


def test_a_running_training_has_a_page(folder: Path) -> None:
    (folder / "summary.json").unlink()
    (folder / "config.yaml").unlink()
    work = folder / ".training" / "scratch"
    work.mkdir(parents=True)
    (work / "notes.json").write_text(json.dumps({"steps": [], "decisions": [ROLLED_BACK.to_json()]}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 200, "lo')
    result = read_training_folder(folder)
    assert len(result.steps) == 200
    assert [entry.kind for entry in result.decisions] == ["explosion", "divergence"]
    assert "posttrain" in render_page(training_page(result))


def test_a_training_without_most_measures_has_a_page() -> None:
    old = [{"step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-4, "tokens": 5} for step in range(3)]
    page = render_page(training_page(training_from_steps("old", old)))
    assert "loss by step" in page
    assert "nan" not in re.sub("<(style|script)>.*?</(style|script)>", "", page, flags=re.DOTALL).lower()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no metrics.jsonl in it"), ("", "no step is done yet")]
)
def test_a_folder_without_a_training_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read_training_folder(tmp_path)


def test_a_page_of_a_hundred_thousand_steps_is_little_more_than_the_library(training_lines: MakeLines) -> None:
    entry = training_lines(1000, groups=30)
    steps = np.arange(100_000, dtype=np.float64)
    rng = np.random.default_rng(1)
    short = training_from_steps("long", entry)
    long = dataclasses.replace(
        short,
        steps=steps,
        values={name: np.resize(values, 100_000) + 1e-9 * rng.random(100_000) for name, values in short.values.items()},
        groups={name: np.exp(rng.standard_normal(100_000)) for name in short.groups},
        objective={name: rng.random(100_000) for name in short.objective},
        decisions=tuple(training_from_steps("", [], [SKIPPED.to_json()]).decisions) * 5000,
    )
    page = render_page(training_page(long))
    assert len(page) < 1_300_000
    assert "4,800 more" in page


@pytest.fixture
def page_file(folder: Path, tmp_path: Path) -> Path:
    write_page(tmp_path / "page.html", lambda detail: training_page(read_training_folder(folder)))
    return tmp_path / "page.html"


def test_the_training_page_is_sound(open_in_view: Callable[[Path], Any], page_file: Path) -> None:
    loaded = open_in_view(page_file)
    loaded.assert_self_contained()
    loaded.assert_has_sections(["curves", "decisions", "layers", "time", "settings"])
    loaded.assert_charts_are_named()
    loaded.assert_fits()


def test_the_page_shows_curves_and_decisions(open_page: Callable[..., Any], page_file: Path) -> None:
    page = open_page(page_file, 1100).page
    charts = page.locator("#curves figure.chart:visible .plot")
    titles = [str(chart.get_attribute("aria-label")).split(" by step")[0] for chart in charts.all()]
    assert titles == [
        "loss",
        "gradient norm",
        "learning rate",
        "update to weight ratio",
        "tokens per second",
        "model FLOP utilisation",
        "memory",
        "time spent waiting for data",
        "rewards/margins",
        "rewards/accuracies",
    ]
    for name in ("layers", "time"):
        assert page.locator(f"#{name} figure.chart:visible .plot svg").count() == 1
    # The monitor's decisions are marked, and described in plain words.
    rows = [row.inner_text() for row in page.locator("#decisions tbody tr").all()]
    assert len(rows) == 2
    assert "exploding gradient" in rows[0]
    assert "skipped this batch" in rows[0]
    assert "rolled back to the last good checkpoint" in rows[1]
    red = page.evaluate("getComputedStyle(document.querySelector('figure')).getPropertyValue('--red').trim()")
    chart = page.locator("#curves figure.chart").first.locator(".plot svg")
    assert chart.locator(f'path[stroke="{red}"]').count() == 2, "a line for each"
    assert {"1", "2"} <= set(chart.locator("text").all_text_contents())


def test_the_training_page_escapes_texts_of_users(folder: Path) -> None:
    built = training_page(read_training_folder(folder))
    page = render_page(dataclasses.replace(built, sentence="<script>alert(1)</script>"))
    assert "<script>alert" not in page
    assert "support <b>" not in page
    assert "<i>pairs" not in page


def test_a_training_of_one_step_has_a_page(
    open_page: Callable[..., Any], tmp_path: Path, training_lines: MakeLines
) -> None:
    entry: TrainingCurves = training_from_steps("short", training_lines(1, metrics=False))
    write_page(tmp_path / "page.html", lambda detail: training_page(entry))
    page = open_page(tmp_path / "page.html").page
    assert page.locator("#curves figure.chart:visible .plot svg").count() == 8
    assert "The monitor detected no problem." in page.locator("#decisions").inner_text()
