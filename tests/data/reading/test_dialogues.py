"""Preference pairs that are whole dialogues in one string, as HH-RLHF publishes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.reading.reader import check_file, read
from posttrain.data.records.record import concat
from posttrain.store.errors import UserError

PROMPT = "\n\nHuman: Where is it?\n\nAssistant: What?\n\nHuman: The\n\nbox."
TURNS = [("user", "Where is it?"), ("assistant", "What?"), ("user", "The\n\nbox.")]


def pairs(folder: Path, *rows: tuple[str, str]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"chosen": chosen, "rejected": rejected}) + "\n" for chosen, rejected in rows))
    return path


def read_first(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = concat(list(read(path, name="a.jsonl"))).to_pylist()[0]
    return record


@pytest.mark.parametrize(
    ("chosen", "rejected", "completion", "worse"),
    [
        (" Here.", " No.", "Here.", "No."),
        (" Here.\n\nAssistant: And there.", " No.", "Here.\n\nAnd there.", "No."),
    ],
)
def test_the_common_beginning_is_the_prompt(
    tmp_path: Path, chosen: str, rejected: str, completion: str, worse: str
) -> None:
    record = read_first(pairs(tmp_path, (f"{PROMPT}\n\nAssistant:{chosen}", f"{PROMPT}\n\nAssistant:{rejected}")))
    assert [(turn["role"], turn["content"]) for turn in record["prompt"]] == TURNS
    assert (record["completion"], record["rejected"], record["meta"]) == (completion, worse, "{}")


def test_an_empty_answer_is_skipped_and_counted(tmp_path: Path) -> None:
    good = (f"{PROMPT}\n\nAssistant: a", f"{PROMPT}\n\nAssistant: b")
    path = pairs(tmp_path, good, (f"{PROMPT}\n\nAssistant:", f"{PROMPT}\n\nAssistant: b"))
    assert concat(list(read(path))).num_rows == 1
    assert [(problem.line, problem.kind, problem.blocking) for problem in check_file(path)] == [
        (2, "empty answer", False)
    ]


@pytest.mark.parametrize(
    "chosen", ["\n\nHuman: a", "\n\nHuman: x\n\nAssistant: a\n\nHuman: b\n\nAssistant: c", f"{PROMPT}\n\nHuman: b"]
)
def test_dialogues_that_differ_before_the_answer_raise(tmp_path: Path, chosen: str) -> None:
    path = pairs(tmp_path, (chosen, f"{PROMPT}\n\nAssistant: b"))
    with pytest.raises(UserError, match=r"^a\.jsonl:1: `(chosen|rejected)` does not end in one answer"):
        read_first(path)
