"""Each quality rule, just under and just over its threshold."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.gopher import Gopher
from posttrain.data.steps.step import DataStep
from posttrain.testing.steps import StepContract, reasons, table_of


def page(num_words: int, *, filling: str = "word", start: str = "the to") -> str:
    """A text of ``num_words`` words."""
    return " ".join([*start.split(), *[filling] * (num_words - len(start.split()))])


def lines_of(count: int, special: int, *, prefix: str = "", suffix: str = "") -> str:
    """Lines of ten words, the first ``special`` of them with a prefix and a suffix."""
    line = page(10)
    return "\n".join(f"{prefix}{line}{suffix}" if number < special else line for number in range(count))


class TestGopher(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Gopher()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(page(60), page(10), {"prompt": page(30), "completion": page(30)}, page(60, filling="1"))

    def test_facts_and_details(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert [(row["reason"], row["detail"], row["score"]) for row in outcome.rejected.to_pylist()] == [
            ("too few words", "words 10, must be at least 50", 10),
            ("short words", "mean word length 1.05, must be at least 3", 63 / 60),
        ]
        assert outcome.facts["words"].to_pylist() == [60, 10, 60, 60]
        assert outcome.facts["alphabetic_words"].to_pylist() == [1, 1, 1, 2 / 60]


@pytest.mark.parametrize(
    ("under", "over", "reason"),
    [
        (page(50), page(49), "too few words"),
        (page(100_000), page(100_001), "too many words"),
        ("the to " + "aaa " * 47 + "aaaa", "the to " + "aaa " * 47 + "aaa", "short words"),
        (page(49) + " " + "a" * 307, page(49) + " " + "a" * 308, "long words"),
        (page(47) + " # # # #", page(46) + " # # # # # #", "many hash signs"),
        (page(50) + "..." * 5 + "!", page(50) + "..." * 5 + "…!", "many ellipses"),
        (lines_of(10, 9, prefix="- "), lines_of(10, 10, prefix="• "), "bulleted lines"),
        (lines_of(10, 3, suffix="..."), lines_of(10, 4, suffix="…"), "lines that break off"),
        (page(80) + " 2024" * 20, page(80) + " 2024" * 21, "few words with letters"),
        (page(60, start="The With"), page(60, start="the the"), "few stop words"),
    ],
)
def test_just_under_and_just_over(under: str, over: str, reason: str) -> None:
    assert reasons(apply_step(Gopher(), table_of(under))) == {}
    assert reasons(apply_step(Gopher(), table_of(over))) == {1: reason}


def test_settings_change_and_disable_rules() -> None:
    german = page(60, start="der und", filling="Wort")
    assert reasons(apply_step(Gopher(), table_of(german))) == {1: "few stop words"}
    assert not reasons(apply_step(Gopher(stop_words=("der", "und")), table_of(german)))
    assert not reasons(apply_step(Gopher(min_stop_words=None), table_of(german)))
    assert not reasons(apply_step(Gopher(min_words=None), table_of(page(3))))


def test_only_the_field_is_read_and_a_missing_field_passes() -> None:
    table = table_of({"prompt": "short", "completion": page(60)}, {"prompt": page(60)}, page(60))
    assert reasons(apply_step(Gopher(field="answer"), table)) == {}
    assert reasons(apply_step(Gopher(field="input"), table)) == {1: "too few words"}
