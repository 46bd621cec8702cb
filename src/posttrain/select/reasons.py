"""Explains in words why each record of a batch was chosen."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from posttrain.select.hard_cases import TRAINING_KIND, FocusTargets, HardCase
from posttrain.select.score_columns import Columns
from posttrain.select.scores.registry import BASE_MEASURES, uncertainty_sign
from posttrain.select.selectors.similarity import Floats, Rows, blocks
from posttrain.select.strategy import BatchStrategy

_KIND_PHRASES = {
    "wrong": "answered wrongly",
    "high_loss": "of high loss",
    "regressions": "which the champion before answered rightly",
    "disagreement": "which two models answer differently",
    "training_loss": "of high loss",
}


@dataclass(frozen=True)
class BatchChoice:
    """The rows of a batch, and the table that they were chosen from.

    Attributes:
        columns: columns of the score table, with rows for labelled records below.
        points: their whitened embeddings.
        count: number of rows of the score table.
        rows: int64 [M], the batch.
        reasons: the part of the batch that each of its rows is in.
        nearest: int64 [count], the hard case near each record, -1 for none.
        is_scored: bool [count], False where scores are imputed from neighbours.
        hard: sentences of `FocusTargets.records` for the batch, None for records that are not hard themselves.
    """

    columns: Columns
    points: Floats
    count: int
    rows: Rows
    reasons: Sequence[str]
    nearest: Rows
    is_scored: npt.NDArray[np.bool_]
    hard: Sequence[str | None]


def batch_reasons(choice: BatchChoice, strategy: BatchStrategy, targets: FocusTargets, random_reason: str) -> list[str]:
    """Explains each row of a batch in one line.

    Args:
        choice: the batch.
        strategy: what it was chosen by.
        targets: the weak points that its focus was on.
        random_reason: why a strategy of random draws was used; empty if it was named.
    """
    columns, count = choice.columns, choice.count
    # The measure that the strategy used; entropy for one that used none.
    by = str(strategy.options.get("by"))
    if uncertainty_sign(by) is None:
        by = strategy.name if strategy.name in BASE_MEASURES else "entropy"
    values = columns[by][:count] if by in columns else np.full(count, np.nan)
    uncertainties = uncertainty_reasons(by, values, choice.rows, choice.is_scored)
    covers = coverage_reasons(choice.points, choice.rows, count) if len(choice.rows) else []
    cases = hard_case_reasons(choice.nearest, targets.cases) if targets.cases else [None] * count
    classes = frozenset(targets.classes)
    lines = []
    explained = zip(choice.rows.tolist(), choice.reasons, choice.hard, uncertainties, covers, strict=True)
    for row, part, hard, uncertainty, cover in explained:
        # Chance had no other reason, whatever the record's scores are.
        if part == "explore":
            lines.append("drawn at random from the whole pool")
            continue
        predicted, runner_up = columns["predicted"][row], columns["runner_up"][row]
        weak = weak_class_reason(predicted, runner_up, classes, is_scored=bool(choice.is_scored[row]))
        facts = (weak, cases[row], hard) if part == "focus" else ()
        if strategy.name == "random":
            lines.append(
                join_reasons(*facts, f"drawn at random, as {random_reason}" if random_reason else "drawn at random")
            )
            continue
        lines.append(join_reasons(*facts, None if part == "cold_start" else uncertainty, cover))
    return lines


def uncertainty_reasons(
    name: str, values: npt.NDArray[np.floating], rows: Rows, is_scored: npt.NDArray[np.bool_]
) -> list[str | None]:
    """Compares a score of each row with the pool's, such as ``entropy 1.21, in the top 6% of the pool``.

    Args:
        name: name of the score; where a low one means uncertain, rows are in the bottom.
        values: float [N].
        rows: int64 [M].
        is_scored: bool [N], False where the score is imputed from neighbours.

    Returns:
        M sentences; None where the score is missing.
    """
    sign = uncertainty_sign(name) or 1
    signed = np.asarray(values, np.float64) * sign
    ranked = np.sort(signed[np.isfinite(signed)])
    side = "top" if sign > 0 else "bottom"
    sentences: list[str | None] = []
    for row in rows:
        if np.isfinite(signed[row]):
            at_least = len(ranked) - np.searchsorted(ranked, signed[row])
            # Rounded up: "in the top 0%" would be no reason.
            share = math.ceil(100 * at_least / len(ranked))
            about = "" if is_scored[row] else "about "
            sentences.append(f"{name} {about}{values[row]:.2f}, in the {side} {share}% of the pool")
        else:
            sentences.append(None)
    return sentences


def coverage_reasons(points: Floats, rows: Rows, count: int) -> list[str]:
    """Counts the records of the pool for which each row is the nearest of the batch.

    Args:
        points: float32 [P, d], rows of length 1.
        rows: int64 [M], the batch.
        count: the first N points are the pool.
    """
    # In blocks: similarities of a million records to a batch would not fit into memory.
    nearest = np.concatenate([(points[:count][part] @ points[rows].T).argmax(axis=1) for part in blocks(count)])
    # Each covers itself, even where an equal row comes first.
    nearest[rows] = np.arange(len(rows))
    others = np.bincount(nearest, minlength=len(rows)) - 1
    return [_coverage_reason(number) for number in others.tolist()]


def _coverage_reason(number: int) -> str:
    if not number:
        return "stands alone"
    return f"nearest chosen record of {number} other{'' if number == 1 else 's'}"


def weak_class_reason(
    predicted: str | None, runner_up: str | None, worst_classes: frozenset[str], *, is_scored: bool
) -> str | None:
    """Names the weak class that a record may belong to, by the champion's answer or its neighbours'."""
    named = [name for name in (predicted, runner_up) if name in worst_classes]
    verb = "may" if is_scored else "like its neighbours may"
    return f"{verb} be `{named[0]}`, a class with poor results" if named else None


def join_reasons(*facts: str | None) -> str:
    """Joins the facts that are there to one line."""
    return "; ".join(fact for fact in facts if fact)


_IN_WORDS = {
    r".+, in the (?:top|bottom) (?P<share>\d+)% of the pool": "the model is unsure: it is less sure of only {share}%",
    r"entropy above the pool's .+": "the model is unsure",
    r"stands alone": "unlike the other texts",
    r"nearest chosen record of (?P<count>1) other": "stands for 1 other text like it",
    r"nearest chosen record of (?P<count>\d+) others": "stands for {count} other texts like it",
    r".*may be `.+`, a class with poor results": "may belong to a class that the model often gets wrong",
    r"between `.+` and `.+`, which the champion confuses": "between two labels that the model confuses",
    r"near .+ record .+answered (?:wrongly|rightly).*": "like a text that the model gets wrong",
    r"near .+ record .+": "like a text that is hard for the model",
    r"drawn at random.*": "drawn at random",
}
"""A reason as `batch_reasons` has it, and as people who answer read it: without names of scores, and without what the
model or a test record says, which would tell what to answer."""

_LARGE_SHARE = 50  # percent: of more than half of the pool the model is less sure, so that this is no reason


def reason_in_words(line: str) -> str:
    """Rewrites a line of `batch_reasons` for people who answer; other texts stay as they are."""
    # A label, which stands between backticks, may hold a semicolon.
    facts = re.split(r"; (?=(?:[^`]*`[^`]*`)*[^`]*$)", line)
    return join_reasons(*dict.fromkeys(map(_fact_in_words, facts)))


def _fact_in_words(fact: str) -> str:
    for pattern, words in _IN_WORDS.items():
        if match := re.fullmatch(pattern, fact, re.DOTALL):
            parts = match.groupdict()
            return "" if int(parts.get("share", 0)) > _LARGE_SHARE else words.format(**parts)
    return fact


def hard_case_reasons(nearest: npt.NDArray[np.int64], cases: Sequence[HardCase]) -> list[str | None]:
    """Describes the hard case that each pool record was chosen for.

    Args:
        nearest: int64 [N], from `nearest_hard_case`.
        cases: H hard cases, in the order of their embeddings.

    Returns:
        N sentences, such as ``near test record 3fa2, answered wrongly (`cash` for `card`)``; None for records that are
        near none.
    """
    sentences = [_hard_case_reason(case) for case in cases]
    return [None if case < 0 else sentences[case] for case in nearest.tolist()]


def _hard_case_reason(case: HardCase) -> str:
    set_name = "training" if TRAINING_KIND in case.kinds else "test"
    sentence = f"near {set_name} record {case.id}, {' and '.join(_KIND_PHRASES[kind] for kind in case.kinds)}"
    if "wrong" in case.kinds and case.expected and case.predicted is not None:
        sentence += f" (`{case.predicted[:40]}` for `{case.expected[:40]}`)"
    return sentence
