"""Exact duplicates, contradicting records and missing answers."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.records.record import exact_ids, exact_record_ids
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.duplicates import Conflicts, Exact
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.validity import Answers
from posttrain.testing.steps import StepContract, lines, reasons, table_of


class TestExact(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Exact()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of("a", "b", " a\n", {"prompt": "a", "completion": "x"}, "a", {"prompt": "a ", "completion": "x"})

    def test_the_first_duplicate_stays(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert lines(outcome.kept) == [1, 2, 4]
        rejected_rows = outcome.rejected.to_pylist()
        assert [(row["line"], row["detail"]) for row in rejected_rows] == [
            (3, "the same as f:1"),
            (5, "the same as f:1"),
            (6, "the same as f:4"),
        ]
        assert all(row["kept"] == row["cluster"] == row["id"] for row in rejected_rows)


class TestConflicts(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Conflicts()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            {"prompt": "a", "completion": "x"},
            {"prompt": "b", "completion": "x"},
            {"prompt": "A", "completion": "y"},
            {"prompt": "a", "completion": "y"},
            {"prompt": "b", "completion": "x"},
            {"prompt": "b", "completion": "y", "rejected": "x"},
        )

    def test_contradicting_records_are_all_rejected(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert lines(outcome.kept) == [2, 3, 5, 6]
        assert outcome.rejected["detail"].to_pylist() == ["`x` at f:1; `y` at f:4"] * 2


class TestAnswers(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Answers()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of({"prompt": "a", "completion": "x"}, {"prompt": "b"}, "plain")

    def test_plain_text_needs_no_answer(self, step: DataStep, table: pa.Table) -> None:
        assert reasons(apply_step(step, table)) == {2: "no answer"}


INSIDE = "for x in rows:\n    print(x)\n    return x\n"
OUTSIDE = "for x in rows:\n    print(x)\nreturn x\n"
ANSWERS = [{"prompt": "write it", "completion": program} for program in (INSIDE, OUTSIDE)]
QUESTIONS = [{"prompt": program, "completion": "x"} for program in (INSIDE, OUTSIDE)]
PAIRS = [{"prompt": "write it", "completion": better, "rejected": "no"} for better in (INSIDE, OUTSIDE)]


@pytest.mark.parametrize("rows", [ANSWERS, QUESTIONS, PAIRS, [INSIDE, OUTSIDE]])
def test_programs_that_differ_in_indentation_are_not_duplicates(rows: list[Any]) -> None:
    assert reasons(apply_step(Exact(), table_of(*rows, rows[0]))) == {3: "exact duplicate"}


def test_programs_that_differ_in_indentation_are_two_answers_and_two_questions() -> None:
    assert reasons(apply_step(Conflicts(), table_of(*ANSWERS))) == dict.fromkeys((1, 2), "conflicting labels")
    other = [{**QUESTIONS[0], "completion": "y"}, {**QUESTIONS[1], "completion": "y"}]
    assert reasons(apply_step(Conflicts(), table_of(QUESTIONS[0], other[1]))) == {}
    assert reasons(apply_step(Conflicts(), table_of(QUESTIONS[0], other[0]))) == dict.fromkeys(
        (1, 2), "conflicting labels"
    )


lines_of_text = st.lists(st.sampled_from(["", " ", "  ", "a", " a", "a ", "\tb", "caf\u00e9"]), max_size=4)


@given(st.lists(lines_of_text, min_size=2, max_size=2), st.sampled_from(["\n", "\r\n", "\r"]))
def test_exact_ids_tell_texts_of_several_lines_apart(texts: list[list[str]], end: str) -> None:
    """Two texts have one exact id if they are equal, or on one line each and equal but for whitespace."""
    first, second = ("\n".join(["x", *lines, "x"]) for lines in texts)
    ids, input_ids = exact_ids(table_of(first, second, second.replace("\n", end)))
    assert (ids[0] == ids[1]) == (input_ids[0] == input_ids[1]) == (first == second)
    assert ids[1] == ids[2]
    flat = table_of(*(f" {text.replace(chr(10), ' ')}\n" for text in (first, second)))
    assert exact_ids(flat) == (flat["id"].to_pylist(), flat["input_id"].to_pylist())
    for table in (flat, table_of(first, second)):
        assert [exact_record_ids(row) for row in table.to_pylist()] == list(zip(*exact_ids(table), strict=True))
