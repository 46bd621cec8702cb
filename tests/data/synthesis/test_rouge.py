"""ROUGE-L against the textbook algorithm, and the nearest text against all texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.synthesis.synthesize import RougeIndex, longest_common_subsequence, rouge_words

TEXTS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12)


def common_length(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence, by the dynamic programme of textbooks."""
    lengths = np.zeros((len(first) + 1, len(second) + 1), dtype=int)
    for i, first_word in enumerate(first):
        for j, second_word in enumerate(second):
            if first_word == second_word:
                lengths[i + 1, j + 1] = lengths[i, j] + 1
            else:
                lengths[i + 1, j + 1] = max(lengths[i, j + 1], lengths[i + 1, j])
    return int(lengths[-1, -1])


@given(TEXTS, TEXTS)
def test_the_longest_common_subsequence(first: list[str], second: list[str]) -> None:
    assert longest_common_subsequence(first, second) == common_length(first, second)


@given(st.lists(TEXTS, max_size=8), TEXTS, st.sampled_from([0.2, 0.5, 0.7, 1.0]))
def test_the_nearest_text_is_the_best_of_all(texts: list[list[str]], new: list[str], least: float) -> None:
    scores = [2 * common_length(text, new) / (len(text) + len(new)) if text or new else 0.0 for text in texts]
    best = max(scores, default=0.0)
    result = RougeIndex(" ".join(text) for text in texts).of(" ".join(new), least)
    assert result == ((best, scores.index(best)) if best >= least else None)


def test_a_score_by_hand() -> None:
    """LCS of "the cat sat on the mat" and "the cat on a mat" is 4 of 6 and 5 words."""
    result = RougeIndex(["the cat sat on the mat"]).of("The cat, on a mat.", 0.1)
    assert result == (pytest.approx(8 / 11), 0)


def test_words_of_languages_without_spaces_are_characters() -> None:
    assert rouge_words("Ich heiße Ä-12, 你好 ok") == ["ich", "heisse", "ä", "12", "你", "好", "ok"]
