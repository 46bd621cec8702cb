"""``posttrain config check`` reads every file that the config names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.store.workspace import Workspace

Call = Callable[..., Any]

LABELS = ("card", "refund", "price")


def rows(count: int, start: int = 0) -> list[tuple[str, str]]:
    return [(f"message {start + number}", LABELS[number % 2]) for number in range(count)]


def write(path: Path, records: list[tuple[str, str]], header: str = "text,label") -> None:
    path.write_text("\n".join([header, *(",".join(record) for record in records)]) + "\n", encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace of a pool, labelled and test records; no record has the label `price`."""
    write(tmp_path / "pool.csv", rows(20))
    write(tmp_path / "labelled.csv", rows(6, 100))
    write(tmp_path / "test.csv", rows(10, 200))
    write_config(tmp_path)
    return tmp_path


def write_config(root: Path, **data: Any) -> None:
    config = {
        "model": "tiny",
        "task": {"labels": list(LABELS)},
        "data": {
            **{"pool": "pool.csv", "labelled": "labelled.csv", "test": "test.csv"},
            "columns": {"prompt": "text", "completion": "label"},
            **data,
        },
    }
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def test_files_labels_and_notes_are_reported(root: Path, posttrain: Call) -> None:
    outcome = posttrain("config", "check", "-w", root)
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["pool.csv", "pool", "20", "text,", "label"],
        ["labelled.csv", "labelled", "6", "text,", "label", "2", "of", "3"],
        ["test.csv", "test", "10", "text,", "label", "2", "of", "3"],
    ]
    assert lines[4].startswith("note: 1 of 3 labels occur in no test record: price; no metric")
    assert lines[5].startswith("note: 1 of 3 labels occur in no labelled record: price; only new labels")
    assert lines[6:] == ["the config is right"]
    report = posttrain("config", "check", "-w", root, "--json").json
    assert [file["records"] for file in report["files"]] == [20, 6, 10]
    assert report["files"][2]["labels"] == {"card": 5, "refund": 5}
    assert report["errors"] == []
    assert len(report["notes"]) == 2


def test_all_mistakes_are_reported_at_once_a_line_each(root: Path, posttrain: Call) -> None:
    write(root / "test.csv", [("a", "crad")] * 3 + [("b", "zzzz"), *rows(4, 300)])
    write(root / "labelled.csv", rows(4, 400), header="text,lable")
    outcome = posttrain("config", "check", "-w", root)
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 2
    column = "labelled.csv:1: there is no column `label`; the columns are text, lable; did you mean `lable`?"
    assert lines[0] == f"posttrain: {column}"
    assert (
        "test.csv: 2 labels are not in the label set: `crad` (3 records, did you mean `card`?), `zzzz` (1 record);"
        in (lines[1])
    )
    outcome = posttrain("config", "check", "-w", root, "--json")
    assert outcome.code == 2
    assert outcome.json["errors"][0] == column


@pytest.mark.parametrize(("steps", "code"), [(["exact"], 2), (["exact", "decontaminate"], 0)])
def test_inputs_of_pool_and_test_are_compared(root: Path, posttrain: Call, steps: list[str], code: int) -> None:
    write(root / "pool.csv", rows(20) + rows(3, 200))
    write_config(root, steps=steps)
    outcome = posttrain("config", "check", "-w", root)
    assert outcome.code == code
    line = "pool.csv: 3 inputs are also in test.csv, the first on line 22, there on line 2;"
    assert line in (outcome.err if code else outcome.out)


def test_a_run_refuses_what_the_check_refuses(root: Path, posttrain: Call) -> None:
    for data, where in (
        ({"test": None}, "data.test: there is no record to test on"),
        ({"pool": [], "labelled": []}, "data.pool: no file of records is named"),
        ({"pool": "none.csv"}, "none.csv: there is no such file"),
        ({"columns": {"prompt": "text"}}, "labelled.csv: no record has an answer"),
    ):
        write_config(root, **data)
        assert where in posttrain("config", "check", "-w", root).err
        assert posttrain("run", "-w", root).code == 2


def test_answers_that_look_like_labels_are_noted(root: Path, posttrain: Call) -> None:
    config = yaml.safe_load((root / "posttrain.yaml").read_text("utf-8"))
    (root / "posttrain.yaml").write_text(yaml.safe_dump({**config, "task": {}}), encoding="utf-8")
    notes = posttrain("config", "check", "-w", root, "--json").json["notes"]
    roles = ("test", "labelled")
    assert [note.partition(":")[0] for note in notes] == [
        f"the {role} records have only 2 different answers" for role in roles
    ]
    write(root / "test.csv", [(f"question {number}", f"answer {number}") for number in range(9)])
    assert len(posttrain("config", "check", "-w", root, "--json").json["notes"]) == 1


def test_suites_and_the_file_of_answers_are_read(root: Path, posttrain: Call) -> None:
    config = yaml.safe_load((root / "posttrain.yaml").read_text("utf-8"))
    config["evaluate"] = {"suites": {"test": {}, "hard": {"data": "hard.jsonl", "columns": {"prompt": "q"}}}}
    config["label"] = {"annotator": "oracle", "file": "pool.csv"}
    config["evaluate"]["suites"]["hard"]["columns"]["completion"] = "a"
    (root / "posttrain.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (root / "hard.jsonl").write_text(json.dumps({"q": "is it cheap", "a": "price"}) + "\n", encoding="utf-8")
    files = posttrain("config", "check", "-w", root, "--json").json["files"]
    assert [(file["role"], file["records"]) for file in files[3:]] == [("suite hard", 1), ("answers", 20)]
    assert files[3]["columns"] == ["q", "a"]


@pytest.mark.parametrize(
    ("rule", "note"),
    [
        ("gain.accuracy.low > -0.1", True),
        ("accuracy >= 0.5", False),
        ("gain.accuracy.low > 0", False),  # only a better candidate passes, however many records there are
        ("gain.accuracy.low > -0.5", False),
    ],
)
def test_a_rule_that_the_test_set_cannot_decide_is_named(root: Path, posttrain: Call, rule: str, note: bool) -> None:
    """An equal candidate of whom 10 records tell too little is refused for ever."""
    config = yaml.safe_load((root / "posttrain.yaml").read_text())
    (root / "posttrain.yaml").write_text(yaml.safe_dump({**config, "gate": {"deploy": [rule]}}))
    outcome = posttrain("config", "check", "-w", root)
    assert outcome.code == 0
    assert ("10 records of suite test are too few, 40 are enough where no answer differs" in outcome.out) is note
    assert ("gate.deploy" in outcome.out) is note


@pytest.mark.slow
def test_a_new_database_is_not_a_lost_one(root: Path, posttrain: Call, postgres_url: str) -> None:
    """The config names an empty database before the first run, which makes its tables."""
    config = yaml.safe_load((root / "posttrain.yaml").read_text())
    (root / "posttrain.yaml").write_text(yaml.safe_dump({**config, "store": {"database": postgres_url}}))
    Workspace.create(root).close()
    assert posttrain("config", "check", "-w", root).out.endswith("the config is right\n")
    assert posttrain("status", "-w", root).mistake.endswith(
        "the database is empty, and nothing is stored here yet; posttrain run"
    )
