"""The classes that the model is worst at."""

from collections.abc import Mapping, Sequence
from typing import Any


def worst_classes(per_class: Sequence[Mapping[str, Any]], n: int = 10, strength: float = 5.0) -> list[str]:
    """Names of the classes with the lowest F1, worst first; only classes below the average.

    F1 is 2 * correct / (support + predicted), a ratio of counts, so it can be shrunk like a proportion:
    every class gets ``strength`` expected and ``strength`` answered pseudo-records with the overall F1. A
    class of two records is then not the worst for one unlucky answer (B. Efron and C. Morris, Data analysis
    using Stein's estimator, 1975, for the idea).

    Args:
        per_class: rows of a suite's ``per_class``.
        n: at most so many.
        strength: pseudo-records.
    """
    below = sum(row["support"] + row["predicted"] for row in per_class)
    if below == 0:
        return []
    overall = 2 * sum(row["correct"] for row in per_class) / below

    def shrunk(row: Mapping[str, Any]) -> float:
        weight = row["support"] + row["predicted"]
        return float((2 * row["correct"] + 2 * strength * overall) / (weight + 2 * strength))

    ranked = sorted((shrunk(row), row["label"]) for row in per_class if row["f1"] < overall)
    return [label for _, label in ranked[:n]]
