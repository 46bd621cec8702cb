"""Columns beside a question that belong to the conversation: the system message and earlier turns."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from posttrain.data.reading.reader import find_problems, read, unused_columns, unused_columns_note
from posttrain.data.records.record import concat

SYSTEM = {"role": "system", "content": "Be kind."}
EARLIER = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
USER = {"role": "user", "content": "Where is it?"}
TURNS = [USER, {"role": "assistant", "content": "Here."}]
SHAREGPT = [{"from": "human", "value": "Where is it?"}, {"from": "gpt", "value": "Here."}]

WITH_HISTORY: list[dict[str, Any]] = [
    {"instruction": "Where is it?", "input": "", "output": "Here."},
    {"prompt": "Where is it?", "completion": "Here."},
    {"prompt": "Where is it?", "chosen": "Here.", "rejected": "No."},
    {"instruction": "Where is it?", "input": "", "chosen": "Here.", "rejected": "No."},
    {"chosen": TURNS, "rejected": [USER, {"role": "assistant", "content": "No."}]},
]
WITHOUT_HISTORY: list[dict[str, Any]] = [{"messages": TURNS}, {"conversations": SHAREGPT}]


def write(folder: Path, suffix: str, *rows: dict[str, Any]) -> Path:
    path = folder / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
                for row in rows
            )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "suffix"),
    [
        pytest.param(row, suffix, id=f"{', '.join(row)} in {suffix}")
        for row in WITH_HISTORY + WITHOUT_HISTORY
        for suffix in (".jsonl", ".csv", ".parquet")
        if suffix != ".csv" or not isinstance(row.get("chosen"), list)  # a cell holds one answer
    ],
)
def test_every_shape_reads_the_system_message(tmp_path: Path, row: dict[str, Any], suffix: str) -> None:
    path = write(tmp_path, suffix, {**row, "system": "Be kind."}, {**row, "system": "Be brief."}, {**row, "system": ""})
    records = concat(list(read(path)))
    brief = {**SYSTEM, "content": "Be brief."}
    assert records["prompt"].to_pylist() == [[SYSTEM, USER], [brief, USER], [USER]]
    assert len(set(records["input_id"].to_pylist())) == 3
    assert records["completion"].to_pylist() == ["Here."] * 3
    assert unused_columns(path, "a", None) == []
    # Two questions under two system messages do not contradict each other.
    assert list(find_problems(path, labels=["Here."])) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("row", WITH_HISTORY[:4], ids=lambda row: ", ".join(row))
def test_earlier_turns_stand_between_system_message_and_question(
    tmp_path: Path, row: dict[str, Any], suffix: str
) -> None:
    path = write(
        tmp_path,
        suffix,
        {"history": [["Hi.", "Hello."]], "system": "Be kind.", **row},
        {"history": [], "system": None, **row},
    )
    assert concat(list(read(path)))["prompt"].to_pylist() == [[SYSTEM, *EARLIER, USER], [USER]]
    assert unused_columns(path, "a", None) == []


def test_history_may_be_turns_and_a_conversation_may_repeat_the_system_message(tmp_path: Path) -> None:
    rows = [
        {"prompt": [SYSTEM, USER], "completion": "Here.", "history": EARLIER, "system": "Be kind."},
        {"prompt": "Where is it?", "completion": "Here.", "history": [SYSTEM, *EARLIER], "system": None},
    ]
    prompts = concat(list(read(write(tmp_path, ".jsonl", *rows))))["prompt"].to_pylist()
    assert prompts == [[SYSTEM, *EARLIER, USER]] * 2


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (
            {"question": "Where is it?", "answer": "Here.", "rules": "Be kind."},
            {"prompt": "question", "completion": "answer", "system": "rules"},
        ),
        ({"instruction": "Where is it?", "output": "Here.", "rules": "Be kind."}, {"system": "rules"}),
        ({"conversations": SHAREGPT, "rules": "Be kind."}, {"system": "rules"}),
    ],
)
def test_a_column_is_mapped_to_the_system_message(tmp_path: Path, row: dict[str, Any], columns: dict[str, str]) -> None:
    record = concat(list(read(write(tmp_path, ".jsonl", row), columns))).to_pylist()[0]
    assert (record["prompt"], record["completion"], record["meta"]) == ([SYSTEM, USER], "Here.", "{}")


def test_the_note_says_how_to_use_a_column_with_a_longer_name() -> None:
    note = unused_columns_note("a", ["id_2", "system_prompt"], None)
    assert "id_2, system_prompt are not used" in note
    assert "such as system=system_prompt" in note


def test_a_column_may_not_contradict_the_system_message_of_its_conversation(tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl", {"prompt": [SYSTEM, USER], "completion": "Here.", "system": "Be brief."})
    (problem,) = find_problems(path)
    assert (problem.line, problem.kind) == (1, "two system messages")
