"""What `posttrain serve` gathers becomes records of the loop, or of a version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox

Call = Callable[..., Any]

POSTED = [
    {"id": "a", "prompt": "is it here", "completion": "yes", "rating": "up"},
    {"id": "b", "prompt": "where is it", "completion": "no", "rating": "down", "corrected_answer": "at home"},
    {"id": "c", "prompt": "what is it", "completion": "a thing", "rating": "down"},
]


def gather(root: Path) -> None:
    with Inbox(root / ".posttrain" / "inbox") as inbox:
        for posted in POSTED:
            inbox.append(Feedback.model_validate(posted)).result(30)


def test_feedback_reaches_the_loops_sets_under_its_columns(small: Any, posttrain: Call) -> None:
    root = small(task={"labels": None}, evaluate={"suites": {"test": {"scorer": "exact_match"}}})
    gather(root)
    added = posttrain("data", "add", "--inbox", "-w", root)
    assert added.code == 0, added
    actual = {path.parent.name: path for path in (root / "data").rglob("*.jsonl")}
    assert set(actual) == {"pool", "labelled"}
    rows = [
        json.loads(line)
        for path in sorted((root / "data").rglob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    records = {(row["text"], row["label"]) for row in rows}
    assert records == {("is it here", "yes"), ("where is it", "at home"), ("what is it", None)}
    assert posttrain("data", "check", *actual.values(), "-w", root).code == 0
    assert posttrain("data", "add", "--inbox", "-w", root).out == "", "nothing is taken twice"


@pytest.mark.slow
def test_feedback_grows_a_version(tmp_path: Path, posttrain: Call) -> None:
    (tmp_path / "posttrain.yaml").write_text(yaml.safe_dump({"model": "tiny", "data": {"steps": ["exact"]}}))
    gather(tmp_path)
    actual = posttrain("data", "add", "--inbox", "--name", "feedback", "-w", tmp_path, "--json").json
    assert actual["counts"]["records"] == 3
    assert {row["name"].split("-")[-1] for row in actual["sources"]} == {
        "labelled.jsonl",
        "preferences.jsonl",
        "pool.jsonl",
    }


OUTSIDE = {"id": "d", "prompt": "who is it", "completion": "yes", "rating": "down", "corrected_answer": "perhaps"}
LABELLED = [{**POSTED[0]}, {**POSTED[1], "corrected_answer": "no", "completion": "yes"}, OUTSIDE]


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A workspace with two labels, and feedback of which one answer is neither."""
    config = {"model": "tiny", "task": {"labels": ["yes", "no"]}, "data": {"steps": ["exact"]}}
    (tmp_path / "posttrain.yaml").write_text(yaml.safe_dump(config))
    with Inbox(tmp_path / ".posttrain" / "inbox") as inbox:
        for posted in LABELLED:
            inbox.append(Feedback.model_validate(posted)).result(30)
    return tmp_path


@pytest.mark.parametrize("named", [True, False])
def test_an_answer_outside_the_label_set_is_set_aside_alone(closed: Path, posttrain: Call, named: bool) -> None:
    name = ("--name", "feedback", "--engine", "inline") if named else ()
    added = posttrain("data", "add", "--inbox", *name, "-w", closed)
    assert added.code == 0, added
    assert (
        "1 of 2 entries (preferences) are set aside; the first, `d`: label `perhaps` is not in the label set"
        in added.err
    )
    [aside] = (closed / ".posttrain" / "inbox" / "rejected").iterdir()
    [row] = [json.loads(line) for line in aside.read_text().splitlines()]
    assert (row["meta"]["feedback"]["id"], row["reason"][:15]) == ("d", "label `perhaps`")
    kept = [json.loads(line) for path in (closed / "data").rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert sorted(entry["meta"]["feedback"]["id"] for entry in kept) == ["a", "b"]


def test_feedback_needs_no_config(tmp_path: Path, posttrain: Call) -> None:
    gather(tmp_path)
    added = posttrain("data", "add", "--inbox", "--name", "feedback", "--engine", "inline", "-w", tmp_path)
    assert added.code == 0, added
    assert "left out" not in added.err, "nobody named the step `conflicts`"
