"""The reasons that a batch gives for its records."""

import re

import numpy as np
import pytest

from posttrain.select.hard_cases import HardCase
from posttrain.select.reasons import (
    coverage_reasons,
    hard_case_reasons,
    join_reasons,
    reason_in_words,
    uncertainty_reasons,
    weak_class_reason,
)
from posttrain.web.translations import Translator


def test_uncertainty_is_ranked_within_the_pool() -> None:
    values = np.arange(100) / 100
    assert uncertainty_reasons("entropy", values, np.array([99, 50, 0]), np.ones(100, bool)) == [
        "entropy 0.99, in the top 1% of the pool",
        "entropy 0.50, in the top 50% of the pool",
        "entropy 0.00, in the top 100% of the pool",
    ]
    assert uncertainty_reasons("margin", values, np.array([0]), np.zeros(100, bool)) == [
        "margin about 0.00, in the bottom 1% of the pool"
    ]
    assert uncertainty_reasons("entropy", np.array([np.nan, 0.3]), np.array([0, 1]), np.ones(2, bool)) == [
        None,
        "entropy 0.30, in the top 100% of the pool",
    ]


def test_coverage_counts_the_other_records_nearest_to_a_chosen_one() -> None:
    angles = np.radians([0, 4, 8, 90, 180, 180])
    points = np.column_stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
    assert coverage_reasons(points, np.array([1, 3, 4, 5]), 6) == [
        "nearest chosen record of 2 others",
        "stands alone",
        "stands alone",
        "stands alone",
    ]


def test_reasons_are_joined() -> None:
    assert (
        weak_class_reason("card", "loan", frozenset({"loan"}), is_scored=True)
        == "may be `loan`, a class with poor results"
    )
    assert weak_class_reason(None, None, frozenset({"loan"}), is_scored=True) is None
    assert join_reasons(None, "one", None, "two") == "one; two"


def _all_reasons() -> list[str]:
    """A reason of each kind that a batch has."""
    labels = frozenset({"a; b"})
    hard = HardCase("3fa2", ("wrong",), "gold; answer", "its answer")
    cases = [hard, HardCase("3fa3", ("high_loss",), None, None), HardCase("3fa4", ("regressions",), "gold", "its")]
    values = np.arange(100) / 100
    return [
        *[text for text in uncertainty_reasons("entropy", values, np.array([97]), np.ones(100, bool)) if text],
        *[text for text in uncertainty_reasons("margin", values, np.array([2]), np.zeros(100, bool)) if text],
        *[text for text in hard_case_reasons(np.arange(3), cases) if text],
        *[text for text in (weak_class_reason("a; b", None, labels, is_scored=True),) if text],
        *[text for text in (weak_class_reason("a; b", None, labels, is_scored=False),) if text],
        "entropy above the pool's 95th percentile",
        "between `a` and `b`, which the champion confuses",
        "nearest chosen record of 1 other",
        "nearest chosen record of 12 others",
        "stands alone",
        "drawn at random from the whole pool",
        "drawn at random, as neighbours hardly share labels (kappa 0.12)",
    ]


@pytest.mark.parametrize("reason", _all_reasons())
def test_people_who_answer_read_reasons_without_scores_records_and_answers(reason: str) -> None:
    words = reason_in_words(reason)
    assert words
    assert words != reason
    assert not re.search(r"`|entropy|margin|record|pool|champion|kappa|3fa|answer\b", words), words
    chinese = Translator("zh").line(words)
    assert not re.search("[a-z]{3}", chinese), chinese


def test_reasons_in_words_are_joined_once_and_other_texts_stay() -> None:
    first = "entropy 1.21, in the top 6% of the pool"
    assert reason_in_words(first) == "the model is unsure: it is less sure of only 6%"
    assert reason_in_words(f"{first}; stands alone") == f"{reason_in_words(first)}; unlike the other texts"
    both = "near test record 1, answered wrongly (`a; b` for `c`); near test record 2, answered wrongly (`a` for `c`)"
    assert reason_in_words(both) == "like a text that the model gets wrong"
    assert reason_in_words("entropy 0.00, in the top 100% of the pool; stands alone") == "unlike the other texts"
    assert reason_in_words("asked by Olga; urgent") == "asked by Olga; urgent"
    assert reason_in_words("") == ""
