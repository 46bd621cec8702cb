"""Runs a suite: a model answers records, a scorer scores the answers; writes and reads the result as files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.evaluate import metrics
from posttrain.evaluate.config import SuiteConfig
from posttrain.evaluate.scorers import SCORERS, Scorer, ScorerOutput, scorer_name
from posttrain.evaluate.scorers.base import Examples, GivenAnswers, read_examples, sample_records
from posttrain.models.calibration import expected_calibration_error
from posttrain.models.chat import naming_records
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError, WorkError
from posttrain.store.text_files import normalise_text

if TYPE_CHECKING:
    from posttrain.models.ensembles.ensemble import Ensemble
    from posttrain.models.generator import Answer
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

_METRICS_FILE = "evaluation.json"

_FIELDS = ("scorer", "main", "paired", "metrics", "counts", "per_class", "confusion")


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite.

    Args:
        name: Name of the suite.
        scorer: Name of the scorer that was used.
        main: The metric that stands for the suite.
        paired: The metric that is the mean of the predictions' scores.
        metrics: Metrics by name.
        counts: Sums and counts behind them; ``records`` is N and ``offered`` what the sample was drawn
            from.
        per_class: Rows of ``ClassMetrics.as_dict``; empty without a label set.
        confusion: Rows of ``confusion_pairs``; empty without a label set.
        predictions: Table by ``PREDICTIONS``, in the order of the records.
        ensemble: `Ensemble.describe`, of an ensemble: its models, and a cascade's curve of cost and accuracy.
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
    ensemble: dict[str, Any] | None = None


def run_suite(
    lm: LanguageModel | Ensemble,
    records: pa.Table,
    suite: SuiteConfig,
    name: str,
    *,
    full: bool = False,
    where: str | None = None,
) -> SuiteResult:
    """Scores a model on a suite's records; the same model and records give the same result.

    Args:
        lm: The model, with its task; or an ensemble.
        records: Table by the record schema.
        suite: The suite's config.
        name: Its name in the config.
        full: True to score all records, not the suite's sample.
        where: The config key that errors name; None: the suite's.

    Raises:
        UserError: there are no records, one lacks the answer that the scorer needs, a label is outside the allowed
            set, the scorer's function cannot be imported, the scorer does not give a metric that it names, or it
            measures single models alone and this is an ensemble.
    """
    from posttrain.models.ensembles.ensemble import Ensemble

    where = where or f"evaluate.suites.{name}"
    examples = read_examples(records if full else sample_records(records, suite.sample), where)
    kind = scorer_name(suite, bool(lm.task.label_set))
    scorer = SCORERS[kind]
    if isinstance(lm, Ensemble) and not scorer.ensembles:
        raise UserError(f"scorer `{kind}` measures a single model, not an ensemble", where=f"{where}.scorer")
    # Before the model answers anything: the error names the record at once, not after minutes of generation.
    if not scorer.plain_text:
        examples.check_prompts(where)
    with naming_records(examples.prompts, examples.locations.__getitem__):
        if isinstance(lm, Ensemble) and not lm.task.label_set:
            scored = _score_texts(lm, scorer, examples, suite, where)
        else:
            scored = scorer.score(lm, examples, suite, where)  # type: ignore[arg-type]  # `ensembles` was checked
    counts: dict[str, float] = {
        "records": len(examples),
        "offered": records.num_rows,
        "score_sum": _exact_sum(scored.score),
        "invalid": int((~scored.valid).sum()),
    }
    values = _metrics(scorer, scored, counts)
    rows: Sequence[metrics.ClassMetrics] = scored.per_class
    confusion: list[dict[str, Any]] = []
    names = scorer.metrics | (scorer.label_metrics if lm.task.label_set else frozenset())
    if lm.task.label_set and "macro_f1" in names:
        expected, predicted = _labels(lm, examples, scored, where)
        rows, confusion = metrics.per_class(expected, predicted), metrics.confusion_pairs(expected, predicted)
        values["macro_f1"] = metrics.macro_f1(rows)
    values |= scored.metrics
    for metric in sorted(names):
        # NaN is not JSON, and a rule over a metric that is missing would hold for no candidate.
        if not math.isfinite(values.get(metric, math.nan)):
            raise UserError(
                f"scorer `{kind}` gives no finite number for its metric `{metric}`", where=f"{where}.scorer"
            )
    return SuiteResult(
        name=name,
        scorer=kind,
        main=scorer.main,
        paired=scorer.paired,
        metrics=values,
        counts=counts,
        per_class=[row.as_dict() for row in rows],
        confusion=confusion,
        predictions=_predictions_table(examples, scored),
        ensemble=scored.ensemble,
    )


def score_answers(
    suite: SuiteConfig, task: TaskConfig, examples: Examples, answers: Sequence[Answer], where: str
) -> ScorerOutput:
    """Scores answers that are there already by a suite's scorer, one that takes ensembles.

    Args:
        suite: The suite's config.
        task: The task.
        examples: N records.
        answers: [N].
        where: The suite's config key, named in errors.
    """
    scorer = SCORERS[scorer_name(suite, bool(task.label_set))]
    return scorer.score(GivenAnswers(task, answers), examples, suite, where)  # type: ignore[arg-type]


def _score_texts(
    ensemble: Ensemble, scorer: Scorer, examples: Examples, suite: SuiteConfig, where: str
) -> ScorerOutput:
    """Scores an ensemble's free text, and that of every model alone."""
    texts = ensemble.texts(examples.prompts, all_models=True)
    scored = score_answers(suite, ensemble.task, examples, texts.answers, where)
    alone = [
        score_answers(suite, ensemble.task, examples, answers, where).score for answers in texts.members.complete()
    ]
    return replace(scored, ensemble=ensemble.describe_texts(texts, np.stack(alone), scorer.paired))


