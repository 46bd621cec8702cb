"""Calibrates the champion's confidence with one temperature, fitted to held-out answers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.models.calibration import (
    MAX_TEMPERATURE,
    at_temperature,
    expected_calibration_error,
    fit_temperature,
    minimum,
)
from posttrain.select.pool_sample import sample_pool
from posttrain.select.scores.answers import likelihood_group, surprisal
from posttrain.select.scores.context import ScoringContext
from posttrain.select.scores.passes import ScoringInput, prompts_of
from posttrain.select.scores.uncertainty import Floats

RowMask = npt.NDArray[np.bool_]

MIN_CALIBRATION_RECORDS = 30

_MAX_CALIBRATION_RECORDS = 500

_MIN_ANSWER_TEMPERATURE = 1e-3  # long answers are wrong though each of their tokens is all but sure

_MIN_SURPRISAL = 1e-9  # of a certain answer, whose loss at any temperature would be infinite if it is wrong

_FOLDS = 5

log = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, and the calibration error with and without it.

    Attributes:
        temperature: divides log-probabilities, of labels or of an answer per token; 1 where the error would not fall.
        ece_before: expected calibration error of the model as it is, 15 equal-width bins.
        ece_after: that of the calibrated model, each record with a temperature that was fitted to others.
        records: number of records that it was fitted to.
    """

    temperature: float
    ece_before: float
    ece_after: float
    records: int


def calibrate_labels(log_probabilities: npt.ArrayLike, truth: npt.ArrayLike) -> Calibration | None:
    """Fits a temperature to label probabilities, and measures the calibration error with and without it.

    Args:
        log_probabilities: float [N, K] of held-out records.
        truth: int [N], the right labels.

    Returns:
        None for fewer than 30 records.
    """
    logs, right = np.asarray(log_probabilities, np.float64), np.asarray(truth, np.int64)
    if len(right) < MIN_CALIBRATION_RECORDS:
        return None
    return _cross_fit(
        lambda rows: fit_temperature(logs[rows], right[rows]),
        lambda rows, temperature: _confidence(at_temperature(logs[rows], temperature)),
        (logs.argmax(axis=1) == right).astype(np.float64),
    )


def answer_confidence(surprisal: npt.ArrayLike, temperature: float) -> Floats:
    """Computes exp(-surprisal / temperature) of written answers: float64 [N] in [0, 1].

    Args:
        surprisal: float [N] >= 0, nats per token.
        temperature: 1 gives the geometric mean of the tokens' probabilities.
    """
    confidence: Floats = np.exp(-np.asarray(surprisal, np.float64) / temperature)
    return confidence


def fit_answer_temperature(surprisal: npt.ArrayLike, score: npt.ArrayLike) -> float:
    """Returns the temperature at which `answer_confidence` predicts best which answers are right, from 0.001 to 20.

    It minimises the cross-entropy of the answers' scores, -s ln c - (1 - s) ln(1 - c), which is convex in the inverse
    of the temperature.

    Args:
        surprisal: float [N], N >= 1, of answers to records that the model was not trained on.
        score: float [N] in [0, 1], 1 for a right answer.
    """
    nats = np.maximum(np.asarray(surprisal, np.float64), _MIN_SURPRISAL)
    right = np.asarray(score, np.float64)

    def loss(log_inverse: float) -> float:
        # ln(1 - exp(-x)) by expm1: near x = 0 the difference would lose all its digits.
        scaled = nats * np.exp(log_inverse)
        return float((right * scaled - (1 - right) * np.log(-np.expm1(-scaled))).sum())

    # Over the logarithm: the bounds are four orders of magnitude apart.
    return float(np.exp(-minimum(loss, -np.log(MAX_TEMPERATURE), -np.log(_MIN_ANSWER_TEMPERATURE))))


def calibrate_answers(surprisal: npt.ArrayLike, score: npt.ArrayLike) -> Calibration | None:
    """Fits a temperature to the surprisal of written answers, as `calibrate_labels` does.

    Args:
        surprisal: float [N] >= 0, nats per token, of answers to held-out records.
        score: float [N] in [0, 1], 1 for a right answer.

    Returns:
        None for fewer than 30 records.
    """
    nats, right = np.asarray(surprisal, np.float64), np.asarray(score, np.float64)
    if len(right) < MIN_CALIBRATION_RECORDS:
        return None
    return _cross_fit(
        lambda rows: fit_answer_temperature(nats[rows], right[rows]),
        lambda rows, temperature: answer_confidence(nats[rows], temperature),
        right,
    )


