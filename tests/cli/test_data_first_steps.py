"""``posttrain data`` in a folder without a config: columns, empty files, and messages."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import build
from posttrain.store.errors import UserError

Call = Callable[..., Any]
INLINE = ("--engine", "inline")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Records with other column names."""
    return write(
        tmp_path / "questions.jsonl", *({"question": f"what is {n}", "answer": f"it is {n}"} for n in range(3))
    )


@pytest.mark.parametrize("content", ["", "prompt,completion\n"])
def test_a_file_without_records_is_refused(tmp_path: Path, posttrain: Call, content: str) -> None:
    (tmp_path / "empty.csv").write_text(content)
    outcome = posttrain("data", "add", tmp_path / "empty.csv", "--name", "x", *INLINE, "-w", tmp_path)
    assert outcome.mistake == "empty.csv: the file holds no records; put records into it, or name another file"


def test_columns_are_named_on_the_command_line(questions: Path, tmp_path: Path, posttrain: Call) -> None:
    columns = ("--column", "prompt=question", "--column", "completion=answer")
    assert posttrain("data", "check", questions, *columns, "-w", tmp_path).code == 0
    outcome = posttrain("data", "add", questions, *columns, "--name", "x", *INLINE, "-w", tmp_path, "--json")
    assert outcome.code == 0, outcome
    assert outcome.json["recipe"]["columns"] == {"prompt": "question", "completion": "answer"}
    message = posttrain("data", "add", questions, "--column", "promt=question", "--name", "x", "-w", tmp_path).mistake
    assert message.startswith("--column: `promt=question` names no column; NAME=COLUMN, where NAME is one of prompt")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_column_of_answers_that_is_not_there_is_refused(tmp_path: Path, posttrain: Call, suffix: str) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "where is it", "category": "card"}, {"text": "why"})
    if suffix == ".csv":
        file = tmp_path / "a.csv"
        file.write_text("text,category\nwhere is it,card\nwhy,\n")
    columns = ("--column", "prompt=text", "--column", "completion=categori")
    mistake = posttrain("data", "add", file, *columns, "--name", "x", *INLINE, "-w", tmp_path).mistake
    expected = f"{file.name}:1: there is no column `categori`; the columns are text, category; did you mean `category`?"
    assert mistake == expected
    checked = posttrain("data", "check", file, *columns, "-w", tmp_path)
    assert (checked.code, checked.out.splitlines()[0].partition("/a")[2]) == (2, expected[1:])
    with pytest.raises(UserError, match="there is no column `categori`"):
        build({"name": "x", "files": [file.name], "columns": {"completion": "categori"}, "workspace": tmp_path})
    # The config's columns are those of all files: a pool may lack answers.
    (tmp_path / "posttrain.yaml").write_text("model: tiny\ndata: {columns: {prompt: text, completion: categori}}\n")
    assert posttrain("data", "add", file, "--name", "x", *INLINE, "-w", tmp_path).code == 0


def test_columns_that_are_not_used_are_named(tmp_path: Path, posttrain: Call) -> None:
    (tmp_path / "a.csv").write_text("text,category,id,meta\nwhere is it,card,1,\n")
    for verb in (("check", "a.csv"), ("add", "a.csv", "--name", "x", *INLINE)):
        outcome = posttrain("data", verb[0], tmp_path / verb[1], *verb[2:], "-w", tmp_path)
        assert outcome.code == 0, outcome
        assert "a.csv: category is not used, only kept in `meta`; name what is with" in outcome.err
        assert "completion=category" in outcome.err


def test_check_exits_with_2_only_for_problems_that_add_refuses(tmp_path: Path, posttrain: Call) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "a"}, {"text": "a"})
    outcome = posttrain("data", "check", file, "-w", tmp_path)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1].startswith("`data add` takes the files")
    assert [
        entry["blocking"] for entry in posttrain("data", "check", file, "-w", tmp_path, "--json").json["problems"]
    ] == [False]


def test_missing_files_are_listed_as_problems(tmp_path: Path, posttrain: Call) -> None:
    outcome = posttrain("data", "check", tmp_path / "none*.jsonl", tmp_path / "none.jsonl", "-w", tmp_path, "--json")
    assert outcome.code == 2
    assert outcome.json["counts"] == {"missing file": 2}


def test_output_to_a_pipe_has_whole_lines_and_each_history_once(tmp_path: Path, posttrain: Call) -> None:
    file = write(tmp_path / ("long-" * 20 + ".jsonl"), {"prompt": "where is it " * 9, "completion": "there " * 20})
    for name in ("one", "two"):
        posttrain("data", "add", file, "--name", name, "--step", "exact", *INLINE, "-w", tmp_path)
    output = posttrain("data", "show", "one", "-w", tmp_path).out
    [record] = posttrain("data", "show", "one", "-w", tmp_path, "--json").json["records"]
    assert any(record["id"] in line and file.name in line for line in output.splitlines())
    history = posttrain("data", "why", record["id"], "-w", tmp_path).out
    assert history.count(record["id"]) == 1
    assert "in one@v1.0.0, two@v1.0.0: where" in history
    assert posttrain("data", "diff", "one", "two", "-w", tmp_path).out == "no difference\n"
    assert (
        posttrain("data", "show", "three", "-w", tmp_path).mistake
        == "nothing here is called `three`; posttrain data list"
    )


def test_a_pipe_is_not_counted_as_missing(tmp_path: Path, posttrain: Call) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    outcome = posttrain("data", "check", tmp_path / "pipe.jsonl", tmp_path / "none.jsonl", "--json")
    assert outcome.code == 2
    assert outcome.json["counts"] == {"missing file": 1, "not a file": 1}
