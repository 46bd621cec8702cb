"""The reasons that a batch gives for its records."""

import numpy as np

from posttrain.select.reasons import coverage_reasons, join_reasons, uncertainty_reasons, weak_class_reason


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