def _cross_fit(
    fit: Callable[[RowMask], float], confidence: Callable[[RowMask, float], Floats], right: Floats
) -> Calibration:
    """Fits a temperature, and measures the errors before and after, each record's by one that was fitted to others."""
    # Crossed, or the error after would be that of the records that the temperature was fitted to.
    fold = np.arange(len(right)) % _FOLDS
    after = np.empty(len(right))
    for number in range(_FOLDS):
        after[fold == number] = confidence(fold == number, fit(fold != number))
    every = np.ones(len(right), bool)
    ece_before = expected_calibration_error(confidence(every, 1.0), right)
    ece_after = expected_calibration_error(after, right)
    # The likelihood is led by the worst answers, and may spread where confidence was right on the whole.
    temperature = fit(every) if ece_after < ece_before else 1.0
    return Calibration(temperature, ece_before, ece_after, len(right))


def _confidence(log_probabilities: Floats) -> Floats:
    confidence: Floats = np.minimum(np.exp(log_probabilities.max(axis=1)), 1.0)
    return confidence


def calibrate_champion(scoring: ScoringContext, records: pa.Table, predictions: pa.Table) -> Calibration | None:
    """Fits the temperature at which the champion's confidence in labels, or in its written answers, is its accuracy.

    Args:
        scoring: the champion and the labels.
        records: RECORD table of records that the champion was not trained on.
        predictions: its answers, by ``id``; for a closed label set ``expected`` and ``labels``, the labels'
            log-probabilities; for free text ``predicted`` and ``score``.

    Returns:
        None where there are too few records, or the predictions lack probabilities.
    """
    judged = (_judged_labels if scoring.labels else _judged_answers)(scoring, predictions, records)
    sample = sample_pool(judged, _MAX_CALIBRATION_RECORDS, scoring.seed)
    if scoring.labels:
        index_of = {label: index for index, label in enumerate(scoring.labels)}
        truth = [index_of[answer] for answer in sample["expected"].to_pylist()]
        logs = np.array(sample["labels"].to_pylist(), np.float64).reshape(len(truth), len(index_of))
        calibration = calibrate_labels(logs, truth)
    else:
        sampled_records = records.take(compute.index_in(sample["id"], value_set=records["id"].combine_chunks()))
        answers = zip(prompts_of(sampled_records), sample["predicted"].to_pylist(), strict=True)
        nats = surprisal(
            scoring.run(likelihood_group(), [ScoringInput(prompt, (answer,)) for prompt, answer in answers])
        )
        calibration = calibrate_answers(nats, sample["score"].to_numpy())
    return _log_calibration(calibration, sample.num_rows)


def _judged_labels(scoring: ScoringContext, predictions: pa.Table, records: pa.Table) -> pa.Table:
    """Returns the predictions that have label probabilities and whose right label is in the label set."""
    is_label = compute.is_in(predictions["expected"], value_set=pa.array(scoring.labels, pa.string()))
    return predictions.filter(compute.and_(is_label, compute.is_valid(predictions["labels"])))


def _judged_answers(scoring: ScoringContext, predictions: pa.Table, records: pa.Table) -> pa.Table:
    """Returns the predictions of these records; none where a score is not from 0 to 1."""
    # A log-likelihood, such as perplexity's score, is not a share of rightness to compare confidence with.
    scores = predictions["score"]
    shares = compute.and_(compute.greater_equal(scores, 0.0), compute.less_equal(scores, 1.0))
    if not compute.all(shares, min_count=0).as_py():
        return predictions.slice(0, 0)
    return predictions.filter(compute.is_in(predictions["id"], value_set=records["id"].combine_chunks()))


def _log_calibration(calibration: Calibration | None, records: int) -> Calibration | None:
    if calibration is None:
        log.info("  not calibrated: %d judged answers are too few", records)
        return None
    log.info(
        "  %s on %d test records: temperature %.3f, ECE %.3f before and %.3f after (15 bins)",
        "calibrated" if calibration.temperature != 1.0 else "not calibrated, as it would not help",
        calibration.records,
        calibration.temperature,
        calibration.ece_before,
        calibration.ece_after,
    )
    return calibration
