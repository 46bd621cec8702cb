"""Long runs of words that stand earlier: the same as by an exhaustive search."""

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.duplicates.repeated_substrings import (
    RepeatedSpan,
    comparable_words,
    concatenate_windows,
    find_repeats,
    fingerprints,
    repeated_values,
    verify_span,
    windows,
)
from posttrain.data.steps.apply import apply_step
from posttrain.data.steps.step import Step
from posttrain.data.steps.substring import Substring
from posttrain.testing.steps import StepContract, lines, table_of

LENGTH = 10


def prose(seed: int, count: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 10_000, count))


def words(text: str, begin: int, end: int) -> str:
    return " ".join(text.split()[begin:end])


def exhaustive(texts: list[str], length: int) -> list[list[int]]:
    """The words of every text that lie in a window that stands earlier, by a table of all windows."""
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    result = []
    for number, text in enumerate(texts):
        own = text.lower().split()
        removed: set[int] = set()
        for place in range(len(own) - length + 1):
            source, at = first.setdefault(tuple(own[place : place + length]), (number, place))
            if source != number or place - at >= length:
                removed.update(range(place, place + length))
        result.append(sorted(removed))
    return result


def by_step(texts: list[str], length: int) -> list[list[int]]:
    """The same by fingerprints, windows and repeats."""
    shared = repeated_values(fingerprints(texts, length).values)
    own = [comparable_words(text) for text in texts]
    removed: list[set[int]] = [set() for _ in texts]
    for repeat in find_repeats(windows(texts, length, shared), length):
        assert verify_span(repeat, own[repeat.text], own[repeat.source], length) == [repeat]
        removed[repeat.text].update(range(repeat.begin, repeat.end))
    return [sorted(item) for item in removed]


def patchwork(seed: int, count: int, vocabulary: int) -> list[str]:
    """Texts made of pieces of each other, some of them periodic."""
    rng = np.random.default_rng(seed)
    texts: list[list[str]] = []
    for _ in range(count):
        own: list[str] = []
        for _ in range(rng.integers(0, 5)):
            if texts and rng.random() < 0.6:
                other = texts[rng.integers(len(texts))]
                begin = int(rng.integers(0, len(other) + 1))
                own += other[begin : begin + int(rng.integers(1, 40))]
            elif rng.random() < 0.2:
                own += [f"p{number}" for number in range(rng.integers(1, 4))] * int(rng.integers(1, 30))
            else:
                own += [f"w{number}" for number in rng.integers(0, vocabulary, rng.integers(1, 30))]
        texts.append(own)
    return [" ".join(text).upper() if number % 3 else " ".join(text) for number, text in enumerate(texts)]


class TestSubstring(StepContract):
    @pytest.fixture
    def step(self) -> Step:
        return Substring(length=LENGTH)

    @pytest.fixture
    def table(self) -> pa.Table:
        text = prose(0, 40)
        return table_of(
            text,
            {"prompt": f"a {words(text, 3, 20)} b", "completion": "yes"},
            {"prompt": "c", "completion": words(text, 20, 30)},
            f"{words(text, 5, 14)} {prose(1, 30)}",
            text,
        )

    def test_what_stands_earlier_is_cut(self, step: Step, table: pa.Table) -> None:
        kept, rejected, changed, facts = apply_step(step, table)
        assert lines(kept) == [1, 2, 4]
        assert kept["prompt"].to_pylist()[1] == [{"role": "user", "content": "a b"}]
        assert kept["text"].to_pylist() == [table["text"][0].as_py(), None, table["text"][3].as_py()]
        assert changed["id"].to_pylist() == [kept["id"][1].as_py()]
        assert [(row["line"], row["reason"], row["score"]) for row in rejected.to_pylist()] == [
            (3, "repeated text", pytest.approx(10 / 11)),
            (5, "repeated text", 1.0),
        ]
        assert rejected["kept"].to_pylist() == [table["id"][0].as_py()] * 2
        begin = words(prose(0, 40), 0, 6)
        detail = f"100% of its words: words 1 to 40 of the text (40 words, `{begin} …`) stand at f:1"
        assert rejected["detail"][1].as_py() == detail
        assert facts["repeated_share"].to_pylist() == [None, pytest.approx(17 / 20), pytest.approx(10 / 11), None, 1.0]
        message = f"words 2 to 18 of the prompt (17 words, `{words(prose(0, 40), 3, 9)} …`) stand at f:1"
        assert facts["repeated_at"][1].as_py() == message

    def test_records_can_be_rejected_instead(self, table: pa.Table) -> None:
        outcome = apply_step(Substring(length=LENGTH, action="reject", share=0.9), table)
        assert lines(outcome.rejected) == [3, 5]
        assert outcome.kept.equals(table.take([0, 1, 3]))


def test_the_rest_of_a_text_keeps_its_form() -> None:
    run = prose(0, 12)
    outcome = apply_step(
        Substring(length=LENGTH), table_of(run, f"First line,\n\n  second: {run.upper()}\n\tthe  end. \n")
    )
    assert outcome.kept["text"].to_pylist()[1] == "First line,\n\n  second: the  end."


def test_worse_answers_and_system_turns_are_not_read() -> None:
    run = prose(0, 12)
    record = {"prompt": "q", "completion": f"{run} a", "rejected": f"{run} b"}
    system = [{"role": "system", "content": run}, {"role": "user", "content": "hm"}]
    outcome = apply_step(Substring(length=LENGTH), table_of(record, {"prompt": system}, {"prompt": system}))
    assert outcome.kept.num_rows == 3
    assert outcome.changed.num_rows == 0


def test_the_first_occurrence_in_one_text_stays() -> None:
    outcome = apply_step(Substring(length=LENGTH), table_of("ha " * 35))
    assert outcome.kept["text"].to_pylist() == [("ha " * LENGTH).strip()]


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 10), (3, 11), (50, 10), (10_000, 13)])
def test_repeats_are_those_of_an_exhaustive_search(vocabulary: int, length: int) -> None:
    for seed in range(12):
        texts = patchwork(seed, 30, vocabulary)
        assert by_step(texts, length) == exhaustive(texts, length)


def test_texts_of_49_words_in_common_are_left_alone() -> None:
    text = prose(0, 80)
    step = Substring()
    assert apply_step(step, table_of(text, f"{words(text, 3, 52)} {prose(1, 9)}")).changed.num_rows == 0
    assert apply_step(step, table_of(text, f"{words(text, 3, 53)} {prose(1, 9)}")).kept["text"][1].as_py() == prose(
        1, 9
    )


def test_fingerprints_are_few() -> None:
    assert len(fingerprints([prose(0, 50_000)], 50).values) < 50_000 / 12


def test_what_only_shares_a_hash_is_not_cut() -> None:
    texts = [prose(0, 20), prose(1, 20), words(prose(0, 20), 0, 12)]
    result = windows(texts, LENGTH, np.unique(fingerprints(texts, LENGTH).values))
    assert len(result.text) == 11 + 11 + 3
    collided = find_repeats(result._replace(value=np.zeros(len(result.value), np.uint64)), LENGTH)
    own = [comparable_words(text) for text in texts]
    true = [part for item in collided for part in verify_span(item, own[item.text], own[item.source], LENGTH)]
    assert true == [RepeatedSpan(2, 0, 10, 0, 0)]


def test_nothing_has_no_repeats() -> None:
    assert find_repeats(concatenate_windows([]), LENGTH) == []
    assert by_step(["", "a b"], LENGTH) == [[], []]
