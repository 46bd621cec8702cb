import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.evaluate.suite import PREDICTIONS
from posttrain.select.config import SelectConfig
from posttrain.select.hard_cases import (
    HARD_CASE_KINDS,
    Evaluations,
    above_percentile,
    disagreement,
    hard_cases,
    high_loss,
    losses,
    regressions,
    wrong,
)
from posttrain.store.errors import UserError


def predictions(*rows: tuple[str, float, float | None], predicted: str = "b") -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "id": id,
                "expected": "a",
                "predicted": "a" if score == 1 else predicted,
                "score": score,
                "valid": True,
                "log_likelihood": log_likelihood,
            }
            for id, score, log_likelihood in rows
        ],
        schema=PREDICTIONS,
    )


def test_loss_is_the_negative_log_likelihood_or_else_one_minus_the_score() -> None:
    assert losses(predictions(("x", 0.0, -3.0), ("y", 0.25, None))).tolist() == [3.0, 0.75]


def test_wrong_records_come_hardest_first() -> None:
    table = predictions(("a", 1.0, -9.0), ("b", 0.0, -2.0), ("c", 0.0, -5.0), ("e", 0.0, -2.0), ("d", 1.0, -0.1))
    assert wrong(table) == ["c", "b", "e"]
    assert wrong(table, n=1) == ["c"]
    assert wrong(predictions()) == []


def test_wrong_where_scores_are_log_likelihoods() -> None:
    table = predictions(("a", -9.0, -9.0), ("b", -2.0, -2.0), ("c", -5.0, -5.0), ("d", -1.0, -1.0))
    assert wrong(table) == ["a", "c"]


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 100))
def test_high_loss_is_above_the_percentile(values: list[int], percentile: int) -> None:
    table = predictions(*((f"{row:03d}", float(row % 2), -float(value)) for row, value in enumerate(values)))
    result = high_loss(table, percentile, n=1000)
    threshold = np.percentile(values, percentile)
    assert set(result) == {f"{row:03d}" for row, value in enumerate(values) if value > threshold}
    assert [values[int(id)] for id in result] == sorted((values[int(id)] for id in result), reverse=True)
    assert high_loss(table, percentile, n=2) == result[:2]


def test_high_loss_ignores_scores_and_of_equal_losses_none_is_high() -> None:
    table = predictions(*((f"{row:02d}", 1.0, -float(row == 19)) for row in range(20)))
    assert high_loss(table) == ["19"]
    assert high_loss(predictions(("a", 0.0, -1.0), ("b", 0.0, -1.0))) == []
    assert high_loss(predictions()) == []


def test_regressions_were_right_before_and_are_wrong_now() -> None:
    now = predictions(("a", 0.0, -1.0), ("b", 0.0, -3.0), ("c", 1.0, -0.1), ("d", 0.0, -9.0), ("new", 0.0, -9.0))
    before = predictions(("d", 0.0, -1.0), ("c", 0.0, -1.0), ("b", 1.0, -0.2), ("a", 1.0, -0.1), ("gone", 1.0, -0.1))
    assert regressions(now, before) == ["b", "a"]
    assert regressions(now, before, n=1) == ["b"]
    assert regressions(now, now) == []
    assert regressions(now, predictions()) == regressions(predictions(), now) == []


def test_disagreements_come_by_difference_in_loss() -> None:
    actual = predictions(("a", 1.0, -0.1), ("b", 0.0, -3.0), ("c", 0.0, -3.0), ("d", 1.0, -0.1))
    reference = predictions(("d", 0.0, -8.1), ("c", 0.0, -3.0), ("b", 1.0, -1.0), ("a", 1.0, -7.0), predicted="c")
    assert disagreement(actual, reference) == ["d", "b", "c"]
    assert set(disagreement(reference, actual)) == {"d", "b", "c"}
    assert disagreement(actual, actual) == []
    assert disagreement(actual, predictions()) == disagreement(predictions(), actual) == []


def test_cases_have_all_their_kinds_and_come_by_loss() -> None:
    now = predictions(("a", 0.0, -1.0), ("b", 0.0, -3.0), ("c", 1.0, -0.1))
    before = predictions(("a", 1.0, -0.1), ("b", 0.0, -2.0), ("c", 1.0, -0.1))
    result = hard_cases(["regressions", "wrong"], Evaluations(now, previous=before))
    assert [(case.id, case.kinds) for case in result] == [("b", ("wrong",)), ("a", ("regressions", "wrong"))]
    assert (result[0].expected, result[0].predicted) == ("a", "b")
    assert hard_cases(["regressions", "disagreement"], Evaluations(now)) == []
    assert hard_cases([], Evaluations(now, before, before)) == []


def test_an_unknown_kind_is_refused() -> None:
    SelectConfig.read({"hard_cases": list(HARD_CASE_KINDS)}, "posttrain.yaml")
    with pytest.raises(UserError, match="no kind of hard case `regresions`; did you mean `regressions`"):
        SelectConfig.read({"hard_cases": ["regresions"]}, "posttrain.yaml")


def test_unknown_values_are_of_no_percentile() -> None:
    assert above_percentile(np.array([1.0, np.nan, 5.0, np.inf, 3.0, 2.0]), 50).tolist() == [2, 4]
    assert above_percentile(np.array([np.nan]), 50).tolist() == []
