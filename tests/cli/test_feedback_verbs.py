"""What `posttrain serve` gathers becomes records of the loop, or of a version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from posttrain.data.feedback import Feedback
from posttrain.data.inbox import Inbox

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
    found = {path.parent.name: path for path in (root / "data").rglob("*.jsonl")}
    assert set(found) == {"pool", "labelled"}
    rows = [
        json.loads(line)
        for path in sorted((root / "data").rglob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    told = {(row["text"], row["label"]) for row in rows}
    assert told == {("is it here", "yes"), ("where is it", "at home"), ("what is it", None)}
    assert posttrain("data", "check", *found.values(), "-w", root).code == 0
    assert posttrain("data", "add", "--inbox", "-w", root).out == "", "nothing is taken twice"


def test_feedback_grows_a_version(tmp_path: Path, posttrain: Call) -> None:
    (tmp_path / "posttrain.yaml").write_text(yaml.safe_dump({"model": "tiny", "data": {"steps": ["exact"]}}))
    gather(tmp_path)
    found = posttrain("data", "add", "--inbox", "--name", "feedback", "-w", tmp_path, "--json").json
    assert found["counts"]["records"] == 3
    assert {row["name"].split("-")[-1] for row in found["sources"]} == {
        "labelled.jsonl",
        "preferences.jsonl",
        "pool.jsonl",
    }
