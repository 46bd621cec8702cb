"""Run one suite: a model answers records, a scorer scores the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from posttrain.evaluate import metrics
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.examples import Examples, examples, sample_records
from posttrain.evaluate.scorers import SCORERS, Scored, Scorer, scorer_name
from posttrain.evaluate.scorers.base import normalised

if TYPE_CHECKING:
    from posttrain.models.language_model import LanguageModel

PREDICTIONS = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("expected", pa.string()),
        pa.field("predicted", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("valid", pa.bool_()),
        pa.field("confidence", pa.float64()),  # probability of the answer; null where unknown
        pa.field("log_likelihood", pa.float64()),  # ln P(expected | prompt), nats; null where unknown
        pa.field("labels", pa.list_(pa.float32())),  # ln P(label | prompt) of the task's labels; null where unknown
    ]
)


@dataclass(frozen=True)
class SuiteResult:
    """What one suite found.

    Args:
        name: of the suite.
        scorer: name of the scorer that was used.
        main: the metric that stands for the suite.
        paired: the metric that is the mean of the predictions' scores.
        metrics: by name.
        counts: the sums and counts behind them; ``records`` is N and ``offered`` what the sample was drawn
            from.
        per_class: rows of ``ClassRow.as_dict``; empty without a label set.
        confusion: rows of ``confusion_pairs``; empty without a label set.
        predictions: table by ``PREDICTIONS``, in the order of the records.
    """

    name: str
    scorer: str
    main: str
    paired: str
    metrics: dict[str, float]
    counts: dict[str, float]
    per_class: list[dict[str, Any]]
    confusion: list[dict[str, Any]]
    predictions: pa.Table


def run_suite(
    lm: LanguageModel, records: pa.Table, suite: SuiteConfig, name: str, *, full: bool = False
) -> SuiteResult:
    """Score a model on a suite's records; the same model and records give the same result.

    Args:
        lm: the model, with its task.
        records: table by the record schema.
        suite: the suite's config.
        name: its name in the config.
        full: score all records, not the suite's sample.

    Raises:
        UserError: if there are no records, one lacks the answer that the scorer needs, a label is outside the
            allowed set, or the scorer's function cannot be imported.
    """
    where = f"evaluate.suites.{name}"
    found = examples(records if full else sample_records(records, suite.sample), where)
    kind = scorer_name(suite, bool(lm.task.label_set))
    scorer = SCORERS[kind]
    if not scorer.plain_text:
        found.check_prompts(where)
    scored = scorer.score(lm, found, suite, where)
    counts: dict[str, float] = {
        "records": len(found),
        "offered": records.num_rows,
        "score_sum": _total(scored.score),
        "invalid": int((~scored.valid).sum()),
    }
    values = _metrics(scorer, scored, counts)
    rows: list[metrics.ClassRow] = []
    confusion: list[dict[str, Any]] = []
    if lm.task.label_set and kind in ("exact_match", "label_likelihood"):
        expected, predicted = _labels(lm, found, scored, where)
        rows, confusion = metrics.per_class(expected, predicted), metrics.confusion_pairs(expected, predicted)
        values["macro_f1"] = metrics.macro_f1(rows)
    return SuiteResult(
        name=name,
        scorer=kind,
        main=scorer.main,
        paired=scorer.paired,
        metrics=values,
        counts=counts,
        per_class=[row.as_dict() for row in rows],
        confusion=confusion,
        predictions=_predictions(found, scored),
    )


def _metrics(scorer: Scorer, scored: Scored, counts: dict[str, float]) -> dict[str, float]:
    n = counts["records"]
    names = scorer.metrics
    values = {scorer.paired: counts["score_sum"] / n}
    if "invalid_rate" in names:
        values["invalid_rate"] = counts["invalid"] / n
    if "log_likelihood_sum" in names:
        counts["log_likelihood_sum"] = values["log_likelihood_sum"] = _total(scored.log_likelihood)
        values["log_likelihood"] = counts["log_likelihood_sum"] / n
    if "perplexity" in names:
        counts["tokens"] = values["tokens"] = int(scored.tokens.sum())
        # exp(709) is the largest power that a float64 holds.
        values["perplexity"] = math.exp(min(709.0, -counts["log_likelihood_sum"] / max(1.0, counts["tokens"])))
    if "ece" in names:
        values["ece"] = metrics.expected_calibration_error(scored.confidence, scored.score)
    return values


def _labels(lm: LanguageModel, found: Examples, scored: Scored, where: str) -> tuple[list[str], list[metrics.Label]]:
    """Expected and answered labels as the label set spells them; None for an answer outside it."""
    spelled = {normalised(label): label for label in lm.task.label_set}
    expected = [spelled.get(normalised(answer), answer) for answer in found.answers(where)]
    return expected, [spelled.get(normalised(answer)) for answer in scored.predicted]


def _total(values: np.ndarray) -> float:
    """Exactly rounded sum, the same in any order."""
    return math.fsum(values.tolist())


def _predictions(found: Examples, scored: Scored) -> pa.Table:
    return pa.table(
        {
            "id": found.ids,
            "expected": found.expected,
            "predicted": list(scored.predicted),
            "score": scored.score,
            "valid": scored.valid,
            "confidence": pa.array(scored.confidence, pa.float64(), from_pandas=True),
            "log_likelihood": pa.array(scored.log_likelihood, pa.float64(), from_pandas=True),
            "labels": [None] * len(found) if scored.labels is None else list(scored.labels),
        },
        schema=PREDICTIONS,
    )
