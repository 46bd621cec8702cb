"""No training record leaks a test record, whichever steps the config lists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.versions.version import Dataset, read_dataset
from posttrain.store.errors import UserError

Open = Callable[[Path], Any]
BY_HAND = {"steps": ["exact", "conflicts"]}
LONG = "and the letter says that I should ask you about it before the end of the week"


def dataset(loop: Any, name: str) -> Dataset:
    return read_dataset(loop.store.artifacts.path(loop.metadata.named(name)))


def with_leak(small: Any, last_word: str, pool: int = 12, **changes: Any) -> Path:
    """A workspace whose test file ends in a message of the pool with another last word."""
    root: Path = small(**changes)
    rows = small.rows()
    rows[:12] = [{**row, "text": f"{row['text']} {LONG}"} for row in rows[:12]]
    small.write(root / "pool.csv", rows[:pool], ["text"])
    small.write(root / "answers.csv", rows)
    small.write(root / "test.csv", [*rows[60:80], {**rows[3], "text": rows[3]["text"].replace("week", last_word)}])
    return root


def test_an_equal_input_is_refused_before_any_work(small: Any, open_loop: Open) -> None:
    root = with_leak(small, "week", data=BY_HAND)
    loop = open_loop(root)
    message = r"^data\.steps: 1 training record has an input that .*pool\.csv:5 and test\.csv:22; .*`decontaminate`"
    with pytest.raises(UserError, match=message):
        loop.run()
    assert [run.stage for run in loop.metadata.runs()] == ["collect pool"]
    small.configure(root)
    loop.run(0)


def test_a_shared_run_of_words_is_refused_before_training(small: Any, open_loop: Open) -> None:
    root = with_leak(small, "month", data=BY_HAND)
    loop = open_loop(root)
    with pytest.raises(
        UserError, match=r"^the training set of round 1: 12 records of train overlap with test"
    ) as error:
        loop.run()
    assert "pool.csv:" in str(error.value)
    assert "13-grams of test.csv:22 (test); " in str(error.value)
    assert not [run for run in loop.metadata.runs() if run.stage == "train"]


@pytest.mark.slow
def test_with_the_default_steps_the_same_files_train(small: Any, open_loop: Open) -> None:
    loop = open_loop(with_leak(small, "month", pool=60, data={"steps": [*BY_HAND["steps"], "decontaminate"]}))
    loop.run(1, until="train")
    assert loop.stages("failed") == []


def with_suite(small: Any, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """A workspace with a suite of its own beside the test set."""
    suites = {"test": {"sample": 8}, "extra": {"data": "extra.csv"}}
    root: Path = small(evaluate={"suites": suites, "latency": {"prompts": 0}}, **changes)
    small.write(root / "extra.csv", rows)
    return root


def unrelated_rows(small: Any) -> list[dict[str, Any]]:
    """Two messages that are in no file of the workspace."""
    return [
        {**row, "text": f"{number} quite other words in suite number {number}"}
        for number, row in enumerate(small.rows()[:2])
    ]


def test_records_of_a_suite_are_removed_from_the_pool(small: Any, open_loop: Open) -> None:
    rows = small.rows()
    loop = open_loop(with_suite(small, [*unrelated_rows(small), rows[3]]))
    loop.run(1, until="train")
    (removed,) = [row for row in dataset(loop, "pool").rejected.to_pylist() if row["step"] == "decontaminate"]
    assert (removed["line"], removed["reason"]) == (5, "equals a test input")
    assert "extra.csv:4" in removed["detail"]
    assert loop.stages("failed") == []


def test_a_suite_in_the_pool_is_refused_even_if_a_step_rejects_a_part_of_it(small: Any, open_loop: Open) -> None:
    rows = small.rows()[:60]
    rows[5] = {**rows[4], "text": f"{rows[4]['text']} {LONG}"}
    rows[4] = {**rows[4], "text": f"{rows[4]['text']} {LONG}!"}
    steps = ["exact", {"minhash": {"threshold": 0.9}}, "decontaminate"]
    root = with_suite(small, rows, data={"steps": steps})
    small.write(root / "pool.csv", rows, ["text"])
    with pytest.raises(UserError, match=r"^extra\.csv: all 60 records of the suite stand in the training files"):
        open_loop(root).run()


@pytest.mark.parametrize("steps", [BY_HAND["steps"], [*BY_HAND["steps"], "decontaminate"]])
def test_a_suite_within_the_training_files_is_refused_before_any_work(
    small: Any, open_loop: Open, steps: list[str]
) -> None:
    loop = open_loop(with_suite(small, small.rows()[3:6], data={"steps": steps}))
    with pytest.raises(UserError, match=r"^extra\.csv: all 3 records of the suite stand in the training files"):
        loop.run()
    assert [run.stage for run in loop.metadata.runs()] == ["collect pool"]


def test_a_suite_that_shares_a_record_is_refused_without_decontamination(small: Any, open_loop: Open) -> None:
    loop = open_loop(with_suite(small, [*unrelated_rows(small), small.rows()[3]], data=BY_HAND))
    with pytest.raises(UserError, match=r"^extra\.csv: 1 training record has .*pool\.csv:5 and extra\.csv:4"):
        loop.run()


def test_a_run_of_words_shared_with_a_suite_is_refused_before_training(small: Any, open_loop: Open) -> None:
    root = with_suite(small, unrelated_rows(small), data=BY_HAND)
    rows = [{**row, "text": f"{row['text']} {LONG}"} for row in small.rows()[:12]]
    small.write(root / "pool.csv", rows, ["text"])
    small.write(root / "answers.csv", rows)
    small.write(root / "extra.csv", [*unrelated_rows(small), {**rows[3], "text": f"have you heard {LONG}"}])
    loop = open_loop(root)
    with pytest.raises(
        UserError, match=r"^the training set of round 1: 12 records of train overlap with extra\.csv.*extra\.csv:4"
    ):
        loop.run()


@pytest.mark.slow
def test_records_of_a_later_suite_are_removed_from_earlier_labels(small: Any, open_loop: Open) -> None:
    root = with_suite(small, unrelated_rows(small))
    loop = open_loop(root)
    loop.run(1)
    labelled = dataset(loop, "train").records
    text, label = labelled["prompt"][0][0]["content"].as_py(), labelled["completion"][0].as_py()
    small.write(root / "extra.csv", [*unrelated_rows(small), {"text": text, "label": label}])
    loop = open_loop(root)
    loop.run(until="dataset")
    assert labelled["id"][0].as_py() not in dataset(loop, "train").records["id"].to_pylist()