def _metrics(scorer: Scorer, scored: ScorerOutput, counts: dict[str, float]) -> dict[str, float]:
    n = counts["records"]
    names = scorer.metrics
    values = {scorer.paired: counts["score_sum"] / n}
    if "invalid_rate" in names:
        values["invalid_rate"] = counts["invalid"] / n
    if "log_likelihood_sum" in names:
        counts["log_likelihood_sum"] = values["log_likelihood_sum"] = _exact_sum(scored.log_likelihood)
        values["log_likelihood"] = counts["log_likelihood_sum"] / n
    if "perplexity" in names:
        counts["tokens"] = values["tokens"] = int(scored.tokens.sum())
        # exp(709) is the largest power that a float64 holds, and JSON has no infinity.
        values["perplexity"] = math.exp(min(709.0, -counts["log_likelihood_sum"] / max(1.0, counts["tokens"])))
    if "ece" in names:
        values["ece"] = expected_calibration_error(scored.confidence, scored.score)
    return values


def _labels(
    lm: LanguageModel | Ensemble, examples: Examples, scored: ScorerOutput, where: str
) -> tuple[list[str], list[metrics.Label]]:
    """Returns expected and answered labels as the label set spells them; None for an answer outside it."""
    # Compared as the scorers compare them, or a right answer would be no class in the confusion.
    spelled = {normalise_text(label): label for label in lm.task.label_set}
    expected = [spelled.get(normalise_text(answer), answer) for answer in examples.answers(where)]
    return expected, [spelled.get(normalise_text(answer)) for answer in scored.predicted]


def _exact_sum(values: np.ndarray) -> float:
    """Returns the exactly rounded sum, which is the same in any order."""
    return math.fsum(values.tolist())


def _predictions_table(examples: Examples, scored: ScorerOutput) -> pa.Table:
    return pa.table(
        {
            "id": examples.ids,
            "expected": examples.expected,
            "predicted": list(scored.predicted),
            "score": scored.score,
            "valid": scored.valid,
            # `from_pandas` turns NaN, an unknown value, into null.
            "confidence": pa.array(scored.confidence, pa.float64(), from_pandas=True),
            "log_likelihood": pa.array(scored.log_likelihood, pa.float64(), from_pandas=True),
            "labels": [None] * len(examples) if scored.labels is None else list(scored.labels),
        },
        schema=PREDICTIONS,
    )


def write_evaluation(folder: Path, results: Mapping[str, SuiteResult]) -> None:
    """Writes ``evaluation.json`` and ``predictions-SUITE.parquet``; equal results give equal bytes.

    Args:
        folder: Existing folder.
        results: Results by suite name, in the config's order.
    """
    suites = [
        {
            **{"name": name, **{field: getattr(result, field) for field in _FIELDS}},
            **({"ensemble": result.ensemble} if result.ensemble else {}),
        }
        for name, result in results.items()
    ]
    # NaN is refused: it is not JSON, and a rule of the gate could not compare it.
    text = json.dumps({"suites": suites}, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / _METRICS_FILE).write_text(text + "\n", encoding="utf-8")
    for name, result in results.items():
        pq.write_table(result.predictions, _predictions_path(folder, name))


def read_evaluation(folder: Path) -> dict[str, SuiteResult]:
    """Reads what ``write_evaluation`` wrote.

    Raises:
        WorkError: if the folder holds no evaluation or it cannot be read.
    """
    try:
        suites = json.loads((folder / _METRICS_FILE).read_text(encoding="utf-8"))["suites"]
        return {
            suite["name"]: SuiteResult(**suite, predictions=pq.read_table(_predictions_path(folder, suite["name"])))
            for suite in suites
        }
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise WorkError(f"{folder} holds no readable evaluation: {error}") from error


def _predictions_path(folder: Path, suite: str) -> Path:
    return folder / f"predictions-{suite}.parquet"
