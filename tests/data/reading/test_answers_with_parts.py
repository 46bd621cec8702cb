"""Answers that files give as lists and numbers, and what `data check` and feedback say about wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import build
from posttrain.data.config import DataConfig
from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.ingest import add_feedback, ingest
from posttrain.data.reading.memory import read_memory
from posttrain.data.reading.reader import check_file, read
from posttrain.data.sets.pool_and_test import build_pool_and_test
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

CHOICES = TaskConfig(kind="choices", labels=["card", "cash"])
SPANS = TaskConfig(kind="spans", labels=["thing"])
RATING = TaskConfig(kind="rating", labels=["1", "2"])
COLUMNS = {"prompt": "text", "completion": "label"}


@pytest.mark.parametrize(
    ("task", "answers", "texts"),
    [
        (CHOICES, [["cash", "card"], [], "cash", None, " "], ["card; cash", "none", "cash", None, None]),
        (RATING, [2, "1", None], ["2", "1", None]),
        (SPANS, [[[3, 7, "thing"]], [], '[{"text": "my", "label": "thing"}]'], ["cash", None, "my"]),
    ],
)
def test_lists_and_numbers_are_answers(task: TaskConfig, answers: list[Any], texts: Any, tmp_path: Path) -> None:
    if task is SPANS:
        texts = [json.dumps([{"label": "thing", "text": words}] if words else []) for words in texts]
    rows = [{"text": "my cash", "label": answer} for answer in answers]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"columns": COLUMNS, "read_answer": task.read_answer}
    for tables in (read(file, **options), read_memory(rows, "data", **options)):
        (table,) = tables
        assert table["completion"].to_pylist() == texts
    if task is not RATING:
        with pytest.raises(UserError, match="`completion` must be"):
            list(read(file, COLUMNS))


def test_turns_stay_an_answer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "Hi", "completion": [{"role": "assistant", "content": "cash"}]}))
    (table,) = read(file, read_answer=CHOICES.read_answer)
    assert table["completion"].to_pylist() == ["cash"]


def test_a_check_names_wrong_answers_and_conflicts_of_several_labels(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    answers = ["card; cash", ["cash", "card"], "cash", "csah"]
    file.write_text("".join(json.dumps({"text": "my cash", "label": answer}) + "\n" for answer in answers))
    options: dict[str, Any] = {"name": "rows.jsonl", "read_answer": CHOICES.read_answer}
    problems = check_file(file, COLUMNS, CHOICES.label_names, **options)
    assert [(problem.line, problem.kind) for problem in problems] == [
        *((2, "duplicate"), (3, "conflicting labels"), (4, "unknown label"))
    ]
    # The answers of a pool are hidden, whatever they are.
    assert not [problem for problem in check_file(file, COLUMNS, None, **options) if problem.blocking]


def test_feedback_that_the_task_cannot_have_is_set_aside(tmp_path: Path) -> None:
    with Inbox(tmp_path / "inbox") as inbox:
        for number, answer in enumerate(("cash; card", "refund")):
            entry = {"id": str(number), "prompt": f"Where {number}?", "completion": "cash", "corrected_answer": answer}
            inbox.append(Feedback(**entry)).result()
    written = add_feedback(tmp_path, ingest(tmp_path / "inbox"), None, (), CHOICES.read_answer)
    (file,) = [path for path in written if path.parent.name == "labelled"]
    assert len(file.read_text().splitlines()) == 1
    (rejected,) = (tmp_path / "inbox").rglob("rejected/*.jsonl")
    assert "label `refund` is not in the label set" in rejected.read_text()


def test_answers_of_a_version_are_read_as_those_of_a_file(tmp_path: Path) -> None:
    """A version is built without the task: its records get the ids of the answers that are read."""
    rows = [{"text": f"my cash {number}", "label": answer} for number, answer in enumerate(("cash;card", "cash"))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "another", "label": "card"}))
    files = {"files": ["rows.jsonl"], "columns": COLUMNS, "splits": None}
    version = build({"name": "set", **files, "steps": ["exact"], "workspace": tmp_path, "engine": "inline"})
    labelled = []
    for name in ("set", "rows.jsonl"):
        config = DataConfig.read({"labelled": [name], "test": "test.jsonl", "columns": COLUMNS}, "posttrain.yaml")
        options: dict[str, Any] = {"versions": {"set": version}, "read_answer": CHOICES.read_answer}
        labelled.append(build_pool_and_test(config, tmp_path, CHOICES.label_names, **options).labelled)
    assert labelled[0]["completion"].to_pylist() == ["card; cash", "cash"]
    for name in ("id", "input_id", "completion"):
        assert labelled[0][name].to_pylist() == labelled[1][name].to_pylist()
