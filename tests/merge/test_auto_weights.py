"""Weights from scores and Fisher norms."""

from pathlib import Path

import pytest

from posttrain.merge.plan_statistics import auto_weights
from posttrain.store.errors import UserError

MERGING = Path(__file__).parents[2] / "docs" / "merging.md"


def test_the_worked_example_of_the_docs() -> None:
    first, second = auto_weights([0.85, 0.90], [2.0, 3.0])
    assert (first, second) == pytest.approx((1.7 / 4.4, 2.7 / 4.4), abs=1e-15)
    text = " ".join(MERGING.read_text("utf-8").split())
    assert "two models at 0.85 and 0.90 whose Fisher norms stand 2:3" in text
    assert f"{first:.3f} and {second:.3f}" in text


def test_only_ratios_count() -> None:
    weights = auto_weights([0.85, 0.90, 0.1], [2.0, 3.0, 5.0])
    assert auto_weights([85, 90, 10], [2e-9, 3e-9, 5e-9]) == pytest.approx(weights)
    assert sum(weights) == pytest.approx(1)


def test_limits() -> None:
    assert auto_weights([0.3], [7.0]) == [1.0]
    assert auto_weights([0.5, 0.5], [4.0, 4.0]) == [0.5, 0.5]
    assert auto_weights([0.0, 0.5], [4.0, 4.0]) == [0.0, 1.0]
    with pytest.raises(UserError, match="zero"):
        auto_weights([0.0, 0.5], [4.0, 0.0])
    with pytest.raises(UserError, match="3 scores for 2 models"):
        auto_weights([0.0, 0.5, 1.0], [4.0, 0.0])
