"""Charts of errors, population stability, and shifts of labels."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from vote_tables import answer_table

from posttrain.label.answers import encode_votes
from posttrain.label.quality.annotators import known_outcomes
from posttrain.label.quality.drift import (
    average_run_length,
    cusum_threshold,
    error_chart,
    error_drift,
    guideline_drift,
    label_drift,
    sampling_bias,
)
from posttrain.label.quality.findings import compare_counts


@pytest.mark.parametrize(("error", "weight", "threshold"), [(0.1, 6, 8), (0.25, 3, 7), (0.02, 20, 25)])
def test_the_average_run_length_is_that_of_simulated_charts(error: float, weight: int, threshold: int) -> None:
    rng = np.random.default_rng(0)
    runs = 3000
    value, length, alive = np.zeros(runs), np.zeros(runs), np.ones(runs, bool)
    while alive.any():
        value = np.maximum(0, value + weight * (rng.random(runs) < error) - 1)
        length += alive
        alive &= value < threshold
    expected = average_run_length(error, weight, threshold)
    assert length.mean() == pytest.approx(expected, abs=4 * length.std() / np.sqrt(runs))


@pytest.mark.parametrize("run_length", [100, 1000, 20_000])
def test_the_threshold_is_the_lowest_with_the_run_length(run_length: int) -> None:
    threshold, length = cusum_threshold(0.1, 6, run_length)
    assert length == average_run_length(0.1, 6, threshold) >= run_length
    assert average_run_length(0.1, 6, threshold - 1) < run_length


def test_a_chart_says_when_errors_rose_and_too_few_outcomes_have_none() -> None:
    rng = np.random.default_rng(1)
    right = np.concatenate([rng.random(150) < 0.95, rng.random(60) < 0.5])
    chart = error_chart(right, 1000)
    assert chart is not None
    assert chart.alarm is not None
    assert chart.since is not None
    assert 140 <= chart.since <= 160 < chart.alarm < 190
    assert chart.p_value < 0.001
    assert error_chart(right[:30], 1000) is None


def test_charts_of_steady_annotators_alarm_at_most_as_often_as_their_run_length_says() -> None:
    rng = np.random.default_rng(0)
    alarms = sum(getattr(error_chart(rng.random(200) < 0.85, 2000), "alarm", None) is not None for _ in range(150))
    # 134 outcomes after the reference, of 2,000: 6.5% of 150 charts at the exact rate, fewer as the rate is guarded.
    assert alarms <= 10


def gold_rows(name: str, right: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"item": item, "annotator": name, "expected": "x", "answer": "x" if correct else "y"}
        for item, correct in enumerate(right)
    ]


def drift_of(rows: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    table = answer_table(rows)
    findings = error_drift(table, known_outcomes(table), rate=0.01)
    return [(finding.kind, finding.annotators) for finding in findings]


def test_only_the_annotator_who_drifts_is_named() -> None:
    rng = np.random.default_rng(3)
    steady, drifting = rng.random(200) < 0.9, rng.random(200) < np.repeat([0.95, 0.5], 100)
    rows = [row for pair in zip(gold_rows("anna", steady), gold_rows("ben", drifting), strict=True) for row in pair]
    assert drift_of(rows) == [("gold_drift", ("ben",))]


def test_somebody_weak_who_works_later_than_the_others_is_no_drift() -> None:
    rng = np.random.default_rng(4)
    assert drift_of(gold_rows("anna", rng.random(200) < 0.95) + gold_rows("ben", rng.random(200) < 0.6)) == []


def test_a_shift_of_equal_distributions_exceeds_its_threshold_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    share = [0.4, 0.3, 0.2, 0.1]
    exceeded = [
        (shift := compare_counts(rng.multinomial(150, share), rng.multinomial(400, share), "abcd", 0.1)).psi
        > shift.threshold
        for _ in range(2000)
    ]
    assert np.mean(exceeded) == pytest.approx(0.1, abs=0.025)


def test_psi_is_that_of_its_definition_where_counts_are_large() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    shift = compare_counts((1e7 * p).tolist(), (1e7 * q).tolist(), ["a", "b", "c"])
    assert shift.psi == pytest.approx(((q - p) * np.log(q / p)).sum(), rel=1e-5)
    assert shift.largest == pytest.approx(("a", 0.5, 0.3), abs=1e-9) or shift.largest == ("c", 0.2, 0.4)
    assert compare_counts([5, 5], [0, 0], ["a", "b"]).p_value == 1


def test_a_batch_unlike_its_pool_is_reported_with_the_category() -> None:
    names = ["billing", "returns", "other"]
    assert sampling_bias([30, 31, 39], [3000, 3000, 4000], names, 0.01) == []
    (finding,) = sampling_bias([70, 10, 20], [3000, 3000, 4000], names, 0.01)
    assert (finding.kind, finding.evidence) == ("sampling_bias", 100)
    assert "`billing` is 70% of the batch and 30% of the pool" in finding.sentence


def labelled(shares: dict[str, list[float]], guideline: list[int] | None = None, n: int = 200) -> pa.Table:
    """Answers `x` or `y` of each annotator with the share of `x` in each half of the time."""
    rng = np.random.default_rng(5)
    rows = []
    for half in range(2):
        for item in range(n):
            for name, share in shares.items():
                answer = "x" if rng.random() < share[half] else "y"
                row = {"item": 1000 * half + item, "annotator": name, "answer": answer}
                rows.append(row | {"guideline": guideline[half] if guideline else 1})
    return answer_table(rows)


def test_label_drift_names_who_moved_away_from_the_team_and_not_a_team_whose_items_changed() -> None:
    moved = label_drift(encode_votes(labelled({"anna": [0.5, 0.5], "ben": [0.5, 0.95], "cleo": [0.5, 0.5]})), 0.01)
    assert [finding.annotators for finding in moved] == [("ben",)]
    together = label_drift(encode_votes(labelled({"anna": [0.5, 0.95], "ben": [0.5, 0.95]})), 0.01)
    assert [finding.annotators for finding in together] == [()]
    assert label_drift(encode_votes(labelled({"anna": [0.5, 0.5], "ben": [0.5, 0.5]})), 0.01) == []


def test_a_guideline_that_changes_the_labels_is_reported_with_its_version() -> None:
    table = labelled({"anna": [0.5, 0.9], "ben": [0.5, 0.9]}, [1, 2])
    (finding,) = guideline_drift(table, encode_votes(table), known_outcomes(table), 0.01)
    expected = "`x` was 52% of the answers under version 1 of the guideline, and is 92% under version 2"
    assert (finding.kind, finding.sentence) == ("guideline_drift", expected)
    same = labelled({"anna": [0.5, 0.5], "ben": [0.5, 0.5]}, [1, 2])
    assert guideline_drift(same, encode_votes(same), known_outcomes(same), 0.01) == []


def test_gold_items_answered_worse_under_a_new_guideline_are_reported() -> None:
    rng = np.random.default_rng(6)
    rows = gold_rows("anna", rng.random(200) < np.repeat([0.95, 0.7], 100))
    rows = [{**row, "guideline": 1 + (at >= 100)} for at, row in enumerate(rows)]
    table = answer_table(rows)
    findings = guideline_drift(table, encode_votes(table), known_outcomes(table), 0.01)
    assert any("are right under version 2 of the guideline" in finding.sentence for finding in findings)
