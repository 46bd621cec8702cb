"""Each rule of table A1, just under and just over its threshold."""

import pyarrow as pa
import pytest

from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.gopher import GopherRepetition
from posttrain.data.steps.step import Step
from posttrain.testing.steps import StepContract, reasons, table_of


def different(count: int, prefix: str = "w") -> str:
    """Words of four characters that all differ."""
    return " ".join(f"{prefix}{number:03d}" for number in range(count))


def only(**settings: object) -> GopherRepetition:
    """The step with no rules but those given."""
    nothing = {
        "max_lines": None,
        "max_paragraphs": None,
        "max_line_characters": None,
        "max_paragraph_characters": None,
        "max_top_ngram": {},
        "max_repeated_ngrams": {},
    }
    return GopherRepetition.model_validate({**nothing, **settings})


class TestGopherRepetition(StepContract):
    @pytest.fixture
    def step(self) -> Step:
        return GopherRepetition()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            different(50),
            "again and again\n" * 4,
            {"prompt": different(20), "completion": f"{different(20)} {different(20)}"},
            {"prompt": "yes", "completion": "no"},
            "one\n\ntwo\n\none\n\none",
        )

    def test_reasons_and_facts(self, step: Step, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert reasons(outcome) == {2: "repeated lines", 3: "top 4 gram", 5: "repeated lines"}
        assert outcome.rejected.to_pylist()[0]["detail"] == "repeated lines 0.75, must be at most 0.3"
        assert outcome.facts["repeated_5_grams"].to_pylist()[:3] == [0, 3 / 4, 2 / 3]
        assert len(outcome.facts) == 13

    def test_the_thresholds_are_those_of_the_table(self) -> None:
        step = GopherRepetition()
        assert (step.max_lines, step.max_paragraphs) == (0.30, 0.30)
        assert (step.max_line_characters, step.max_paragraph_characters) == (0.20, 0.20)
        assert step.max_top_ngram == {2: 0.20, 3: 0.18, 4: 0.16}
        assert step.max_repeated_ngrams == {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


@pytest.mark.parametrize("joint", ["\n", "\n \n"])
def test_lines_and_paragraphs_just_under_and_just_over(joint: str) -> None:
    what = "line" if joint == "\n" else "paragraph"
    step, characters = only(**{f"max_{what}s": 0.3}), only(**{f"max_{what}_characters": 0.2})
    under = joint.join(["a"] * 4 + list("bcdefg"))
    over = joint.join(["a"] * 5 + list("bcdef"))
    assert reasons(apply_step(step, table_of(under, over))) == {2: f"repeated {what}s"}
    under = joint.join(["aa", "aa", "b" * 6])
    over = joint.join(["aa", "aa", "b" * 5])
    assert reasons(apply_step(characters, table_of(under, over))) == {2: f"repeated {what} characters"}


@pytest.mark.parametrize(("n", "limit"), [(2, 0.20), (3, 0.18), (4, 0.16)])
def test_the_most_frequent_n_gram_just_under_and_just_over(n: int, limit: float) -> None:
    gram = different(n, "g")
    words = round(2 * n / limit)  # at which two occurrences are the limit's share
    under = f"{gram} {different(words - 2 * n + 1)} {gram}"
    over = f"{gram} {different(words - 2 * n - 1)} {gram}"
    step = only(max_top_ngram={n: limit})
    assert reasons(apply_step(step, table_of(under, over))) == {2: f"top {n} gram"}


@pytest.mark.parametrize(("n", "limit"), [(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)])
def test_repeated_n_grams_just_under_and_just_over(n: int, limit: float) -> None:
    gram = different(n, "g")
    words = int(n / limit)
    under = f"{gram} {different(words - 2 * n + 1)} {gram}"
    over = f"{gram} {different(words - 2 * n - 1)} {gram}"
    step = only(max_repeated_ngrams={n: limit})
    assert reasons(apply_step(step, table_of(under, over))) == {2: f"repeated {n} grams"}


def test_a_short_text_is_not_repetitive_for_being_short() -> None:
    assert not reasons(apply_step(GopherRepetition(), table_of("yes", "call me back", "")))
