"""New errors of an annotator, and the comparison of two counts."""

from typing import Any

import numpy as np
from vote_tables import answer_table

from posttrain.label.quality.annotators import known_outcomes
from posttrain.label.quality.behaviour import new_errors


def gold_rows(name: str, right: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"item": item, "annotator": name, "expected": "x", "answer": "x" if correct else "y"}
        for item, correct in enumerate(right)
    ]


def findings_of(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    table = answer_table(rows)
    return [finding.annotators for finding in new_errors(table, known_outcomes(table), rate=0.01)]


def test_only_the_annotator_whose_errors_rise_is_named() -> None:
    rng = np.random.default_rng(3)
    steady, tiring = rng.random(200) < 0.9, rng.random(200) < np.repeat([0.95, 0.5], 100)
    weak = rng.random(200) < 0.6
    rows = [row for pair in zip(gold_rows("anna", steady), gold_rows("ben", tiring), strict=True) for row in pair]
    assert findings_of(rows + gold_rows("cleo", weak)) == [("ben",)]
    assert findings_of(gold_rows("ben", tiring[80:120])) == [], "too few to say"


def test_steady_annotators_are_named_at_most_as_often_as_the_rate_says() -> None:
    rng = np.random.default_rng(0)
    named = sum(bool(findings_of(gold_rows("anna", rng.random(150) < 0.85))) for _ in range(300))
    assert named <= 6, "1% of 300 are 3"
