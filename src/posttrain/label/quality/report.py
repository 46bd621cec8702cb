"""The quality report of a table of answers, its alarms, and the values that triggers and gates use."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.label.answers import Votes, answers_of_agreement, answers_of_people, encode_votes
from posttrain.label.quality.agreement import krippendorff_alpha, measure_agreement
from posttrain.label.quality.annotators import (
    confusions,
    forecast,
    gold_accuracy,
    known_outcomes,
    measure_work,
)
from posttrain.label.quality.behaviour import (
    haste,
    new_errors,
    one_answer,
    position_bias,
    random_answers,
    suggestion_bias,
)
from posttrain.label.quality.config import VALUE_NAMES
from posttrain.label.quality.consensus import dawid_skene, gold_labels, majority, reference_labels
from posttrain.label.quality.findings import Finding

FALSE_ALARMS = 0.05
"""Chance that a report on honest annotators has any alarm."""

FAMILIES = 6
"""Families of tests in `alarms`, which share the rate of false alarms."""


@dataclass(frozen=True)
class QualityInputs:
    """Facts besides the answers that a report may use.

    Attributes:
        kinds: Kind of answer of each batch.
        word_counts: Words of the text by item.
        random_order: Batches of preferences whose candidates are in a random order, such as two answers of one model.
        wanted: Answers that are still wanted.
    """

    kinds: Mapping[str, str] | None = None
    word_counts: Mapping[int, int] | None = None
    random_order: Collection[str] = ()
    wanted: int = 0


def alarms(answers: pa.Table, inputs: QualityInputs | None = None) -> list[Finding]:
    """Finds faults of annotators, the surest first.

    On honest annotators the chance of any alarm is at most `FALSE_ALARMS`.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`; those of models are left out.
        inputs: Further facts.
    """
    inputs = inputs or QualityInputs()
    people = answers_of_people(answers)
    if not people.num_rows:
        return []
    votes = encode_votes(people)
    outcomes = known_outcomes(people)
    expected = gold_labels(votes, people["expected"].to_pylist())
    # Planted suggestions mislead even careful annotators; what they answered there says nothing of other faults.
    planted = people["planted"].to_numpy(zero_copy_only=False)[votes.rows]
    reference = np.where(planted, -1, reference_labels(votes, expected))
    rate = FALSE_ALARMS / FAMILIES
    findings = [
        *suggestion_bias(people, outcomes, rate),
        *position_bias(people, rate, inputs.random_order),
        *haste(people, inputs.kinds or {}, inputs.word_counts, rate),
        *one_answer(votes, reference, rate),
        *random_answers(votes, reference, rate),
        *new_errors(people, outcomes, rate),
    ]
    return sorted(findings, key=lambda finding: (finding.p_value, finding.kind, finding.annotators))


def quality_report(
    answers: pa.Table,
    inputs: QualityInputs | None = None,
    *,
    now: datetime | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Reports on everything that is measured, as JSON: rates with their counts, None where something is undefined.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`.
        inputs: Further facts.
        now: Time of the report; the present by default.
        draws: Bootstrap samples of the intervals of agreement; 0: no intervals.
        seed: Seed of the bootstrap.

    Returns:
        ``counts``; ``agreement`` of people, overall, ``by_class`` and ``by_pair``; ``gold``, overall, ``by_annotator``
        and ``by_class``; ``consensus``: ties of the majority and, if there are few enough labels, each annotator's
        accuracy by Dawid and Skene; ``annotators`` with their confusions; ``work``; ``outlook``; ``alarms``; ``values``
        of `VALUE_NAMES`.
    """
    inputs = inputs or QualityInputs()
    people = answers_of_people(answers)
    votes = encode_votes(people)
    outcomes = known_outcomes(people)
    expected = gold_labels(votes, people["expected"].to_pylist())
    compared = encode_votes(answers_of_agreement(people))
    agreement = asdict(measure_agreement(compared, draws=draws, seed=seed))
    gold, by_annotator, by_class = gold_accuracy(people, outcomes)
    findings = alarms(answers, inputs)
    now = now or datetime.now(UTC)
    report = {
        "counts": {
            "answers": people.num_rows,
            "of_models": answers.num_rows - people.num_rows,
            "items": len(votes.items),
            "annotators": len(votes.annotators),
            "labels": len(votes.labels),
        },
        "agreement": agreement,
        "gold": {
            **asdict(gold),
            "by_annotator": {name: asdict(rate) for name, rate in by_annotator.items()},
            "by_class": {name: asdict(rate) for name, rate in by_class.items()},
        },
        "consensus": _consensus(votes, expected),
        "annotators": confusions(votes, reference_labels(votes, expected)),
        "work": [asdict(part) for part in measure_work(answers, inputs.kinds or {})],
        "outlook": asdict(forecast(people, inputs.wanted, now)),
        "alarms": [finding.as_dict() for finding in findings],
        "values": _values(
            people.num_rows, agreement["percent"]["value"], krippendorff_alpha(compared), gold.value, len(findings)
        ),
    }
    return dict(_json_safe(report))


def quality_values(answers: pa.Table, inputs: QualityInputs | None = None) -> dict[str, float]:
    """Returns the values of `VALUE_NAMES`, as `quality_report` has them; NaN where there is nothing to measure."""
    people = answers_of_people(answers)
    if not people.num_rows:
        return dict.fromkeys(VALUE_NAMES, math.nan)
    agreement = measure_agreement(encode_votes(answers_of_agreement(people)), draws=0)
    gold = gold_accuracy(people, known_outcomes(people))[0]
    count = len(alarms(answers, inputs))
    return _values(people.num_rows, agreement.percent.value, agreement.alpha.value, gold.value, count)


def _values(answers: int, agreement: float, alpha: float, gold: float, count: int) -> dict[str, float]:
    return dict(zip(VALUE_NAMES, (float(answers), agreement, alpha, gold, float(count)), strict=True))


def _consensus(votes: Votes, expected: np.ndarray) -> dict[str, Any]:
    """Summarises majority and posterior; the posterior is None for more labels than its matrices may have."""
    counted = majority(votes)
    summary: dict[str, Any] = {
        "items": len(votes.items),
        "several": int((counted.answers > 1).sum()),
        "ties": [
            {"item": int(votes.items[item]), "labels": [votes.labels[label] for label in tied]}
            for item, tied in counted.ties.items()
        ],
        "posterior": None,
    }
    # Free text has nearly as many answers as items: there is nothing to learn of confusions.
    if len(votes.labels) > max(2, len(votes.item) // 5) or not len(votes.items):
        return summary
    fitted = dawid_skene(votes, expected=expected)
    sure = fitted.posterior.max(axis=1)
    summary["posterior"] = {
        "iterations": fitted.iterations,
        "mean_confidence": float(sure.mean()),
        "unsure_items": int((sure < 0.9).sum()),
        "differs_from_majority": int(((counted.label >= 0) & (fitted.label != counted.label)).sum()),
        "accuracy": dict(zip(votes.annotators, fitted.accuracy.tolist(), strict=True)),
    }
    return summary


def _json_safe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(inner) for inner in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
