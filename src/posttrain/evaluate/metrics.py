"""Classification metrics of a suite; sums and counts first, ratios last."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Label = str | None
"""A label, or None for an answer outside the allowed set."""


@dataclass(frozen=True)
class ClassMetrics:
    """Counts and ratios of a class; a ratio with denominator 0 is 0."""

    label: str
    support: int
    predicted: int
    correct: int

    @property
    def precision(self) -> float:
        """The share of right ones among the answers of this class."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The share of right answers among the records of this class."""
        return self.correct / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        # As one ratio of counts: it needs no case for a precision or recall without denominator.
        return 2 * self.correct / (self.support + self.predicted) if self.support + self.predicted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns counts and ratios, for JSON."""
        return {**asdict(self), "precision": self.precision, "recall": self.recall, "f1": self.f1}


def per_class(expected: Sequence[str], predicted: Sequence[Label]) -> list[ClassMetrics]:
    """Computes the metrics of every class that is expected or answered, by name.

    Args:
        expected: N labels.
        predicted: N labels; None counts against recall and for no class.
    """
    # None, an answer outside the label set, is not a class: it lowers the recall of the class expected.
    support, answered = Counter(expected), Counter(label for label in predicted if label is not None)
    correct = Counter(want for want, got in zip(expected, predicted, strict=True) if want == got)
    return [
        ClassMetrics(label, support[label], answered[label], correct[label]) for label in sorted({*support, *answered})
    ]


def macro_f1(rows: Sequence[ClassMetrics]) -> float:
    """Computes the mean of the classes' F1, every class alike; 0 without classes."""
    return sum(row.f1 for row in rows) / len(rows) if rows else 0.0


def confusion_pairs(expected: Sequence[str], predicted: Sequence[Label]) -> list[dict[str, Any]]:
    """Counts wrong answers as ``{expected, predicted, count}``, most frequent first; predicted may be None."""
    pairs = Counter((want, got) for want, got in zip(expected, predicted, strict=True) if want != got)
    # Ties by name: equal results must give equal bytes.
    ordered = sorted(pairs.items(), key=lambda item: (-item[1], item[0][0], item[0][1] or ""))
    return [{"expected": want, "predicted": got, "count": count} for (want, got), count in ordered]


def worst_classes(per_class: Sequence[Mapping[str, Any]], n: int = 10, strength: float = 5.0) -> list[str]:
    """Returns the classes with the lowest F1, worst first; only classes below the average.

    Every class gets ``strength`` expected and ``strength`` answered pseudo-records with the overall F1 (B. Efron and
    C. Morris, Data analysis using Stein's estimator, 1975, for the idea).

    Args:
        per_class: Rows of a suite's ``per_class``.
        n: The most classes to return.
        strength: Number of pseudo-records.
    """
    below = sum(row["support"] + row["predicted"] for row in per_class)
    if below == 0:
        return []
    overall = 2 * sum(row["correct"] for row in per_class) / below

    def shrunk(row: Mapping[str, Any]) -> float:
        # F1 is a ratio of counts, so it can be shrunk like a proportion: a class of two records is then not the worst
        # for one unlucky answer.
        weight = row["support"] + row["predicted"]
        return float((2 * row["correct"] + 2 * strength * overall) / (weight + 2 * strength))

    ranked = sorted((shrunk(row), row["label"]) for row in per_class if row["f1"] < overall)
    return [label for _, label in ranked[:n]]


def recall_weights(per_class: Sequence[Mapping[str, Any]], weight: float, strength: float = 5.0) -> dict[str, float]:
    """Weighs classes by the errors of a model: 1 + ``weight`` * (1 - recall).

    Recall is shrunk towards the overall share of right answers, as if each class had ``strength`` more records with
    that share: of two records, both wrong says little.

    Args:
        per_class: Rows of a suite's ``per_class``.
    """
    support = sum(row["support"] for row in per_class)
    overall = sum(row["correct"] for row in per_class) / support if support else 0.0
    return {
        row["label"]: 1 + weight * (1 - (row["correct"] + strength * overall) / (row["support"] + strength))
        for row in per_class
    }
