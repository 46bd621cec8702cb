"""What a batch says of why its records were chosen."""

import numpy as np

from posttrain.select.why import by_cover, by_doubt, together, weak_class


def test_doubt_is_placed_within_the_pool() -> None:
    values = np.arange(100) / 100
    assert by_doubt("entropy", values, np.array([99, 50, 0]), np.ones(100, bool)) == [
        "entropy 0.99, in the top 1% of the pool",
        "entropy 0.50, in the top 50% of the pool",
        "entropy 0.00, in the top 100% of the pool",
    ]
    assert by_doubt("margin", values, np.array([0]), np.zeros(100, bool)) == [
        "margin about 0.00, in the bottom 1% of the pool"
    ]
    assert by_doubt("entropy", np.array([np.nan, 0.3]), np.array([0, 1]), np.ones(2, bool)) == [
        None,
        "entropy 0.30, in the top 100% of the pool",
    ]


def test_cover_counts_the_others_that_are_nearest() -> None:
    angles = np.radians([0, 4, 8, 90, 180, 180])
    points = np.column_stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
    assert by_cover(points, np.array([1, 3, 4, 5]), 6) == [
        "nearest chosen record of 2 others",
        "stands alone",
        "stands alone",
        "stands alone",
    ]


def test_facts_are_put_together() -> None:
    assert weak_class("card", "loan", frozenset({"loan"}), asked=True) == "may be `loan`, a class with poor results"
    assert weak_class(None, None, frozenset({"loan"}), asked=True) is None
    assert together(None, "one", None, "two") == "one; two"
