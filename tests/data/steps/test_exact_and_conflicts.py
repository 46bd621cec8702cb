"""Exact duplicates, contradicting records and missing answers."""

import pyarrow as pa
import pytest

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
