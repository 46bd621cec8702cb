"""The demo task holds exactly the planted faults, and no others."""

import csv
import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from posttrain.data.augment.word_edits import add_typo, adjacent_keys
from posttrain.demo.messages import DemoData, generate, similarity, write_demo_data
from posttrain.demo.phrases import Choice, Phrase, load_phrases, words
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def task() -> DemoData:
    return generate(seed=4)


def _rows(task: DemoData, *faults: str) -> set[int]:
    return set(itertools.chain.from_iterable(task.planted_rows[fault] for fault in faults))


def _similarities(texts: list[str]) -> np.ndarray:
    """Jaccard similarity of every two texts' five-character runs, by matrix product: float64 [N, N]."""
    from sklearn.feature_extraction.text import CountVectorizer

    plain = [" ".join(re.findall(r"[^\W_]+", text.casefold())) for text in texts]
    runs = CountVectorizer(analyzer="char", ngram_range=(5, 5), lowercase=False, binary=True).fit_transform(plain)
    num_shared = (runs.astype(np.float64) @ runs.T.astype(np.float64)).toarray()
    sizes = num_shared.diagonal()
    return num_shared / (sizes[:, None] + sizes[None, :] - num_shared)


def test_the_seed_decides_the_task() -> None:
    task = generate(seed=3, pool=200, test=60)
    assert task == generate(seed=3, pool=200, test=60)
    assert task.pool != generate(seed=4, pool=200, test=60).pool


def test_sizes_and_counts(task: DemoData) -> None:
    assert (len(task.pool), len(task.test)) == (1500, 300)
    fault_counts = task.planted
    assert 200 <= fault_counts.pop("typos") <= 340
    assert fault_counts == {
        "exact_duplicates": 60,
        "near_duplicates": 60,
        "leaked_exact": 22,
        "leaked_near": 22,
        "wrong_labels": 30,
    }
    copies = ["exact_duplicates", "near_duplicates", "leaked_exact", "leaked_near"]
    assert sum(task.planted[fault] for fault in copies) == len(_rows(task, *copies))


def test_the_exact_copies_are_the_planted_ones(task: DemoData) -> None:
    texts = Counter(row["text"] for row in task.pool)
    assert sum(count - 1 for count in texts.values()) == task.planted["exact_duplicates"]
    assert all(texts[task.pool[at]["text"]] == 2 for at in task.planted_rows["exact_duplicates"])
    in_test = {row["text"] for row in task.test}
    assert len(in_test) == len(task.test)
    leaked_rows = [at for at, row in enumerate(task.pool) if row["text"] in in_test]
    assert leaked_rows == task.planted_rows["leaked_exact"]


def test_the_near_copies_are_the_planted_ones(task: DemoData) -> None:
    texts = [row["text"] for row in [*task.pool, *task.test]]
    similarities = np.triu(_similarities(texts), 1)
    copies = _rows(task, "exact_duplicates", "near_duplicates", "leaked_exact", "leaked_near")
    other_rows = np.array([at for at in range(len(texts)) if at not in copies])
    assert similarities[np.ix_(other_rows, other_rows)].max() < 0.6
    pool = len(task.pool)
    for fault, first, last in (("near_duplicates", 0, pool), ("leaked_near", pool, len(texts))):
        for at in task.planted_rows[fault]:
            originals = np.flatnonzero((similarities[at] + similarities[:, at])[first:last] >= 0.75)
            assert len(originals) == 1, texts[at]
    pairs = np.argwhere(similarities >= 0.6)
    assert len(pairs) == len(copies)
    assert all(copies & {int(i), int(j)} for i, j in pairs)


def test_copies_keep_the_customer_and_splits_share_no_other(task: DemoData) -> None:
    leaks = _rows(task, "leaked_exact", "leaked_near")
    in_test = {row["customer"] for row in task.test}
    assert {at for at, row in enumerate(task.pool) if row["customer"] in in_test} == leaks
    by_text: dict[str, set[str]] = {}
    for row in task.pool:
        by_text.setdefault(row["text"], set()).add(row["customer"])
    assert all(len(customers) == 1 for customers in by_text.values())
    assert max(Counter(row["customer"] for row in task.pool).values()) > 1


def _pattern(phrase: Phrase) -> str:
    """A regular expression for the phrase's texts; a slot is anything, punctuation is left out."""
    parts = []
    for part in phrase.parts:
        if isinstance(part, Choice):
            parts.append("(?:" + "|".join(_pattern(option) for option in part.options) + ")")
        else:
            parts.append(re.sub(r"\s+", r"\\s*", re.sub(r"\{\w+\}", ".+", _plain(part))))
    return "".join(parts)


