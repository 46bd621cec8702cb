"""Generates the demo task: messages to a shop's support desk, with planted faults of real data, each counted."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.augment.word_edits import add_typo
from posttrain.demo.phrases import compose, load_phrases, words
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder

EXACT_DUPLICATES = 0.04
NEAR_DUPLICATES = 0.04
LEAKED_EXACT = 0.015
LEAKED_NEAR = 0.015
WRONG_LABELS = 0.02
"""Planted shares of the pool."""
TYPOS = 0.2
"""Probability of a typing mistake in a message."""

DISTINCT_BELOW = 0.6
"""Two messages that were not planted as duplicates are less similar than this (see `similarity`)."""
NEAR_FROM = 0.75
"""A planted near duplicate is at least this similar to its original."""

_ATTEMPTS = 1000


@dataclass(frozen=True)
class DemoData:
    """A pool to label and a test split.

    ``pool`` and ``test`` hold rows of text, intent and customer; the pool's intent is the oracle's answer,
    so it is wrong where a wrong label was planted. ``planted_rows`` names the pool's rows by fault, sorted.
    """

    pool: list[dict[str, str]]
    test: list[dict[str, str]]
    planted_rows: dict[str, list[int]]

    @property
    def planted(self) -> dict[str, int]:
        """Counts the pool's rows with each fault."""
        return {fault: len(rows) for fault, rows in self.planted_rows.items()}

    @property
    def labels(self) -> list[str]:
        """Returns all intents, sorted."""
        return intents()


def intents() -> list[str]:
    """Returns all intents, sorted."""
    return sorted(load_phrases().intents)


def shingles(text: str) -> frozenset[str]:
    """Returns the text's runs of five characters, case-folded, other than letters and digits as one space."""
    plain = " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
    return frozenset(plain[at : at + 5] for at in range(max(len(plain) - 4, 1)))


def similarity(left: str, right: str) -> float:
    """Computes the Jaccard similarity of two texts' `shingles`."""
    a, b = shingles(left), shingles(right)
    return len(a & b) / len(a | b)


