"""Texts that share a run of words share a fingerprint."""

import numpy as np
import pytest

from posttrain.data.contamination.sketches import fingerprints, window_minima
from posttrain.data.duplicates.shingles import ngram_sequences

VOCABULARY = [f"w{number}" for number in range(500)]


def text(rng: np.random.Generator, length: int) -> str:
    return " ".join(VOCABULARY[number] for number in rng.integers(0, len(VOCABULARY), length))


def fingerprint_sets(texts: list[str], ngram: int) -> list[set[int]]:
    result = fingerprints(texts, ngram)
    return [set(part.tolist()) for part in np.split(result.values, result.offsets[1:-1])]


@pytest.mark.parametrize("ngram", [1, 2, 3, 5, 13])
def test_a_shared_run_leaves_a_shared_fingerprint(ngram: int) -> None:
    rng = np.random.default_rng(ngram)
    for _ in range(50):
        run = text(rng, ngram)
        pair = [f"{text(rng, int(rng.integers(0, 30)))} {run} {text(rng, int(rng.integers(0, 30)))}" for _ in "ab"]
        first, other = fingerprint_sets([part.strip() for part in pair], ngram)
        assert first & other


@pytest.mark.parametrize("ngram", [1, 3, 13])
def test_minima_are_those_of_every_window(ngram: int) -> None:
    rng = np.random.default_rng(0)
    texts = [text(rng, length) for length in (1, ngram, ngram + 1, 40, 2)]
    window = min(4, ngram)
    result = window_minima(texts, ngram)
    for number, item in enumerate(texts):
        shorter = ngram_sequences([item], ngram - window + 1, "word").values.tolist()
        expected = [min(shorter[at : at + window]) for at in range(max(1, len(shorter) - window + 1))]
        assert result.values[result.offsets[number] : result.offsets[number + 1]].tolist() == expected
        assert len(expected) == len(ngram_sequences([item], ngram, "word").values)


def test_a_fingerprint_depends_only_on_its_text() -> None:
    rng = np.random.default_rng(1)
    texts = [text(rng, int(rng.integers(1, 40))) for _ in range(20)]
    assert fingerprint_sets(texts, 13) == [fingerprint_sets([item], 13)[0] for item in texts]


def test_a_short_text_has_one_fingerprint_of_all_its_words() -> None:
    first, copy, other = fingerprint_sets(["a b c", "a b c", "a b d e f g h i j k l m"], 13)
    assert len(first) == len(other) == 1
    assert first == copy != other


def test_fingerprints_are_few() -> None:
    result = fingerprints([text(np.random.default_rng(2), 10_000)], 13)
    assert 0.35 < len(result.values) / 10_000 < 0.45  # 2 in 5, by Schleimer et al.
