"""``posttrain train`` with evaluation on held-out records, and the pages of one and of several trainings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Call = Callable[..., Any]
SMALL = ("--model", "tiny", "--set", "train.batch_size=2", "--set", "train.max_steps=4")


def write(path: Path, start: int, count: int) -> Path:
    rows = [{"prompt": f"message {number}", "completion": "yes" if number % 2 else "no"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[start:]), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    held_out = write(tmp_path / "held-out.jsonl", 6, 8)
    return ("--data", str(write(tmp_path / "train.jsonl", 0, 6)), "--set", f"train.evaluate.data={held_out}")


def evaluations(out: Path) -> list[dict[str, float]]:
    return [json.loads(line).get("evaluation", {}) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_training_is_evaluated_and_gets_its_page(files: tuple[str, ...], tmp_path: Path, posttrain: Call) -> None:
    out = tmp_path / "out"
    options = ("--set", "train.evaluate.every=2", "--set", "train.evaluate.metrics=[exact_match]")
    outcome = posttrain("train", *SMALL, *files, *options, "--out", out)
    assert outcome.code == 0, outcome
    values = evaluations(out)
    assert [bool(value) for value in values] == [False, True, False, True]
    assert {"loss", "exact_match/accuracy"} <= values[-1].keys()
    assert f"held out, after 4 steps: loss {values[-1]['loss']:.4g}, exact_match/accuracy 0" in outcome.out
    assert f"curves: posttrain report {out}" in outcome.out
    assert posttrain("report", out).code == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "loss on held-out records by step: training, held-out records" in page
    assert "exact_match/accuracy on held-out records" in page


def test_trainings_are_compared_on_a_page(files: tuple[str, ...], tmp_path: Path, posttrain: Call) -> None:
    folders = [tmp_path / name / "out" for name in ("a", "b")]
    for folder, rate in zip(folders, ("1.0e-3", "1.0e-4"), strict=True):
        assert posttrain("train", *SMALL, *files, "--set", f"train.learning_rate={rate}", "--out", folder).code == 0
    page = tmp_path / "page.html"
    assert posttrain("report", page, "--training", folders[0], "--training", folders[1]).code == 0
    text = page.read_text(encoding="utf-8").replace("<wbr>", "")
    assert "loss by step: out (1), out (2)" in text
    assert "loss on held-out records by step: out (1), out (2)" in text
    assert "train.learning_rate" in text
    assert "train.batch_size" not in text, "it is the same in both"
    many = [option for folder in folders * 5 for option in ("--training", folder)]
    assert "10 trainings are more than a page compares" in posttrain("report", page, *many).mistake


def test_held_out_records_are_read_before_any_work(files: tuple[str, ...], tmp_path: Path, posttrain: Call) -> None:
    for setting, message in (
        ("train.evaluate.data=nowhere.jsonl", "nowhere.jsonl"),
        ("train.evaluate.metrics=[exact_mach]", "did you mean `exact_match`"),
        ("train.evaluate.data=1.5", "1.5 is not a share of the records"),
        ("train.evaluate.patience=0", "train.evaluate.patience"),
    ):
        outcome = posttrain("train", *SMALL, *files, "--set", setting, "--out", tmp_path / "out")
        assert (outcome.code, message in outcome.mistake) == (2, True), outcome
        assert not (tmp_path / "out").exists()


def test_the_validation_split_of_a_version_is_held_out(tmp_path: Path, posttrain: Call) -> None:
    data = write(tmp_path / "data.jsonl", 0, 40)
    config = "model: tiny\ndata: {steps: [exact], splits: {validation: 0.3, near_duplicates: null}}\n"
    (tmp_path / "posttrain.yaml").write_text(config, encoding="utf-8")
    workspace = ("-w", tmp_path)
    added = posttrain("data", "add", data, "--name", "set", "--engine", "inline", *workspace)
    assert added.code == 0, added
    named = ("--data", "set", "--set", "train.evaluate.data=set@v1.0.0", "--out", tmp_path / "out", *workspace)
    outcome = posttrain("train", *SMALL, *named)
    assert outcome.code == 0, outcome
    assert evaluations(tmp_path / "out")[-1].keys() == {"loss"}
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["examples"] < 40
