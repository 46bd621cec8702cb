"""Each rule of table A1, just under and just over its threshold."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.gopher import GopherRepetition
from posttrain.data.steps.step import DataStep
from posttrain.testing.steps import StepContract, reasons, table_of


def distinct_words(count: int, prefix: str = "w") -> str:
    """Words of four characters that all differ."""
    return " ".join(f"{prefix}{number:03d}" for number in range(count))


def shares(name: str, *texts: str) -> list[float]:
    """What the step measures of each text."""
    return apply_step(GopherRepetition(), table_of(*texts)).facts[name].to_pylist()


class TestGopherRepetition(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return GopherRepetition()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            distinct_words(50),
            "again and again\n" * 4,
            {"prompt": distinct_words(20), "completion": f"{distinct_words(20)} {distinct_words(20)}"},
            {"prompt": "yes", "completion": "no"},
            "one\n\ntwo\n\none\n\none",
        )

    def test_reasons_and_facts(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == {2: "repeated lines", 3: "top 4 gram", 5: "repeated lines"}
        assert outcome.rejected.to_pylist()[0]["detail"] == "repeated lines 0.75, must be at most 0.3"
        assert outcome.facts["repeated_5_grams"].to_pylist()[:3] == [0, 3 / 4, 2 / 3]
        assert len(outcome.facts) == 13


@pytest.mark.parametrize("joint", ["\n", "\n \n"])
def test_lines_and_paragraphs_just_under_and_just_over(joint: str) -> None:
    unit = "line" if joint == "\n" else "paragraph"
    under, over = (joint.join(["a"] * count + list("bcdefghijk")[: 10 - count]) for count in (4, 5))
    low, high = shares(f"repeated_{unit}s", under, over)
    assert low <= 0.3 < high
    assert reasons(apply_step(GopherRepetition(), table_of(over))) == {1: "repeated lines"}
    under, over = (joint.join(["aa", "aa", "b" * count]) for count in (6, 5))
    low, high = shares(f"repeated_{unit}_characters", under, over)
    assert low <= 0.2 < high


@pytest.mark.parametrize(("n", "limit"), [(2, 0.20), (3, 0.18), (4, 0.16)])
def test_the_most_frequent_n_gram_just_under_and_just_over(n: int, limit: float) -> None:
    gram = distinct_words(n, "g")
    num_words = round(2 * n / limit)  # at this length two occurrences are the limit's share
    under = f"{gram} {distinct_words(num_words - 2 * n + 1)} {gram}"
    over = f"{gram} {distinct_words(num_words - 2 * n - 1)} {gram}"
    low, high = shares(f"top_{n}_gram", under, over)
    assert low <= limit < high
    assert f"top {n} gram" in reasons(apply_step(GopherRepetition(), table_of(over)))[1]


@pytest.mark.parametrize(("n", "limit"), [(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)])
def test_repeated_n_grams_just_under_and_just_over(n: int, limit: float) -> None:
    gram = distinct_words(n, "g")
    num_words = int(n / limit)
    under = f"{gram} {distinct_words(num_words - 2 * n + 1)} {gram}"
    over = f"{gram} {distinct_words(num_words - 2 * n - 1)} {gram}"
    low, high = shares(f"repeated_{n}_grams", under, over)
    assert low <= limit < high
    assert reasons(apply_step(GopherRepetition(), table_of(over)))


def test_short_texts_pass() -> None:
    assert not reasons(apply_step(GopherRepetition(), table_of("yes", "call me back", "")))
