"""Lines and pages that the rules of C4 remove."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.web_pages import C4
from posttrain.testing.steps import StepContract, lines, reasons, table_of

GOOD = "It is a fine day. The sun shines.\nWe go to the sea! Do you come?\nYes, I will."


def filter_page(text: str, **settings: object) -> str | None:
    """The text that the step leaves of a page, without a minimum of sentences; None if it rejects the page."""
    outcome = apply_step(C4.model_validate({"min_sentences": 0, **settings}), table_of(text))
    return outcome.kept["text"].to_pylist()[0] if outcome.kept.num_rows else None


class TestC4(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return C4()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            GOOD,
            f"Home | About\n  {GOOD}  \nread more",
            GOOD.replace(" Do you come?", ""),
            f"{GOOD}\nfunction () {{",
            f"{GOOD}\nLorem ipsum dolor sit amet.",
            {"prompt": GOOD, "completion": "no line"},
            {"prompt": [{"role": "user", "content": GOOD}, {"role": "assistant", "content": "ok"}]},
            {"prompt": [{"role": "system", "content": "ok"}, {"role": "user", "content": f"a\n{GOOD}"}]},
        )

    def test_pages(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == {
            3: "too few sentences",
            4: "curly bracket",
            5: "lorem ipsum",
            7: "no line left",
        }
        assert outcome.rejected.to_pylist()[0]["detail"] == "sentences 4, must be at least 5"
        assert outcome.kept["text"].to_pylist()[:2] == [GOOD, GOOD]
        assert outcome.facts["sentences"].to_pylist() == [5, 5, 4, 5, 6, 5, 5, 5]

    def test_the_system_turn_stays(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert lines(outcome.kept) == [1, 2, 6, 8]
        assert [turn["content"] for turn in outcome.kept["prompt"].to_pylist()[-1]] == ["ok", GOOD]
        assert outcome.changed.num_rows == 2

    def test_the_step_is_idempotent(self, step: DataStep, table: pa.Table) -> None:
        result = apply_step(step, table).kept
        assert apply_step(step, result).kept.equals(result)


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("Three words here.", True),
        ("Two words.", False),
        ("It ends well!", True),
        ("Does it end?", True),
        ('He said "no way"', True),
        ("It does not end", False),
        ("It breaks off...", False),
        ("It breaks off…", False),
        (f"A word of {'x' * 999}.", True),
        (f"A word of {'x' * 1000}.", False),
        ("Please enable JavaScript in it.", False),
        ("Read our Privacy Policy first.", False),
        ("This site uses cookies now.", False),
        ("We eat cookies at tea.", True),
    ],
)
def test_each_rule_for_lines(line: str, stays: bool) -> None:
    assert filter_page(f"A line that stays.\n{line}") == ("A line that stays." + (f"\n{line}" if stays else ""))


def test_citations_are_removed() -> None:
    assert filter_page("So it was.[1]\nSo it[23] is not[citation needed].") == "So it was.\nSo it is not."


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("no end at all", {"terminal_punctuation": False}),
        ("Use { and } here.", {"curly_brackets": False}),
    ],
)
def test_rules_that_other_texts_break_can_be_disabled(text: str, settings: dict[str, object]) -> None:
    assert filter_page(text) is None
    assert filter_page(text, **settings) == text


def test_only_the_field_is_read_and_a_missing_field_passes() -> None:
    table = table_of({"prompt": "ok", "completion": f"{GOOD}\nend"}, {"prompt": "ok"})
    outcome = apply_step(C4(field="answer"), table)
    assert outcome.kept["completion"].to_pylist() == [GOOD, None]
    assert outcome.facts["sentences"].to_pylist() == [5, None]
