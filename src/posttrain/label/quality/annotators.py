"""Gold accuracy, confusions and time of each annotator, and when the batch will be done."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.label.answers import Integers, Votes
from posttrain.label.quality.findings import Rate, wilson

IDLE_SECONDS = 600.0
"""Longer than this, an item's time is a break and counts as this much."""


@dataclass(frozen=True)
class Outcomes:
    """Answers whose correctness is known, in the order in which they were given: M of them.

    Attributes:
        row: int64 [M], row of the table.
        right: bool [M].
        gold: bool [M]: True for gold items, False for items that several annotators answered.
    """

    row: Integers
    right: np.ndarray
    gold: np.ndarray


def known_outcomes(answers: pa.Table) -> Outcomes:
    """Collects answers to gold items, and to resolved items with several answers, checked ones among them.

    Answers under a planted wrong suggestion are left out: they measure the bias to suggestions, not knowledge.
    """
    answer, expected, resolution = (answers[name].to_pylist() for name in ("answer", "expected", "resolution"))
    planted, items = (answers[name].to_pylist() for name in ("planted", "item"))
    given = Counter(items)
    rows, right, gold = [], [], []
    for row in range(len(answer)):
        # An item that was answered once is resolved as its only answer, which would prove itself right.
        truth = expected[row] if expected[row] is not None or given[items[row]] == 1 else resolution[row]
        if truth is not None and not planted[row]:
            rows.append(row)
            right.append(answer[row] == truth)
            gold.append(expected[row] is not None)
    return Outcomes(np.array(rows, np.int64), np.array(right, bool), np.array(gold, bool))


def gold_accuracy(answers: pa.Table, outcomes: Outcomes) -> tuple[Rate, dict[str, Rate], dict[str, Rate]]:
    """Returns the share of gold items answered right: overall, by annotator and by the right answer."""
    rows, right = outcomes.row[outcomes.gold], outcomes.right[outcomes.gold]
    by_annotator, by_class = (_rates(answers[name].take(rows), right) for name in ("annotator", "expected"))
    return wilson(int(right.sum()), len(right)), by_annotator, by_class


def _rates(names: pa.ChunkedArray, right: np.ndarray) -> dict[str, Rate]:
    counts: dict[str, list[bool]] = defaultdict(list)
    for name, correct in zip(names.to_pylist(), right, strict=True):
        counts[name].append(bool(correct))
    return {name: wilson(sum(correct), len(correct)) for name, correct in sorted(counts.items())}


def confusions(votes: Votes, reference: Integers) -> dict[str, dict[str, Any]]:
    """Returns how often each annotator deviates from the reference, and its confusions, most frequent first.

    Args:
        votes: The answers.
        reference: int64 [N] of `posttrain.label.quality.consensus.reference_labels`.

    Returns:
        By annotator ``compared`` and ``agreed`` (counts), and ``confusions``: ``right``, ``answer``, ``count``.
    """
    result: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(votes.annotators):
        by_annotator = (votes.annotator == index) & (reference >= 0)
        pairs = Counter(zip(reference[by_annotator].tolist(), votes.label[by_annotator].tolist(), strict=True))
        wrong = [
            {"right": votes.labels[right], "answer": votes.labels[answer], "count": count}
            for (right, answer), count in sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0]))
            if right != answer
        ]
        agreed = sum(count for (right, answer), count in pairs.items() if right == answer)
        result[name] = {"compared": int(by_annotator.sum()), "agreed": agreed, "confusions": wrong}
    return result


@dataclass(frozen=True)
class Work:
    """Time of an annotator's answers of one kind.

    Attributes:
        annotator: Name.
        kind: Kind of the batch's answers.
        labels: Number of answers.
        timed: Answers whose time is known.
        seconds: Their time together, breaks cut to `IDLE_SECONDS`.
        median_seconds: Median time of an answer; NaN if none is timed.
    """

    annotator: str
    kind: str
    labels: int
    timed: int
    seconds: float
    median_seconds: float


def measure_work(answers: pa.Table, kinds: Mapping[str, str]) -> list[Work]:
    """Returns the time by annotator and kind.

    Args:
        answers: Table of the schema `posttrain.label.answers.ANSWERS`.
        kinds: Kind of answer of each batch; a batch without one has the kind ``label``.
    """
    groups: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    columns = (answers[name].to_pylist() for name in ("annotator", "batch", "seconds"))
    for annotator, batch, seconds in zip(*columns, strict=True):
        groups[annotator, kinds.get(batch, "label")].append(seconds)
    result = []
    for (annotator, kind), times in sorted(groups.items()):
        known = np.minimum([time for time in times if time is not None], IDLE_SECONDS)
        median = float(np.median(known)) if len(known) else np.nan
        result.append(Work(annotator, kind, len(times), len(known), float(known.sum()), median))
    return result


@dataclass(frozen=True)
class Forecast:
    """The pace of a team, and when the answers that are still wanted will be there.

    Attributes:
        per_day: Answers a day, over the days from the first answer in the last week to ``now``.
        wanted: Answers still wanted.
        done_at: When they will be there; None at no pace.
    """

    per_day: float
    wanted: int
    done_at: datetime | None


def forecast(answers: pa.Table, wanted: int, now: datetime) -> Forecast:
    """Estimates when the batch will be done, from the pace of the last seven days."""
    times = [time for time in answers["created_at"].to_pylist() if now - timedelta(days=7) <= time <= now]
    # At least an hour, so that the first answers of a batch do not make an absurd pace.
    days = max((now - min(times)).total_seconds(), 3600.0) / 86400 if times else np.nan
    per_day = len(times) / days if times else 0.0
    done_at = now + timedelta(days=wanted / per_day) if per_day and wanted / per_day < 36500 else None
    return Forecast(per_day, wanted, done_at)
