"""Decontamination rejects every planted kind of leak with its reason, and keeps near misses."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.records.record import fold_case, input_texts
from posttrain.data.similarity.evaluation_index import EvaluationIndex, Matches, contaminated_counts
from posttrain.data.similarity.overlap_sketch import overlap_sketch
from posttrain.data.steps.apply import TableCorpus, apply_step
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.step import DataStep
from posttrain.testing.steps import StepContract, reasons, table_of

_LETTERS = np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), (2000, 7))
WORDS = ["".join(letters[: 3 + number % 5]) for number, letters in enumerate(_LETTERS)]


def shingles(text: str, ngram: int) -> set[str]:
    """The runs of ``ngram`` characters in ``text``; a shorter text is one shingle."""
    return {text[start : start + ngram] for start in range(max(1, len(text) - ngram + 1))}


def prose(seed: int, count: int) -> str:
    """Words of which no two texts share many in a row."""
    rng = np.random.default_rng(seed)
    return " ".join(WORDS[number] for number in rng.integers(0, len(WORDS), count))


def word_slice(text: str, begin: int, end: int) -> str:
    return " ".join(text.split()[begin:end])


LONG = prose(0, 60)
SHORT = "which planet is the largest one of all"
EVALUATION = table_of(
    {"prompt": LONG, "completion": prose(1, 30), "source": "suite.jsonl", "group": "anna"},
    {"prompt": SHORT, "completion": "jupiter", "source": "suite.jsonl"},
    {"prompt": "stop!", "completion": "it", "source": "other.jsonl"},
)


def rejections(*rows: dict[str, str] | str, **settings: object) -> dict[int, tuple[str, str]]:
    """The reason of each rejected line, and the evaluation line that it matches."""
    rejected_rows = apply_step(Decontaminate.model_validate(settings), table_of(*rows), EVALUATION).rejected.to_pylist()
    line_by_id = dict(zip(EVALUATION["id"].to_pylist(), EVALUATION["line"].to_pylist(), strict=True))
    for row in rejected_rows:
        line = line_by_id[row["kept"]]
        source = EVALUATION["source"][line - 1]
        assert f"{source}:{line}" in row["detail"]
    return {row["line"]: (row["reason"], line_by_id[row["kept"]]) for row in rejected_rows}


def search(
    training: pa.Table, evaluation: pa.Table, threshold: float | None = 0.8, ngram: int | None = 13, exact: bool = False
) -> Matches:
    sketches = overlap_sketch(training, threshold, ngram)
    return EvaluationIndex.from_records(evaluation, threshold, ngram).search(sketches, training.take, exact=exact)


class TestDecontaminate(StepContract):
    @pytest.fixture
    def step(self) -> DataStep:
        return Decontaminate()

    @pytest.fixture
    def table(self) -> pa.Table:
        return table_of(
            {"prompt": LONG, "completion": "other"}, prose(9, 40), {"text": "hello", "group": "anna"}, "an entire text"
        )

    @pytest.fixture
    def evaluation(self) -> pa.Table:
        return EVALUATION


def test_an_equal_input_is_rejected() -> None:
    assert rejections({"prompt": f"  {LONG} ", "completion": "z"}, prose(7, 60)) == {1: ("equals a test input", 1)}


def test_a_record_of_a_test_group_is_rejected() -> None:
    rows = ({"text": "quite another", "group": "anna"}, {"text": "and one more", "group": "otto"})
    assert rejections(*rows) == {1: ("group of a test record", 1)}


def test_a_near_duplicate_is_rejected() -> None:
    near, far = LONG.replace(word_slice(LONG, 4, 6), "x"), prose(3, 30) + " " + word_slice(LONG, 0, 12)
    outcome = apply_step(
        Decontaminate(), table_of(near, far, SHORT.upper(), SHORT.replace("largest", "big")), EVALUATION
    )
    rejected_rows = outcome.rejected.to_pylist()
    assert [(row["line"], row["reason"]) for row in rejected_rows] == [
        (1, "like a test input"),
        (3, "like a test input"),
    ]
    a, b = (shingles(fold_case(text), 5) for text in (near, LONG))
    assert rejected_rows[0]["score"] == pytest.approx(len(a & b) / len(a | b), abs=1e-12)
    assert rejected_rows[1]["score"] == 1


@pytest.mark.parametrize("begin", [0, 20, 47])
def test_a_13_gram_of_a_test_input_is_rejected_in_any_context(begin: int) -> None:
    overlap = word_slice(LONG, begin, begin + 13).upper().replace(" ", ", ")
    near_miss = word_slice(LONG, begin, begin + 12)
    rows = (
        f"{prose(4, 50)} {overlap}! {prose(5, 50)}",
        {"prompt": "say something", "completion": f"{prose(5, 20)} {overlap}"},
        f"{prose(4, 50)} {near_miss} {prose(6, 50)}",
    )
    assert rejections(*rows) == dict.fromkeys((1, 2), ("shares a 13-gram with a test record", 1))
    assert set(rejections(*rows, ngram=12)) == {1, 2, 3}
    assert rejections(*rows, ngram=None) == {}


def test_a_training_record_inside_a_test_record_is_rejected() -> None:
    rows = (word_slice(LONG, 10, 23), word_slice(LONG, 10, 22))
    assert rejections(*rows) == {1: ("shares a 13-gram with a test record", 1)}
    outcome = apply_step(Decontaminate(), table_of(*rows), EVALUATION)
    assert outcome.rejected["detail"].to_pylist() == ["1 13-grams of suite.jsonl:1"]


def test_a_13_gram_of_a_test_answer_is_rejected() -> None:
    assert rejections(prose(1, 30)) == {1: ("shares a 13-gram with a test record", 1)}
    assert rejections({"prompt": "why", "completion": f"because {word_slice(prose(1, 30), 2, 17)}"}) == {
        1: ("shares a 13-gram with a test record", 1)
    }


def test_inputs_of_few_words_are_compared_whole() -> None:
    assert rejections("Stop?!", "stop it now", "!!!", "do not stop") == {1: ("like a test input", 3)}
    assert not apply_step(Decontaminate(), table_of("!!!", ""), table_of("?", "")).kept.num_rows - 1


@pytest.mark.parametrize("words_before", [0, 300, 3000])
def test_a_record_that_holds_a_test_input_is_rejected(words_before: int) -> None:
    longer_record = f"{prose(11, words_before)} Q: {SHORT.upper()}? {prose(12, 80)}"
    scattered_words = " ".join(f"{word} {prose(seed + 60, 30)}" for seed, word in enumerate(SHORT.split()))
    cut = f"{prose(11, 30)} {word_slice(SHORT, 0, 7)} {prose(12, 30)}"
    assert rejections(longer_record, scattered_words, cut) == {1: ("holds a test input", 2)}


def test_a_script_without_spaces_is_split_into_words() -> None:
    question = "我的银行卡为什么被拒绝了"
    row = f"昨天我去买东西。{question}？请告诉我该怎么办，谢谢你的帮助。"
    outcome = apply_step(Decontaminate(), table_of(row, "完全不同的一句话，说的是别的事情"), table_of(question))
    assert reasons(outcome) == {1: "holds a test input"}


def test_an_answer_is_not_searched_as_an_input() -> None:
    evaluation = table_of({"prompt": "say it", "completion": SHORT})
    assert not apply_step(Decontaminate(), table_of(f"{prose(1, 9)} {SHORT}"), evaluation).rejected.num_rows


def test_ngrams_of_many_test_records_are_ignored() -> None:
    wording = prose(20, 14)
    rows = [f"{wording} {prose(seed, 20)}" for seed in range(30, 41)]
    training = table_of(f"{wording} {prose(50, 20)}", f"{prose(51, 5)} {word_slice(rows[3], 14, 34)}")
    assert set(reasons(apply_step(Decontaminate(), training, table_of(*rows)))) == {2}
    assert set(reasons(apply_step(Decontaminate(), training, table_of(*rows[:10], *rows[:10])))) == {1, 2}


def test_the_order_of_the_evaluation_records_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    texts = [prose(seed, 40) for seed in range(20)]
    evaluation = table_of(*texts, *texts[:3])
    training = table_of(*[word_slice(texts[seed], 3, 20) for seed in range(20)], *texts[:5], prose(99, 40))
    expected = search(training, evaluation)
    for _ in range(3):
        order = rng.permutation(evaluation.num_rows)
        result = search(training, evaluation.take(pa.array(order)))
        assert {row: (item.reason, item.score) for row, item in result.best.items()} == {
            row: (item.reason, item.score) for row, item in expected.best.items()
        }
        assert {(row, order[other]) for row, other in result.pairs} == expected.pairs


def test_contaminated_records_are_counted_by_suite() -> None:
    matches = search(table_of(LONG, f"{prose(2, 30)} {SHORT}", "and nothing else"), EVALUATION)
    assert contaminated_counts(EVALUATION, matches.pairs) == {"suite.jsonl": (2, 2), "other.jsonl": (0, 1)}


def mutate(rng: np.random.Generator, text: str) -> str:
    """Replaces some words of ``text``."""
    result = text.split()
    for position in rng.integers(0, len(result), rng.integers(0, len(result) // 3 + 2)):
        result[position] = WORDS[rng.integers(len(WORDS))]
    return " ".join(result)


def brute_force(training: pa.Table, evaluation: pa.Table, matches: Callable[[set[str], set[str]], bool]) -> set[int]:
    """The training rows whose set of 5-grams matches that of any evaluation input."""
    training_sets = [shingles(fold_case(text), 5) for text in input_texts(training)]
    evaluation_sets = [shingles(fold_case(text), 5) for text in input_texts(evaluation)]
    return {
        row
        for row, row_set in enumerate(training_sets)
        if any(matches(row_set, evaluation_set) for evaluation_set in evaluation_sets)
    }


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_near_duplicates_equal_an_exhaustive_search(threshold: float) -> None:
    rng = np.random.default_rng(1)
    texts = [prose(seed, int(rng.integers(1, 40))) for seed in range(60)] + ["a", "ab", "", "abcd", "abcde"]
    evaluation = table_of(*texts)
    training = table_of(*[mutate(rng, text) if text else "A" for text in texts for _ in range(4)])
    expected = brute_force(training, evaluation, lambda a, b: len(a & b) / len(a | b) >= threshold)
    assert set(search(training, evaluation, threshold, None, exact=True).best) == expected


def test_removed_rows_are_not_searched() -> None:
    step = Decontaminate()
    corpus = TableCorpus(table_of(LONG, SHORT, "else"), step, EVALUATION)
    corpus.alive[0] = False
    decision = step.decide(corpus)
    assert set(decision.rejections) == {1}
    assert decision.contaminated == {"suite.jsonl": (1, 2), "other.jsonl": (0, 1)}


@pytest.mark.parametrize("ngram", [3, 13])
def test_shared_runs_equal_an_exhaustive_search(ngram: int) -> None:
    rng = np.random.default_rng(2)
    texts = [prose(seed, int(rng.integers(1, 40))) for seed in range(40)]
    evaluation = table_of(*texts)
    training = table_of(*[mutate(rng, text) for text in texts for _ in range(4)])

    def runs(text: str) -> set[tuple[str, ...]]:
        parts = text.split()
        wholes = {tuple(parts)} if len(parts) < ngram else set()
        return wholes | {tuple(parts[start : start + ngram]) for start in range(len(parts) - ngram + 1)}

    def shares(text: str, other: str) -> bool:
        words = len(other.split())
        held = 8 <= words < ngram and f" {other} " in f" {text} "
        return held or (bool(runs(text) & runs(other)) and (words >= ngram or words < 8))

    result = search(training, evaluation, None, ngram)
    for row, text in enumerate(training["text"].to_pylist()):
        matching = {other for other, test_text in enumerate(texts) if shares(text, test_text) or text == test_text}
        assert {other for number, other in result.pairs if number == row} == matching
        if matching and result.best[row].reason.startswith("shares"):
            counts = [len(runs(text) & runs(other)) for other in texts]
            assert (result.best[row].other, result.best[row].score) == (int(np.argmax(counts)), max(counts))
