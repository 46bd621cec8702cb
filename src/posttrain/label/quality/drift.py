"""Drift: a chart of each annotator's errors on gold and checked items, and shifts of the mix of labels.

The chart is the Bernoulli CUSUM of M. R. Reynolds and Z. G. Stoumbos (Journal of Quality Technology 31, 1999). Its
threshold follows from the average run length (ARL), the expected number of outcomes between two false alarms, which is
computed exactly from the Markov chain of its values (D. Brook and D. A. Evans, Biometrika 59, 1972)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
from scipy import linalg

from posttrain.label.answers import Integers, Votes
from posttrain.label.quality.annotators import Outcomes
from posttrain.label.quality.findings import Finding, Shift, compare_counts, holm, share_exceeds, wilson

REFERENCE = 30
"""Outcomes from which an annotator's usual error rate is taken, at least; a third of all if that is more."""

ODDS = 3.0
"""The chart is fastest for errors whose odds have become this many times the usual ones."""

SMALL_SHIFT, LARGE_SHIFT = 0.1, 0.25
"""Population stability indexes that are customarily called a small and a large shift (N. Siddiqi, 2006)."""

_LEAST_ERROR = 0.02  # usual error rate, at least: one error of somebody who never erred is no drift
_PERMUTATIONS = 10_000
_ENOUGH = 20  # permutations with as many late errors, after which no more are drawn
_LEAST_ANSWERS = 60  # answers in a half of an annotator's or a guideline's, before mixes of labels are compared


@dataclass(frozen=True)
class Chart:
    """The CUSUM of a sequence of outcomes.

    Attributes:
        usual: Error rate that the chart takes for normal: the upper end of the reference's interval.
        threshold: Value from which on it alarms.
        run_length: Exact average run length at ``usual`` and ``threshold``.
        values: float64 [M - reference], after each outcome that follows the reference.
        alarm: Index of the outcome, in the whole sequence, at which it first alarmed; None if it never did.
        since: Index of the outcome after which the errors began to rise, if it alarmed.
        p_value: Share of random orders of the outcomes with as many late errors, if the chart alarmed; else 1.
    """

    usual: float
    threshold: int
    run_length: float
    values: np.ndarray
    alarm: int | None
    since: int | None
    p_value: float


