"""Gold accuracy, confusions, cost, and the forecast of a batch."""

from datetime import timedelta

import pytest
from vote_tables import START, answer_table, votes_of

from posttrain.label.quality.annotators import (
    IDLE_SECONDS,
    confusions,
    forecast,
    gold_accuracy,
    known_outcomes,
    measure_work,
)
from posttrain.label.quality.consensus import gold_labels, reference_labels
from posttrain.label.quality.findings import Finding, holm, wilson


@pytest.mark.parametrize(("count", "n"), [(0, 5), (5, 5), (7, 30), (98, 100)])
def test_wilsons_interval_is_that_of_scipy(count: int, n: int) -> None:
    from scipy import stats

    expected = stats.binomtest(count, n).proportion_ci(0.95, "wilson")
    rate = wilson(count, n)
    assert (rate.low, rate.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_only_answers_whose_truth_is_known_are_outcomes() -> None:
    table = answer_table(
        [
            {"item": 1, "expected": "x"},
            {"item": 2, "expected": "y"},
            # Answered once, so that its resolution is the answer itself.
            {"item": 3, "resolution": "x"},
            {"item": 4, "resolution": "y"},
            {"item": 4, "annotator": "ben", "answer": "y", "resolution": "y"},
            {"item": 5, "expected": "y", "suggestion": "x", "planted": True},
            {"item": 6},
            {"item": 6, "annotator": "ben"},
        ]
    )
    outcomes = known_outcomes(table)
    assert outcomes.row.tolist() == [0, 1, 3, 4]
    assert outcomes.right.tolist() == [True, False, False, True]
    assert outcomes.gold.tolist() == [True, True, False, False]
    overall, people, classes = gold_accuracy(table, outcomes)
    assert (overall.count, overall.n) == (1, 2)
    assert {name: (rate.count, rate.n) for name, rate in people.items()} == {"anna": (1, 2)}
    assert {name: (rate.count, rate.n) for name, rate in classes.items()} == {"x": (1, 1), "y": (0, 1)}


def test_confusions_compare_with_the_others_and_come_most_frequent_first() -> None:
    votes = votes_of({"a": "xxxxyy", "b": "yyyxyx", "c": "yyyxyx"})
    reference = reference_labels(votes, gold_labels(votes, [None] * len(votes.rows)))
    result = confusions(votes, reference)["a"]
    assert (result["compared"], result["agreed"]) == (6, 2)
    assert result["confusions"] == [
        {"right": "y", "answer": "x", "count": 3},
        {"right": "x", "answer": "y", "count": 1},
    ]


def test_breaks_are_cut_from_the_time_of_work() -> None:
    rows = [{"item": 1, "seconds": 20.0}, {"item": 2, "seconds": 40.0}, {"item": 3}]
    rows += [{"item": 4, "annotator": "ben", "batch": "spans", "seconds": 90_000.0}]
    anna, ben = measure_work(answer_table(rows), {"spans": "span"})
    assert (anna.annotator, anna.kind, anna.labels, anna.timed, anna.seconds) == ("anna", "label", 3, 2, 60)
    assert (ben.kind, ben.seconds, ben.median_seconds) == ("span", IDLE_SECONDS, IDLE_SECONDS)


def test_the_forecast_follows_the_pace() -> None:
    # 48 answers, a minute apart.
    table = answer_table([{"item": item, "seconds": 30.0} for item in range(48)])
    outlook = forecast(table, 96, START + timedelta(hours=1))
    assert outlook.per_day == pytest.approx(48 * 24)
    assert outlook.done_at == START + timedelta(hours=3)
    empty = forecast(answer_table([]), 5, START)
    assert (empty.per_day, empty.done_at) == (0, None)


def test_holms_method_stops_at_the_first_that_does_not_hold() -> None:
    def finding(p_value: float) -> Finding:
        return Finding("speed", (), 1, 0, 1, p_value, "")

    # Of 4 tests at 5%: 0.0125, 0.0167, 0.025, 0.05.
    kept = holm([finding(p) for p in (0.03, 0.012, 0.016, 0.04)], 0.05, 4)
    assert [entry.p_value for entry in kept] == [0.012, 0.016]
    assert holm([finding(0.013)], 0.05, 4) == []