def generate(seed: int = 17, pool: int = 1500, test: int = 300) -> DemoData:
    """Generates a pool and a test split of these sizes; the same arguments give the same rows.

    Intents follow a Zipf-like law. Pool and test share no customer and no message, planted leaks aside.

    Raises:
        UserError: ``pool`` or ``test`` is not positive, or more than the phrases can give.
    """
    for name, size in (("pool", pool), ("test", test)):
        if size < 1:
            raise UserError(f"{size} rows cannot be generated", where=name, fix="ask for at least 1")
    rng = np.random.default_rng(seed)
    counts = {
        "exact_duplicates": round(EXACT_DUPLICATES * pool),
        "near_duplicates": round(NEAR_DUPLICATES * pool),
        "leaked_exact": min(round(LEAKED_EXACT * pool), test // 2),
        "leaked_near": min(round(LEAKED_NEAR * pool), test // 2),
    }
    originals = pool - sum(counts.values())
    maker = _MessageGenerator(rng)
    sequence = [*_intent_sequence(test, rng), *_intent_sequence(originals, rng)]
    messages = [{"text": maker.message(intent), "intent": intent} for intent in sequence]
    _add_customers(messages[:test], messages[test:], rng)
    test_rows, rows = messages[:test], messages[test:]

    faults = ["original"] * originals
    # One permutation, cut into parts: no message is duplicated both exactly and nearly, or has a wrong label beside.
    twice = rng.permutation(originals)
    leaks = rng.permutation(test)
    for fault, source, order in (
        ("exact_duplicates", rows, twice), ("near_duplicates", rows, twice[counts["exact_duplicates"] :]),
        ("leaked_exact", test_rows, leaks), ("leaked_near", test_rows, leaks[counts["leaked_exact"] :]),
    ):  # fmt: skip
        near = "near" in fault
        for at in order[: counts[fault]]:
            row = source[at]
            rows.append({**row, "text": maker.near_copy(row["text"])} if near else dict(row))
            faults.append(fault)

    # Of messages without a duplicate: a conflict between copies would be removed by another step.
    single = twice[counts["exact_duplicates"] + counts["near_duplicates"] :]
    wrong = {int(at) for at in single[: round(WRONG_LABELS * pool)]}
    for at in sorted(wrong):
        others = [intent for intent in intents() if intent != rows[at]["intent"]]
        rows[at]["intent"] = others[rng.integers(len(others))]

    # Shuffled last, so that no fault is recognised by its position.
    order = rng.permutation(pool)
    planted_rows = {fault: [new for new, old in enumerate(order) if faults[old] == fault] for fault in counts}
    planted_rows["wrong_labels"] = [new for new, old in enumerate(order) if int(old) in wrong]
    mistyped = {at for at in range(originals) if rows[at]["text"] in maker.mistyped}
    planted_rows["typos"] = [new for new, old in enumerate(order) if int(old) in mistyped]
    return DemoData([rows[old] for old in order], test_rows, planted_rows)


def write_demo_data(folder: Path, generated: DemoData) -> None:
    """Writes ``pool.csv`` (text, customer), ``answers.csv`` (text, intent), ``test.csv`` and ``labels.txt``.

    Raises:
        UserError: the folder cannot be written.
    """
    # The oracle's answers have one row per text, whatever the number of its copies in the pool.
    answers = {row["text"]: row for row in generated.pool}
    make_folder(folder)
    with disk_errors(folder):
        write_csv(folder / "pool.csv", ["text", "customer"], generated.pool)
        write_csv(folder / "answers.csv", ["text", "intent"], answers.values())
        write_csv(folder / "test.csv", ["text", "intent", "customer"], generated.test)
        (folder / "labels.txt").write_text("\n".join(generated.labels) + "\n", encoding="utf-8")


def write_csv(path: Path, columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Writes these columns of the rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class _MessageGenerator:
    """Generates messages that are not similar to each other."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.phrases = load_phrases()
        self.vocabulary = self.phrases.vocabulary()
        self.mistyped: set[str] = set()
        self._sizes: list[int] = []
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        self._numbers: dict[str, int] = {}

    def message(self, intent: str) -> str:
        """Generates a message less similar than `DISTINCT_BELOW` to all earlier ones."""
        for _ in range(_ATTEMPTS):
            text = compose(self.phrases, intent, self.rng)
            wrong = self.rng.random() < TYPOS
            if wrong:
                text = add_typo(text, self.rng, self.vocabulary)
            # Accidental near duplicates would make the planted counts wrong.
            if self._closest(text) < DISTINCT_BELOW:
                if not self.vocabulary.issuperset(words(text)):
                    self.mistyped.add(text)
                return self._keep(text)
        raise UserError(f"no more messages of {intent} can be made", where="pool", fix="ask for fewer rows")

    def near_copy(self, text: str) -> str:
        """Copies a message with small changes, similar to its original alone."""
        while True:
            copy = add_typo(text, self.rng, self.vocabulary)
            change = self.rng.integers(3)
            if change == 0:
                copy = copy.casefold().rstrip(".?!")
            elif change == 1:
                copy = f"{copy} thanks"
            near = NEAR_FROM <= similarity(copy, text) < 1
            if near and self._closest(copy, besides=self._numbers[text]) < DISTINCT_BELOW:
                return self._keep(copy)

    def _closest(self, text: str, besides: int | None = None) -> float:
        """Returns the greatest similarity to an earlier message."""
        # Through an index from shingles to messages: most earlier messages share none and are never looked at.
        pieces = shingles(text)
        shared: Counter[int] = Counter()
        for piece in pieces:
            shared.update(self._holders.get(piece, ()))
        if besides is not None:
            del shared[besides]
        return max((n / (len(pieces) + self._sizes[at] - n) for at, n in shared.items()), default=0.0)

    def _keep(self, text: str) -> str:
        pieces = shingles(text)
        self._numbers[text] = len(self._sizes)
        for piece in pieces:
            self._holders[piece].append(len(self._sizes))
        self._sizes.append(len(pieces))
        return text


def _intent_sequence(total: int, rng: np.random.Generator) -> list[str]:
    """Draws intents in random order, rank r (from 1) in proportion to 1 / (r + 4), rounded."""
    ranked = list(load_phrases().intents)
    weights = 1 / (np.arange(len(ranked)) + 5)
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(int)
    # Largest remainders: the counts add up to the total. Stable, so that equal remainders go by rank on every machine.
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    repeated = np.repeat(np.array(ranked), counts)
    return [str(intent) for intent in rng.permutation(repeated)]


def _add_customers(test: list[dict[str, str]], pool: list[dict[str, str]], rng: np.random.Generator) -> None:
    """Assigns customers; some write several messages, and none is in both splits."""
    numbers = rng.permutation(np.arange(10_000, 10_000 + 10 * (len(test) + len(pool))))
    for rows, ids in ((test, numbers[: len(test)]), (pool, numbers[len(test) :])):
        # Fewer customers than messages, so that some write several and the split by customer has something to do.
        few = ids[: max(int(0.8 * len(rows)), 1)]
        for row in rows:
            row["customer"] = f"C{few[rng.integers(len(few))]}"
