"""Each rule of FineWeb, just under and just over its threshold."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.web_pages import Fineweb
from posttrain.testing.steps import StepContract, reasons, table_of


def numbered_lines(count: int, end: str = ".", length: int = 40) -> list[str]:
    """Different lines of one length."""
    return [f"line {number:03d} with words".ljust(length - 1, "x") + end for number in range(count)]


class TestFineweb(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Fineweb()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            "\n".join(numbered_lines(10)), "short", {"prompt": "Is it?", "completion": "\n".join(numbered_lines(3))}
        )

    def test_facts_and_details(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert [(row["reason"], row["detail"], row["score"]) for row in outcome.rejected.to_pylist()] == [
            ("lines without punctuation", "punctuated lines 0, must be more than 0.12", 0)
        ]
        assert outcome.facts["short_lines"].to_pylist() == [0, 1, 0.25]
        assert outcome.facts["lines_per_word"].to_pylist() == [9 / 40, 0, 3 / 14]


@pytest.mark.parametrize(
    ("under", "over", "reason"),
    [
        (
            numbered_lines(13, "x") + numbered_lines(2),
            numbered_lines(22, "x") + numbered_lines(3),
            "lines without punctuation",
        ),
        (
            numbered_lines(34) + numbered_lines(66, length=30),
            numbered_lines(33) + numbered_lines(67, length=30),
            "short lines",
        ),
        (numbered_lines(10) + ["x" * 31 + "."] * 2 + ["y" * 60], ["x" * 39 + "."] * 2 + numbered_lines(18), None),
        (["x" * 39 + "."] * 2 + numbered_lines(19), ["x" * 39 + "."] * 3 + numbered_lines(17), "repeated lines"),
        (["a b c d e f" + "x" * 30 + "."], ["a b c" + str(n) + "x" * 30 + "." for n in range(11)], "few words a line"),
    ],
)
def test_just_under_and_just_over(under: list[str], over: list[str], reason: str | None) -> None:
    assert reasons(apply_step(Fineweb(), table_of("\n".join(under)))) == {}
    assert reasons(apply_step(Fineweb(), table_of("\n".join(over)))) == ({1: reason} if reason else {})


def test_a_share_on_the_bound_is_over_it() -> None:
    """The paper's bounds: 0.12 or less, 0.1 or more, 0.67 or more."""
    assert reasons(apply_step(Fineweb(), table_of("\n".join(numbered_lines(22, "x") + numbered_lines(3))))) == {
        1: "lines without punctuation"
    }
