"""Similarity of answers, in words and in meaning."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

from posttrain.select.scores.sampled_answers import lexical_diversity, self_consistency
from posttrain.select.scores.semantic_entropy import cluster_answers, discrete_semantic_entropy, semantic_entropy

texts = st.lists(st.sampled_from(["red", "blue", "green"]), max_size=4).map(" ".join)


def test_self_consistency_counts_the_most_frequent_answer() -> None:
    assert self_consistency(["Paris", " paris ", "Rome"]) == pytest.approx(2 / 3)
    assert self_consistency(["a", "b", "c", "d"]) == 0.25
    assert self_consistency(["same"] * 7) == 1.0


def test_lexical_diversity_by_hand() -> None:
    assert lexical_diversity(["the cat", "The cat!"]) == 0.0
    assert lexical_diversity(["the cat", "a dog"]) == 1.0
    # One word of two and three is shared: F1 is 2 / 5. The other pairs share none, and two.
    assert lexical_diversity(["red blue", "red green pink", "red blue"]) == pytest.approx(1 - (0.4 + 1.0 + 0.4) / 3)
    assert lexical_diversity(["", ""]) == 0.0


@given(st.lists(texts, min_size=2, max_size=5))
def test_lexical_diversity_is_a_mean_over_pairs(answers: list[str]) -> None:
    def f1(first: str, second: str) -> float:
        first_words, second_words = first.split(), second.split()
        if not first_words and not second_words:
            return 1.0
        unmatched, shared = list(second_words), 0
        for word in first_words:
            if word in unmatched:
                unmatched.remove(word)
                shared += 1
        precision, recall = shared / max(1, len(first_words)), shared / max(1, len(second_words))
        return 2 * precision * recall / (precision + recall) if shared else 0.0

    result = lexical_diversity(answers)
    assert result == pytest.approx(1 - np.mean([f1(*pair) for pair in combinations(answers, 2)]))
    assert result == pytest.approx(lexical_diversity(answers[::-1]))


def test_an_answer_joins_the_first_group_that_means_the_same() -> None:
    near = {(0, 2), (1, 3), (3, 4)}  # 4 is similar to 3, but not to 1, which represents their group
    assert cluster_answers(5, lambda first, other: (first, other) in near) == [0, 1, 0, 1, 2]
    assert cluster_answers(3, lambda first, other: True) == [0, 0, 0]
    assert cluster_answers(0, lambda first, other: True) == []


def test_semantic_entropy_by_hand() -> None:
    logs = np.log([0.5, 0.25, 0.25])
    assert semantic_entropy([0, 0, 0], logs) == 0.0
    assert semantic_entropy([0, 1, 1], logs) == pytest.approx(math.log(2))
    assert semantic_entropy([0, 1, 2], logs) == pytest.approx(1.5 * math.log(2))
    assert discrete_semantic_entropy([0, 0, 1, 1]) == pytest.approx(math.log(2))
    assert discrete_semantic_entropy([3, 3]) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-900, 0)), min_size=1, max_size=8))
def test_semantic_entropy_equals_its_definition(answers: list[tuple[int, float]]) -> None:
    groups, logs = [group for group, _ in answers], np.array([value for _, value in answers])
    p = np.exp(logs - logs.max())  # a common factor cancels out
    mass = [p[np.array(groups) == group].sum() for group in sorted(set(groups))]
    assert semantic_entropy(groups, logs) == pytest.approx(scipy_entropy(mass), abs=1e-9)
    assert discrete_semantic_entropy(groups) == pytest.approx(
        scipy_entropy([groups.count(group) for group in sorted(set(groups))]), abs=1e-12
    )
    # Equally probable answers: both are the same.
    assert semantic_entropy(groups, np.zeros(len(groups))) == pytest.approx(discrete_semantic_entropy(groups), abs=1e-9)
