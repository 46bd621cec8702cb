"""Feedback that `posttrain serve` collects becomes records of the loop or of a version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox

Call = Callable[..., Any]

FEEDBACK = [
    {"id": "a", "prompt": "is it here", "completion": "yes", "rating": "up"},
    {"id": "b", "prompt": "where is it", "completion": "no", "rating": "down", "corrected_answer": "at home"},
    {"id": "c", "prompt": "what is it", "completion": "a thing", "rating": "down"},
]


def fill_inbox(root: Path) -> None:
    with Inbox(root / ".posttrain" / "inbox") as inbox:
        for entry in FEEDBACK:
            inbox.append(Feedback.model_validate(entry)).result(30)


def test_feedback_is_added_to_the_loops_sets_with_their_columns(small: Any, posttrain: Call) -> None:
    root = small(task={"labels": None}, evaluate={"suites": {"test": {"scorer": "exact_match"}}})
    fill_inbox(root)
    outcome = posttrain("data", "add", "--inbox", "-w", root)
    assert outcome.code == 0, outcome
    files = {path.parent.name: path for path in (root / "data").rglob("*.jsonl")}
    assert set(files) == {"pool", "labelled"}
    rows = [
        json.loads(line)
        for path in sorted((root / "data").rglob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    records = {(row["text"], row["label"]) for row in rows}
    assert records == {("is it here", "yes"), ("where is it", "at home"), ("what is it", None)}
    assert posttrain("data", "check", *files.values(), "-w", root).code == 0
    assert posttrain("data", "add", "--inbox", "-w", root).out == "", "nothing is added twice"


@pytest.mark.slow
def test_feedback_is_added_to_a_version(tmp_path: Path, posttrain: Call) -> None:
    (tmp_path / "posttrain.yaml").write_text(yaml.safe_dump({"model": "tiny", "data": {"steps": ["exact"]}}))
    fill_inbox(tmp_path)
    version = posttrain(
        "data", "add", "--inbox", "--name", "feedback", "--engine", "inline", "-w", tmp_path, "--json"
    ).json
    assert version["counts"]["records"] == 3
    assert {row["name"].split("-")[-1] for row in version["sources"]} == {
        "labelled.jsonl",
        "preferences.jsonl",
        "pool.jsonl",
    }


OUTSIDE = {"id": "d", "prompt": "who is it", "completion": "yes", "rating": "down", "corrected_answer": "perhaps"}
LABELLED = [{**FEEDBACK[0]}, {**FEEDBACK[1], "corrected_answer": "no", "completion": "yes"}, OUTSIDE]


@pytest.fixture
def labelled_inbox(tmp_path: Path) -> Path:
    """A workspace with two labels, and feedback in which one answer is none of them."""
    config = {"model": "tiny", "task": {"labels": ["yes", "no"]}, "data": {"steps": ["exact"]}}
    (tmp_path / "posttrain.yaml").write_text(yaml.safe_dump(config))
    with Inbox(tmp_path / ".posttrain" / "inbox") as inbox:
        for entry in LABELLED:
            inbox.append(Feedback.model_validate(entry)).result(30)
    return tmp_path


@pytest.mark.parametrize("to_version", [True, False])
def test_only_the_answer_outside_the_label_set_is_rejected(
    labelled_inbox: Path, posttrain: Call, to_version: bool
) -> None:
    name = ("--name", "feedback", "--engine", "inline") if to_version else ()
    outcome = posttrain("data", "add", "--inbox", *name, "-w", labelled_inbox)
    assert outcome.code == 0, outcome
    assert (
        "1 of 2 entries (preferences) are set aside; the first, `d`: label `perhaps` is not in the label set"
        in outcome.err
    )
    [rejected] = (labelled_inbox / ".posttrain" / "inbox" / "rejected").iterdir()
    [row] = [json.loads(line) for line in rejected.read_text().splitlines()]
    assert (row["meta"]["feedback"]["id"], row["reason"][:15]) == ("d", "label `perhaps`")
    rows = [
        json.loads(line)
        for path in (labelled_inbox / "data").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(entry["meta"]["feedback"]["id"] for entry in rows) == ["a", "b"]


def test_feedback_needs_no_config(tmp_path: Path, posttrain: Call) -> None:
    fill_inbox(tmp_path)
    outcome = posttrain("data", "add", "--inbox", "--name", "feedback", "--engine", "inline", "-w", tmp_path)
    assert outcome.code == 0, outcome
    assert "left out" not in outcome.err, "the step `conflicts` is not named"