def _plain(text: str) -> str:
    return re.sub(r"[,.?!]", "", re.sub(r"\ban (?=[aeiou])", "a ", text.casefold()))


def test_the_wrong_labels_are_the_planted_ones(task: DemoData) -> None:
    """Without a typo, the phrases that a message matches give its intent."""
    phrases = load_phrases().intents
    patterns = {intent: [re.compile(_pattern(core)) for core in cores] for intent, cores in phrases.items()}
    unclear = _rows(task, *task.planted) - _rows(task, "wrong_labels")
    unclear |= _rows(task, "typos")
    clear = [at for at in range(len(task.pool)) if at not in unclear]

    def fits(row: dict[str, str]) -> bool:
        return any(pattern.search(_plain(row["text"])) for pattern in patterns[row["intent"]])

    contradictions = {at for at in clear if not fits(task.pool[at])}
    assert contradictions == _rows(task, "wrong_labels") - unclear
    assert len(clear) > len(task.pool) / 2


def test_the_typos_are_the_planted_ones(task: DemoData) -> None:
    vocabulary = load_phrases().vocabulary()
    copies = _rows(task, "exact_duplicates", "near_duplicates", "leaked_exact", "leaked_near")
    typo_rows = [
        at for at, row in enumerate(task.pool) if at not in copies and not vocabulary.issuperset(words(row["text"]))
    ]
    assert typo_rows == task.planted_rows["typos"]


def test_intents_are_many_imbalanced_and_in_both_splits(task: DemoData) -> None:
    assert len(task.labels) == 28
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+){1,3}", label) for label in task.labels)
    for rows, at_least in ((task.pool, 15), (task.test, 4)):
        counts = Counter(row["intent"] for row in rows).most_common()
        assert {label for label, _ in counts} == set(task.labels)
        assert counts[0][1] >= 4 * counts[-1][1]
        assert counts[-1][1] >= at_least


def test_messages_have_the_stated_length_and_no_open_slot(task: DemoData) -> None:
    copies = _rows(task, "near_duplicates", "leaked_near")
    for at, row in enumerate(task.pool):
        assert 8 <= len(row["text"].split()) <= 25 + (at in copies)
        assert not set("[]{}|\n") & set(row["text"])
        assert "  " not in row["text"]


def test_the_phrases_give_a_hundred_thousand_messages() -> None:
    phrases = load_phrases()
    cores = sum(core.count() for cores in phrases.intents.values() for core in cores)
    extras = [sum(phrase.count() for phrase in group) for group in (phrases.openings, phrases.closings)]
    assert cores * (1 + sum(extras)) > 100_000


def test_the_files_hold_the_task_and_hide_the_answers(tmp_path: Path) -> None:
    task = generate(pool=200, test=60)
    write_demo_data(tmp_path / "task", task)

    def read_rows(name: str) -> list[dict[str, str]]:
        with (tmp_path / "task" / name).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    assert read_rows("pool.csv") == [{"text": row["text"], "customer": row["customer"]} for row in task.pool]
    assert read_rows("test.csv") == task.test
    answers = {row["text"]: row["intent"] for row in read_rows("answers.csv")}
    assert len(answers) == len(read_rows("answers.csv"))
    assert answers == {row["text"]: row["intent"] for row in task.pool}
    assert all(answers[row["text"]] == row["intent"] for row in task.pool)
    assert (tmp_path / "task" / "labels.txt").read_text().split() == task.labels


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pool"):
        generate(pool=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        write_demo_data(tmp_path / "file", generate(pool=30, test=10))


def test_a_typo_changes_one_word_and_gives_no_known_word() -> None:
    rng = np.random.default_rng(0)
    text = "Where is order LF-12345 from rosa7@example.com?"
    kinds = set()
    for _ in range(200):
        wrong = add_typo(text, rng, {"form"})
        changes = [(a, b) for a, b in zip(text.split(), wrong.split(), strict=True) if a != b]
        assert len(changes) == 1
        before, after = changes[0]
        assert before in {"Where", "order", "from"}
        assert after != "form"
        kinds.add(len(after) - len(before))
    assert kinds == {-1, 0, 1}
    assert add_typo("it is 12", rng, set()) == "it is 12"


def test_adjacent_keys() -> None:
    assert (adjacent_keys("q"), adjacent_keys("g"), adjacent_keys("m")) == ("w", "fh", "n")


def test_similarity_ignores_case_and_punctuation() -> None:
    assert similarity("Where is my kettle?", "where is my kettle") == 1
    assert similarity("abcde", "vwxyz") == 0
