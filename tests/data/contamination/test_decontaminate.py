"""Decontamination rejects every planted kind of leak with its reason, and keeps near misses."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from posttrain.data.contamination import word_index
from posttrain.data.contamination.evaluation_index import contaminated_counts, index_evaluation
from posttrain.data.records.record import fold_case, input_texts
from posttrain.data.steps.apply import TableCorpus, apply_step
from posttrain.data.steps.decontaminate import Decontaminate
from posttrain.data.steps.step import DataStep
from posttrain.jobs.map import ProcessEngine
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


@pytest.mark.slow
def test_an_index_built_by_several_processes_is_the_same() -> None:
    rows = table_of({"prompt": word_slice(LONG, 5, 40)}, {"prompt": SHORT + "!"}, {"prompt": prose(7, 40)})
    with ProcessEngine(2) as processes:
        index = index_evaluation(EVALUATION, over=processes.map)
    assert index.search(rows) == index_evaluation(EVALUATION).search(rows)
    assert set(index.find(rows)) == {0, 1}


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
    assert outcome.rejected["score"].to_pylist() == [1.0]
    assert (
        "1 13-grams of suite.jsonl:1: 100% of this record's, 1% of that one's" in outcome.rejected["detail"][0].as_py()
    )


def test_a_13_gram_of_a_test_answer_is_rejected() -> None:
    assert rejections(prose(1, 30)) == {1: ("shares a 13-gram with a test record", 1)}
    assert rejections({"prompt": "why", "completion": f"because {word_slice(prose(1, 30), 2, 17)}"}) == {
        1: ("shares a 13-gram with a test record", 1)
    }


def test_short_texts_are_compared_whole() -> None:
    assert rejections("Stop?!", "stop it", "stop it now", "!!!") == dict.fromkeys(
        (1, 2), ("shares a 13-gram with a test record", 3)
    )


def test_a_test_input_inside_a_longer_record_is_rejected() -> None:
    longer_record = f"{prose(11, 80)}. Q: {SHORT.replace('largest', 'larges')}? {prose(12, 80)}"
    scattered_words = " ".join(f"{word} {prose(seed + 60, 30)}" for seed, word in enumerate(SHORT.split()))
    assert rejections(longer_record, scattered_words) == {1: ("like a test input", 2)}
    assert rejections(longer_record, contained=None) == {}


def test_a_script_without_spaces_is_split_into_words() -> None:
    question = "我的银行卡为什么在商店里被拒绝了"
    row = f"昨天我去买东西。{question}？请告诉我该怎么办，谢谢你的帮助。"
    outcome = apply_step(
        Decontaminate(ngram=None), table_of(row, "完全不同的一句话，说的是别的事情"), table_of(question)
    )
    assert reasons(outcome) == {1: "like a test input"}


def test_a_test_input_of_few_words_may_stand_in_a_longer_record() -> None:
    short = table_of("why was my card declined")
    row = table_of(f"{prose(11, 40)} Why was my card declined? {prose(12, 40)}")
    assert not apply_step(Decontaminate(), row, short).rejected.num_rows


def test_a_test_input_is_found_anywhere_in_a_very_long_record() -> None:
    for words_before in (300, 585, 1000, 3000):
        assert rejections(f"{prose(11, words_before)} {SHORT} {prose(12, 2000)}") == {1: ("like a test input", 2)}


def test_share_sets_the_required_overlap() -> None:
    row = f"{prose(4, 50)} {word_slice(LONG, 0, 20)} {prose(5, 50)}"
    assert set(rejections(row, share=0.05)) == {1}
    assert rejections(row, share=0.5) == {}


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
    expected = index_evaluation(evaluation).search(training)
    for _ in range(3):
        order = rng.permutation(evaluation.num_rows)
        result = index_evaluation(evaluation.take(pa.array(order))).search(training)
        assert {row: (item.reason, item.score, item.kept) for row, item in result.rejections.items()} == {
            row: (item.reason, item.score, item.kept) for row, item in expected.rejections.items()
        }
        assert {(row, order[other]) for row, other in result.pairs} == set(expected.pairs)


def test_contaminated_records_are_counted_by_suite() -> None:
    index = index_evaluation(EVALUATION)
    findings = index.search(table_of(LONG, f"{prose(2, 30)} {SHORT}", "and nothing else"))
    assert contaminated_counts(EVALUATION, findings.pairs) == {"suite.jsonl": (2, 2), "other.jsonl": (0, 1)}


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
    index = index_evaluation(evaluation, ngram=None, threshold=threshold, contained=None)
    assert set(index.find(training)) == expected


@pytest.mark.parametrize("contained", [0.5, 0.8, 1.0])
def test_containment_equals_an_exhaustive_search(contained: float) -> None:
    rng = np.random.default_rng(3)
    texts = [prose(seed, int(rng.integers(8, 24))) for seed in range(15)]
    longer_texts = [
        f"{prose(100 + number, 9)} {mutate(rng, text)} {prose(200 + number, 9)}"
        for number, text in enumerate(texts * 2)
    ]
    result = index_evaluation(table_of(*texts), ngram=None, threshold=1.0, contained=contained).find(
        table_of(*longer_texts)
    )

    def share(text: str, test_input: str) -> float:
        runs, input_runs = ([item[start : start + 5] for start in range(len(item) - 4)] for item in (text, test_input))
        width = int(np.ceil(len(input_runs) / contained))
        starts = range(max(1, len(runs) - width + 1))
        return max(len(set(runs[start : start + width]) & set(input_runs)) for start in starts) / len(set(input_runs))

    for row, text in enumerate(longer_texts):
        shares = [share(text, test_input) for test_input in texts]
        assert (row in result) == (max(shares) >= contained)
        if row in result:
            assert result[row].score == max(shares)


def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    texts = [prose(seed, 30) for seed in range(20)]
    index, training = index_evaluation(table_of(*texts)), table_of(*[mutate(rng, text) for text in texts * 3])
    expected = index.search(training)
    monkeypatch.setattr("posttrain.data.contamination.postings._PAIRS_A_BLOCK", 40)
    monkeypatch.setattr("posttrain.data.contamination.evaluation_index._ROWS_A_BLOCK", 7)
    result = index.search(training)
    assert result.rejections == expected.rejections
    assert set(result.pairs) == set(expected.pairs)


def test_removed_rows_are_not_searched() -> None:
    step = Decontaminate()
    corpus = TableCorpus(table_of(LONG, SHORT, "else"), step, EVALUATION)
    corpus.alive[0] = False
    decision = step.decide(corpus)
    assert set(decision.rejections) == {1}
    assert decision.contaminated == {"suite.jsonl": (1, 2), "other.jsonl": (0, 1)}


@pytest.mark.parametrize("ngram", [1, 3, 13])
def test_shared_ngrams_equal_an_exhaustive_search(ngram: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_index, "_IGNORE_ABOVE", 1000)
    rng = np.random.default_rng(2)
    texts = [prose(seed, int(rng.integers(1, 40))) for seed in range(40)]
    evaluation = table_of(*texts)
    training = table_of(*[mutate(rng, text) for text in texts for _ in range(4)])

    def runs(text: str) -> set[tuple[str, ...]]:
        parts = text.split()
        return {tuple(parts[start : start + ngram]) for start in range(max(1, len(parts) - ngram + 1))}

    index = index_evaluation(evaluation, ngram=ngram, threshold=None)
    evaluation_runs = [runs(text) for text in texts]
    result = index.find(training)
    for row, text in enumerate(training["text"].to_pylist()):
        row_runs = runs(text)
        num_shared = [len(row_runs & other) for other in evaluation_runs]
        assert (row in result) == (max(num_shared) > 0)
        if max(num_shared) and result[row].reason.startswith("shares"):
            other = int(np.argmax(num_shared))
            assert result[row].kept == evaluation["id"][other].as_py()
            assert result[row].score == max(
                max(num_shared) / len(row_runs), max(num_shared) / len(evaluation_runs[other])
            )
