"""Leaks between two splits are found by kind, and training refuses to start."""

from typing import Any

import pyarrow as pa
import pytest

from posttrain.data.versions.leaks import find_leaks, require_no_leaks
from posttrain.store.errors import UserError
from posttrain.testing.steps import table_of

QUESTION = "Where can I see how much the transfer of my salary to the other bank will cost me in the end?"
RUN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def record(text: str, group: str | None = None, answer: str = "x") -> dict[str, Any]:
    return {"prompt": text, "completion": answer, "group": group}


CLEAN = [record(f"message number {number} says {number * 7919}", f"user {number}") for number in range(40)]

LEAKS = {
    "equals a test input": (
        record("What is my balance?"),
        record(" What is  my balance?", answer="y"),
        "the same input",
    ),
    "group of a test record": (
        record("first call", "user z"),
        record("second message", "user z"),
        "its group `user z`",
    ),
    "like a test input": (record(QUESTION), record(QUESTION.replace("bank", "Bank!")), "similarity 0.9"),
    "shares a 13-gram with a test record": (
        record(f"well, {RUN} and so on"),
        record("count", answer=f"Here: {RUN.title()}!"),
        "1 13-grams of",
    ),
}


def tables(train: list[dict[str, Any]], test: list[dict[str, Any]], validation: Any = ()) -> dict[str, pa.Table]:
    held_out = {"validation": table_of(*validation)} if validation else {}
    return {"train": table_of(*train), **held_out, "test": table_of(*test)}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_planted_leak_is_found_by_kind(kind: str) -> None:
    training_text, test_text, detail = LEAKS[kind]
    result = find_leaks(tables([*CLEAN[:20], training_text], [*CLEAN[20:], test_text]))
    assert [(leak.reason, leak.splits, leak.locations) for leak in result] == [
        (kind, ("train", "test"), ("f:21", "f:21"))
    ]
    assert detail in result[0].detail
    splits = tables([*CLEAN[:20], training_text], [*CLEAN[20:], test_text])
    with pytest.raises(
        UserError, match=r"^support@v2: 1 record of train overlaps with test, the first: f:21 \(train\)"
    ):
        require_no_leaks(splits, "support@v2")


def test_sound_splits_pass() -> None:
    splits = tables(CLEAN[:20], CLEAN[30:], CLEAN[20:30])
    assert find_leaks(splits) == []
    require_no_leaks(splits, "v1")


def test_kinds_that_the_settings_allow_are_no_leaks() -> None:
    for kind, settings in {
        "group of a test record": {"group": False},
        "like a test input": {"threshold": None, "ngram": None},
    }.items():
        training_text, test_text, _ = LEAKS[kind]
        assert find_leaks(tables([training_text], [test_text]), **settings) == []


def test_leaks_between_validation_and_test_are_found() -> None:
    for kind, (validation_row, test_row, _) in LEAKS.items():
        result = find_leaks(tables(CLEAN[:9], [*CLEAN[20:29], test_row], [*CLEAN[10:19], validation_row]))
        expected = [] if kind.startswith("shares") else [(kind, ("validation", "test"))]
        assert [(leak.reason, leak.splits) for leak in result] == expected


def test_every_leak_is_reported_once() -> None:
    pairs = [pair[:2] for pair in LEAKS.values()]
    result = find_leaks(tables([pair[0] for pair in pairs], [pair[1] for pair in pairs]))
    assert sorted(leak.reason for leak in result) == sorted(LEAKS)
    equal_splits = find_leaks(tables(CLEAN, CLEAN))
    assert [leak.reason for leak in equal_splits] == ["equals a test input"] * len(CLEAN)


def test_the_wording_of_a_task_is_no_leak() -> None:
    wording = f"Answer with one of the following labels and nothing else, please: {RUN}. "
    train = [record(f"{wording} message {number} {'abc' * number}", answer=f"{number}") for number in range(12)]
    test = [record(f"{wording} question {number} {'xyz' * number}", answer=f"{number}") for number in range(12)]
    assert find_leaks(tables(train, test), threshold=None) == []


@pytest.mark.parametrize("empty", ["train", "validation", "test"])
def test_an_empty_split_raises(empty: str) -> None:
    splits = {**tables(CLEAN[:20], CLEAN[30:], CLEAN[20:30]), empty: table_of()}
    with pytest.raises(UserError, match=f"v1: the split `{empty}` is empty"):
        require_no_leaks(splits, "v1")