def error_chart(
    right: np.ndarray, run_length: float, seed: int = 0, annotators: np.ndarray | None = None
) -> Chart | None:
    """Charts the errors of a sequence of outcomes.

    Args:
        right: bool [M], in the order of time.
        run_length: Average number of outcomes between false alarms.
        seed: Seed of the permutations.
        annotators: [M], whose outcomes they are, if of several; permutations stay within each.

    Returns:
        None if there are not more outcomes than the reference.
    """
    reference = max(REFERENCE, len(right) // 3)
    if len(right) <= reference:
        return None
    wrong = ~np.asarray(right, bool)
    # The upper end and not the rate itself: where the usual rate is estimated too low, charts alarm far too often
    # (A. Gandy and J. T. Kvaloy, Scandinavian Journal of Statistics 40, 2013).
    usual = max(_LEAST_ERROR, wilson(int(wrong[:reference].sum()), reference, 0.8).high)
    weight = _weight(usual)
    threshold, length = cusum_threshold(round(usual, 3), weight, run_length)
    values = _cusum(wrong[None, reference:], weight)[0]
    crossings = np.flatnonzero(values >= threshold)
    alarm = since = None
    if len(crossings):
        alarm = reference + int(crossings[0])
        zeros = np.flatnonzero(values[: crossings[0]] == 0)
        since = reference + (int(zeros[-1]) + 1 if len(zeros) else 0)
    p_value = 1.0 if alarm is None else _order_p_value(wrong, seed, annotators)
    return Chart(usual, threshold, length, values, alarm, since, p_value)


def _order_p_value(wrong: np.ndarray, seed: int, annotators: np.ndarray | None) -> float:
    """Returns the share of random orders of the outcomes that have as many late errors.

    The statistic is by how many errors the end of the sequence exceeds the annotators' own mean rates, at the point
    where that is most. It needs no usual rate, so that its permutations are an exact test of the order alone.
    """
    generator, as_high = np.random.default_rng(seed), 0
    excess = wrong.astype(np.float64)
    # Somebody weak who works later than the others is no drift.
    groups = (
        [np.flatnonzero(annotators == name) for name in sorted(set(annotators))]
        if annotators is not None
        else [slice(None)]
    )
    for group in groups:
        excess[group] -= excess[group].mean()
    observed = -np.cumsum(excess).min() - 1e-9
    block = max(1, 1_000_000 // len(wrong))
    for start in range(0, _PERMUTATIONS, block):
        rows = np.tile(excess, (min(block, _PERMUTATIONS - start), 1))
        for group in groups:
            rows[:, group] = generator.permuted(rows[:, group], axis=1)
        as_high += int((-np.cumsum(rows, axis=1).min(axis=1) >= observed).sum())
        # Enough to know that it is chance (J. Besag and P. Clifford, Biometrika 78, 1991).
        if as_high >= _ENOUGH:
            return as_high / (start + len(rows))
    return (1 + as_high) / (1 + _PERMUTATIONS)


def _weight(usual: float) -> int:
    """Returns by how much more an error raises the chart than a right outcome lowers it, plus one; a whole number."""
    odds = ODDS * usual / (1 - usual)
    raised = odds / (1 + odds)
    # The likelihood ratio's steps are log(ODDS) and log((1 - p1) / (1 - p0)); whole numbers make the chain exact.
    return max(2, round(math.log(ODDS) / -math.log((1 - raised) / (1 - usual))))


def _cusum(wrong: np.ndarray, weight: int) -> np.ndarray:
    """Returns max(0, previous + weight * wrong - 1) after each outcome of each row."""
    value, values = np.zeros(len(wrong)), np.zeros(wrong.shape)
    for at in range(wrong.shape[1]):
        value = np.maximum(0.0, value + weight * wrong[:, at] - 1)
        values[:, at] = value
    return values


def average_run_length(error: float, weight: int, threshold: int) -> float:
    """Returns the expected number of outcomes until the chart alarms, if each is wrong with probability ``error``.

    Exact: the chart's values below the threshold are the states of an absorbing Markov chain.
    """
    states = np.arange(threshold)
    stay = np.zeros((threshold, threshold))
    stay[states, np.maximum(0, states - 1)] += 1 - error
    up = states + weight - 1
    inside = up < threshold
    stay[states[inside], up[inside]] += error
    return float(linalg.solve(np.eye(threshold) - stay, np.ones(threshold))[0])


@lru_cache(maxsize=1024)
def cusum_threshold(error: float, weight: int, run_length: float) -> tuple[int, float]:
    """Returns the lowest threshold with at least the average run length, and its exact run length."""
    low, high = 1, weight
    while average_run_length(error, weight, high) < run_length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if average_run_length(error, weight, middle) < run_length else (low, middle)
    return high, average_run_length(error, weight, high)


def error_drift(
    answers: pa.Table, outcomes: Outcomes, rate: float, run_length: float = 1000, seed: int = 0
) -> list[Finding]:
    """Finds annotators whose errors have risen, and a team whose errors have.

    The chart decides when, from the outcomes until then; a permutation test decides in hindsight whether the order of
    the outcomes was chance, corrected for the number of annotators.
    """
    names = np.array(answers["annotator"].take(outcomes.row).to_pylist(), object)
    candidates, tests = [], 0
    for name in (*sorted(set(names)), None):
        right = outcomes.right if name is None else outcomes.right[names == name]
        chart = error_chart(right, run_length, seed, names if name is None else None)
        tests += chart is not None
        if chart is None or chart.alarm is None or chart.since is None:
            continue
        before, after = wilson(int(right[: chart.since].sum()), chart.since), right[chart.since :]
        sentence = (
            f"{name or 'The team'} had {before.value:.0%} of {before.n} known items right, and {after.mean():.0%} of "
            f"the {len(after)} since then"
        )
        person = () if name is None else (str(name),)
        value, threshold = float(chart.values.max()), float(chart.threshold)
        candidates.append(Finding("gold_drift", person, value, threshold, len(right), chart.p_value, sentence))
    findings = holm(candidates, rate, tests)
    # A person's drift moves the team's chart too, and is reported once, under the name.
    return [finding for finding in findings if finding.annotators] or findings


def label_drift(votes: Votes, rate: float) -> list[Finding]:
    """Finds annotators whose mix of labels has moved away from their own and from the team's, and a team's that moved.

    Halves are compared by time. One annotator's late answers must differ from the others' late answers too, since the
    items themselves may have changed.
    """
    candidates, tests = [], 0
    middle = np.median(votes.rows) if len(votes.rows) else 0
    late = votes.rows > middle
    for index, name in enumerate(votes.annotators):
        by_annotator = votes.annotator == index
        own = np.flatnonzero(by_annotator)
        first, second = own[: len(own) // 2], own[len(own) // 2 :]
        since = votes.rows[second[0]] if len(second) else 0
        others = np.flatnonzero(~by_annotator & (votes.rows >= since))
        if min(len(first), len(others)) < _LEAST_ANSWERS:
            continue
        tests += 1
        own_shift = _label_shift(votes, first, second, rate)
        other_shift = _label_shift(votes, others, second, rate)
        p_value, psi = max(own_shift.p_value, other_shift.p_value), min(own_shift.psi, other_shift.psi)
        threshold = max(SMALL_SHIFT, own_shift.threshold, other_shift.threshold)
        if psi >= threshold and own_shift.largest:
            label, before, after = own_shift.largest
            sentence = f"{name} gave `{label}` in {before:.0%} of the earlier answers and in {after:.0%} of the later"
            candidates.append(Finding("label_drift", (name,), psi, threshold, len(own), p_value, sentence))
    if len(votes.annotators) > 1 and min(late.sum(), (~late).sum()) >= _LEAST_ANSWERS:
        tests += 1
        shift = _label_shift(votes, np.flatnonzero(~late), np.flatnonzero(late), rate)
        threshold = max(LARGE_SHIFT, shift.threshold)
        if shift.psi >= threshold and shift.largest:
            label, before, after = shift.largest
            sentence = f"The team gave `{label}` in {before:.0%} of the earlier answers and in {after:.0%} of the later"
            candidates.append(Finding("label_drift", (), shift.psi, threshold, len(late), shift.p_value, sentence))
    return holm(candidates, rate, tests)


def guideline_drift(answers: pa.Table, votes: Votes, outcomes: Outcomes, rate: float) -> list[Finding]:
    """Finds guideline versions after which the mix of labels moved, or gold items were answered worse."""
    versions = answers["guideline"].to_numpy()
    of_votes, of_outcomes = versions[votes.rows], versions[outcomes.row]
    numbers = np.unique(versions)
    candidates, tests = [], 0
    for old, new in pairwise(numbers):
        first, second = np.flatnonzero(of_votes == old), np.flatnonzero(of_votes == new)
        if min(len(first), len(second)) >= _LEAST_ANSWERS:
            tests += 1
            shift = _label_shift(votes, first, second, rate)
            threshold = max(SMALL_SHIFT, shift.threshold)
            if shift.psi >= threshold and shift.largest:
                label, before, after = shift.largest
                sentence = (
                    f"`{label}` was {before:.0%} of the answers under version {old} of the guideline, and is "
                    f"{after:.0%} under version {new}"
                )
                number = len(first) + len(second)
                candidates.append(Finding("guideline_drift", (), shift.psi, threshold, number, shift.p_value, sentence))
        before, after = (outcomes.right[of_outcomes == version] for version in (old, new))
        if min(len(before), len(after)) >= REFERENCE:
            tests += 1
            p_value = share_exceeds(int((~after).sum()), len(after), int((~before).sum()), len(before))
            sentence = (
                f"{after.mean():.0%} of {len(after)} gold and checked items are right under version {new} of the "
                f"guideline, and {before.mean():.0%} of {len(before)} were under version {old}"
            )
            value, number = float(before.mean() - after.mean()), len(before) + len(after)
            if value >= 0.05:
                candidates.append(Finding("guideline_drift", (), value, 0.05, number, p_value, sentence))
    return holm(candidates, rate, tests)


def sampling_bias(batch: Sequence[float], pool: Sequence[float], names: Sequence[str], rate: float) -> list[Finding]:
    """Finds a batch whose categories differ from the pool's.

    Args:
        batch: Records of the batch by category.
        pool: Records of the pool by category, in the same order.
        names: Names of the categories.
        rate: False-alarm rate.
    """
    shift = compare_counts(pool, batch, names, rate)
    threshold = max(SMALL_SHIFT, shift.threshold)
    if not shift.psi >= threshold or shift.p_value > rate or shift.largest is None:
        return []
    name, before, after = shift.largest
    sentence = f"`{name}` is {after:.0%} of the batch and {before:.0%} of the pool"
    return [Finding("sampling_bias", (), shift.psi, threshold, shift.n[1], shift.p_value, sentence)]


def _label_shift(votes: Votes, before: Integers, after: Integers, rate: float) -> Shift:
    old, new = (np.bincount(votes.label[part], minlength=len(votes.labels)).tolist() for part in (before, after))
    return compare_counts(old, new, votes.labels, rate)
