"""Repeats of long runs of words equal those of an exhaustive search."""

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
from posttrain.data.steps.step import DataStep
from posttrain.data.steps.substring import Substring
from posttrain.testing.steps import StepContract, lines, table_of

LENGTH = 10


def prose(seed: int, count: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 10_000, count))


def word_slice(text: str, begin: int, end: int) -> str:
    return " ".join(text.split()[begin:end])


def exhaustive(texts: list[str], length: int) -> list[list[int]]:
    """The words of every text in a window that occurred before, by a table of all windows."""
    first_occurrence: dict[tuple[str, ...], tuple[int, int]] = {}
    result = []
    for number, text in enumerate(texts):
        text_words = text.lower().split()
        repeated: set[int] = set()
        for start in range(len(text_words) - length + 1):
            source, at = first_occurrence.setdefault(tuple(text_words[start : start + length]), (number, start))
            if source != number or start - at >= length:
                repeated.update(range(start, start + length))
        result.append(sorted(repeated))
    return result


def by_step(texts: list[str], length: int) -> list[list[int]]:
    """The same by fingerprints, windows and repeats."""
    repeated = repeated_values(fingerprints(texts, length).values)
    word_lists = [comparable_words(text) for text in texts]
    positions: list[set[int]] = [set() for _ in texts]
    for repeat in find_repeats(windows(texts, length, repeated), length):
        assert verify_span(repeat, word_lists[repeat.text], word_lists[repeat.source], length) == [repeat]
        positions[repeat.text].update(range(repeat.begin, repeat.end))
    return [sorted(item) for item in positions]


def patchwork(seed: int, count: int, vocabulary: int) -> list[str]:
    """Texts made of pieces of each other, some of them periodic."""
    rng = np.random.default_rng(seed)
    texts: list[list[str]] = []
    for _ in range(count):
        text_words: list[str] = []
        for _ in range(rng.integers(0, 5)):
            if texts and rng.random() < 0.6:
                source = texts[rng.integers(len(texts))]
                begin = int(rng.integers(0, len(source) + 1))
                text_words += source[begin : begin + int(rng.integers(1, 40))]
            elif rng.random() < 0.2:
                text_words += [f"p{number}" for number in range(rng.integers(1, 4))] * int(rng.integers(1, 30))
            else:
                text_words += [f"w{number}" for number in rng.integers(0, vocabulary, rng.integers(1, 30))]
        texts.append(text_words)
    return [" ".join(text).upper() if number % 3 else " ".join(text) for number, text in enumerate(texts)]


class TestSubstring(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Substring(length=LENGTH)

    @pytest.fixture
    def table(self) -> pa.Table:
        text = prose(0, 40)
        return table_of(
            text,
            {"prompt": f"a {word_slice(text, 3, 20)} b", "completion": "yes"},
            {"prompt": "c", "completion": word_slice(text, 20, 30)},
            f"{word_slice(text, 5, 14)} {prose(1, 30)}",
            text,
        )

    def test_repeated_text_is_cut(self, step: DataStep, table: pa.Table) -> None:
        outcome = apply_step(step, table)
        assert lines(outcome.kept) == [1, 2, 4]
        assert outcome.kept["prompt"].to_pylist()[1] == [{"role": "user", "content": "a b"}]
        assert outcome.kept["text"].to_pylist() == [table["text"][0].as_py(), None, table["text"][3].as_py()]
        assert outcome.changed["id"].to_pylist() == [outcome.kept["id"][1].as_py()]
        assert [(row["line"], row["reason"], row["score"]) for row in outcome.rejected.to_pylist()] == [
            (3, "repeated text", pytest.approx(10 / 11)),
            (5, "repeated text", 1.0),
        ]
        assert outcome.rejected["kept"].to_pylist() == [table["id"][0].as_py()] * 2
        begin = word_slice(prose(0, 40), 0, 6)
        detail = f"100% of its words: words 1 to 40 of the text (40 words, `{begin} …`) stand at f:1"
        assert outcome.rejected["detail"][1].as_py() == detail
        assert outcome.facts["repeated_share"].to_pylist() == [
            None,
            pytest.approx(17 / 20),
            pytest.approx(10 / 11),
            None,
            1.0,
        ]
        message = f"words 2 to 18 of the prompt (17 words, `{word_slice(prose(0, 40), 3, 9)} …`) stand at f:1"
        assert outcome.facts["repeated_at"][1].as_py() == message

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
def test_repeats_equal_an_exhaustive_search(vocabulary: int, length: int) -> None:
    for seed in range(12):
        texts = patchwork(seed, 30, vocabulary)
        assert by_step(texts, length) == exhaustive(texts, length)


def test_a_common_run_of_49_words_stays() -> None:
    text = prose(0, 80)
    step = Substring()
    assert apply_step(step, table_of(text, f"{word_slice(text, 3, 52)} {prose(1, 9)}")).changed.num_rows == 0
    assert apply_step(step, table_of(text, f"{word_slice(text, 3, 53)} {prose(1, 9)}")).kept["text"][
        1
    ].as_py() == prose(1, 9)


def test_fingerprints_are_few() -> None:
    assert len(fingerprints([prose(0, 50_000)], 50).values) < 50_000 / 12


def test_hash_collisions_are_not_cut() -> None:
    texts = [prose(0, 20), prose(1, 20), word_slice(prose(0, 20), 0, 12)]
    result = windows(texts, LENGTH, np.unique(fingerprints(texts, LENGTH).values))
    assert len(result.text) == 11 + 11 + 3
    collisions = find_repeats(result._replace(value=np.zeros(len(result.value), np.uint64)), LENGTH)
    word_lists = [comparable_words(text) for text in texts]
    verified = [
        part
        for item in collisions
        for part in verify_span(item, word_lists[item.text], word_lists[item.source], LENGTH)
    ]
    assert verified == [RepeatedSpan(2, 0, 10, 0, 0)]


def test_empty_texts_have_no_repeats() -> None:
    assert find_repeats(concatenate_windows([]), LENGTH) == []
    assert by_step(["", "a b"], LENGTH) == [[], []]
