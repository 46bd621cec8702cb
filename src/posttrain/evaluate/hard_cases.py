"""What the model is worst at: classes and records."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


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


def losses(predictions: pa.Table) -> np.ndarray:
    """Loss of each record, float64 [N]: -ln P(expected | prompt) in nats where known, else 1 - score."""
    score = predictions["score"].to_numpy()
    log_likelihood = predictions["log_likelihood"].to_numpy(zero_copy_only=False).astype(np.float64)
    loss: np.ndarray = np.where(np.isnan(log_likelihood), 1.0 - score, -log_likelihood)
    return loss


def hard_cases(predictions: pa.Table, n: int = 50) -> list[str]:
    """Ids of the wrongly answered records with the highest loss, hardest first; ties by id.

    A record is wrong when its score is below 1, or below the median where scores are log-likelihoods.
    """
    score, loss = predictions["score"].to_numpy(), losses(predictions)
    if len(score) == 0:
        return []
    bar = 1.0 if score.max() >= 0 and score.min() >= 0 else float(np.median(score))
    ranked = sorted((-loss[row], id) for row, id in enumerate(predictions["id"].to_pylist()) if score[row] < bar)
    return [id for _, id in ranked[:n]]
