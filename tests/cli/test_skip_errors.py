"""``posttrain data add --on-error skip`` leaves out records that cannot be read, and keeps their reasons."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

GOOD = [{"prompt": f"how is number {number}", "completion": "yes"} for number in range(5)]
BAD = ['{"prompt": "", "completion": "yes"}', "{broken", '{"prompt": "x", "completion": 3}', '{"other": 1}']
ADD = ("--engine", "inline", "--step", "exact")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lines = [json.dumps(row) for row in GOOD]
    (tmp_path / "good.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "mixed.jsonl").write_text("\n".join([*BAD[:2], *lines, *BAD[2:]]) + "\n")
    return tmp_path


def add(posttrain: Call, root: Path, file: str, name: str, *options: str) -> Any:
    outcome = posttrain("data", "add", root / file, "--name", name, *ADD, *options, "-w", root, "--json")
    assert outcome.code == 0, outcome
    return outcome.json


def records(posttrain: Call, root: Path, version: str) -> list[str]:
    shown = posttrain("data", "show", version, "--limit", "99", "-w", root, "--json").json["records"]
    return [record["id"] for record in shown]


def test_bad_records_are_counted_and_kept_with_their_reasons(root: Path, posttrain: Call) -> None:
    built = add(posttrain, root, "mixed.jsonl", "d", "--on-error", "skip")
    assert built["counts"]["records"] == 5
    assert built["counts"]["rejected"] == 4
    funnel = {(entry["step"], entry["reason"]): entry["count"] for entry in built["funnel"]}
    assert funnel["read", "in"] == 9
    assert funnel["kept", "kept"] == 5
    assert sum(funnel.values()) - 14 == 4
    rejected = posttrain("data", "show", "d", "--rejected", "-w", root, "--json").json["rejected"]
    assert [row["line"] for row in rejected] == [1, 2, 8, 9]
    assert [row["reason"] for row in rejected] == ["empty prompt", "broken JSON", "not text", "unknown shape"]
    assert all(row["step"] == "read" and row["detail"] for row in rejected)
    add(posttrain, root, "good.jsonl", "e")
    assert records(posttrain, root, "d") == records(posttrain, root, "e")


def test_by_default_nothing_is_skipped(root: Path, posttrain: Call) -> None:
    add(posttrain, root, "mixed.jsonl", "d", "--on-error", "skip")
    call = ("data", "add", root / "mixed.jsonl", "--name", "e", *ADD, "-w", root)
    assert posttrain(*call).mistake == "mixed.jsonl:1: the prompt is empty"
    # A version that grows from it takes its records as they are.
    assert add(posttrain, root, "good.jsonl", "d")["counts"]["records"] == 5
    assert posttrain(*call).code == 2


def test_labels_outside_the_set_are_skipped_with_their_content(root: Path, posttrain: Call) -> None:
    (root / "posttrain.yaml").write_text('model: tiny\ntask: {labels: ["yes", "no"]}\ndata: {}\n')
    (root / "labels.jsonl").write_text(
        '{"prompt": "a b", "completion": "yse"}\n{"prompt": "c d", "completion": "no"}\n'
    )
    built = add(posttrain, root, "labels.jsonl", "d", "--on-error", "skip")
    assert built["counts"]["records"] == 1
    (row,) = posttrain("data", "show", "d", "--rejected", "-w", root, "--json").json["rejected"]
    assert (row["reason"], row["completion"]) == ("unknown label", "yse")
    assert row["detail"] == "label `yse` is not in the label set; did you mean `yes`?"


def test_faults_of_a_whole_file_still_stop(root: Path, posttrain: Call) -> None:
    (root / "a.csv").write_text("text,label\na b,yes\nc d,no\n")
    skip = ("--on-error", "skip", "-w", root)
    for options, mistake in (
        ((root / "a.csv", "--name", "d", "--column", "prompt=txt"), "a.csv:1: there is no column `txt`"),
        ((root / "none.jsonl", "--name", "d"), "none.jsonl"),
        ((root / "a.csv",), "--on-error: the loop's files are copied whole"),
    ):
        if "--name" not in options:
            (root / "posttrain.yaml").write_text("model: tiny\ndata: {}\n")
        assert mistake in posttrain("data", "add", *options, *skip).mistake
    bad = ("data", "add", root / "a.csv", "--name", "d", "--on-error", "go", "-w", root)
    assert posttrain(*bad).mistake == "--on-error: `go` is neither stop nor skip"
