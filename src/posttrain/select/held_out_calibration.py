"""Calibrate the champion by answers that evaluation has judged."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.select.sample import sample_pool
from posttrain.select.score import prompts_of
from posttrain.select.scores.answers import likelihood_group, surprisal
from posttrain.select.scores.calibration import Calibration, CalibrationError, calibrate, calibrate_answers
from posttrain.select.scores.columns import Scoring
from posttrain.select.scores.group import Asked

log = logging.getLogger("posttrain")


def calibration(
    scoring: Scoring, records: pa.Table, predictions: pa.Table, error: CalibrationError
) -> Calibration | None:
    """The temperature at which the champion is as sure of labels, or of its written answers, as it is right.

    Args:
        scoring: the champion, the labels and how many records are taken.
        records: RECORD table of records that the champion was not trained on.
        predictions: what it answered, by ``id``; for a closed label set ``expected`` and ``labels``, the labels'
            log-probabilities; for free text ``predicted`` and ``score``.
        error: the expected calibration error, with 15 equal-width bins.

    Returns:
        None where there are too few records, the predictions do not say enough, or calibration is off.
    """
    most = scoring.config.calibration
    if not most:
        return None
    judged = (_judged_labels if scoring.labels else _judged_answers)(scoring, predictions, records)
    drawn = sample_pool(judged, most, scoring.seed)
    if scoring.labels:
        place = {label: index for index, label in enumerate(scoring.labels)}
        truth = [place[answer] for answer in drawn["expected"].to_pylist()]
        logs = np.array(drawn["labels"].to_pylist(), np.float64).reshape(len(truth), len(place))
        found = calibrate(logs, truth, error)
    else:
        asked_of = records.take(compute.index_in(drawn["id"], value_set=records["id"].combine_chunks()))
        answers = zip(prompts_of(asked_of), drawn["predicted"].to_pylist(), strict=True)
        nats = surprisal(scoring.run(likelihood_group(), [Asked(prompt, (answer,)) for prompt, answer in answers]))
        found = calibrate_answers(nats, drawn["score"].to_numpy(), error)
    return _told(found, drawn.num_rows)


def _judged_labels(scoring: Scoring, predictions: pa.Table, records: pa.Table) -> pa.Table:
    """The predictions that say how probable each label is, where the right one is among them."""
    known = compute.is_in(predictions["expected"], value_set=pa.array(scoring.labels, pa.string()))
    return predictions.filter(compute.and_(known, compute.is_valid(predictions["labels"])))


def _judged_answers(scoring: Scoring, predictions: pa.Table, records: pa.Table) -> pa.Table:
    """The predictions of the records that are there; none where a score is no share of rightness."""
    scores = predictions["score"]
    shares = compute.and_(compute.greater_equal(scores, 0.0), compute.less_equal(scores, 1.0))
    if not compute.all(shares, min_count=0).as_py():
        return predictions.slice(0, 0)
    return predictions.filter(compute.is_in(predictions["id"], value_set=records["id"].combine_chunks()))


def _told(found: Calibration | None, records: int) -> Calibration | None:
    if found is None:
        log.info("  not calibrated: %d judged answers are too few", records)
        return None
    log.info(
        "  %s on %d test records: temperature %.3f, ECE %.3f before and %.3f after (15 bins)",
        "calibrated" if found.temperature != 1.0 else "not calibrated, as it would not help",
        found.records,
        found.temperature,
        found.ece_before,
        found.ece_after,
    )
    return found
