"""What every scorer takes and gives."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples

if TYPE_CHECKING:
    from posttrain.models.generate import Generation
    from posttrain.models.language_model import LanguageModel


@dataclass(frozen=True)
class Scored:
    """Answers and scores of N records.

    Args:
        predicted: what the model answered.
        score: float64 [N]; its mean is the suite's paired metric, so higher is better.
        valid: bool [N]; False where the answer is outside the allowed set or was cut off.
        confidence: float64 [N], probability of the answer; NaN where it is not known.
        log_likelihood: float64 [N], ln P(expected | prompt) in nats; NaN where it is not known.
        tokens: int64 [N], tokens of the expected answer; zeros where they are not counted.
        labels: float32 [N, K], ln P(label | prompt) of the label set, normalised over it; None where not asked for.
    """

    predicted: Sequence[str]
    score: np.ndarray
    valid: np.ndarray
    confidence: np.ndarray
    log_likelihood: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray | None = None


@dataclass(frozen=True)
class Scorer:
    """One way to score answers.

    Args:
        score: ``score(lm, examples, suite, where) -> Scored``.
        main: the metric that stands for the suite.
        paired: the metric that is the mean of the records' scores, for which intervals are computed.
        metrics: names of all metrics without a label set.
        label_metrics: names of those that come on top with a label set.
        plain_text: whether records without a prompt can be scored.
    """

    score: Callable[[LanguageModel, Examples, SuiteConfig, str], Scored]
    main: str
    paired: str
    metrics: frozenset[str]
    label_metrics: frozenset[str] = field(default=frozenset())
    plain_text: bool = False


def normalised(text: str) -> str:
    """NFC, without outer whitespace, inner runs of whitespace as one space: as record ids see it."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def from_answers(answers: Sequence[Generation], score: Sequence[float], valid: Sequence[bool]) -> Scored:
    """Scores of written answers, whose probabilities are not known."""
    unknown = np.full(len(answers), np.nan)
    return Scored(
        predicted=[answer.text for answer in answers],
        score=np.asarray(score, np.float64),
        valid=np.asarray(valid, bool),
        confidence=unknown,
        log_likelihood=unknown.copy(),
        tokens=np.zeros(len(answers), np.int64),
    )
