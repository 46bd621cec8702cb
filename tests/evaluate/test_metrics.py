import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.evaluate.metrics import confusion_pairs, macro_f1, per_class
from posttrain.models.calibration import expected_calibration_error

labels = st.sampled_from(["a", "b", "c", "d"])
pairs = st.lists(st.tuples(labels, st.one_of(labels, st.none())), min_size=1, max_size=40)


@pytest.mark.slow
@given(pairs)
def test_metrics_per_class_equal_those_of_scikit_learn(answers: list[tuple[str, str | None]]) -> None:
    from sklearn.metrics import f1_score, precision_recall_fscore_support

    expected, predicted = [truth for truth, _ in answers], [answer for _, answer in answers]
    rows = per_class(expected, predicted)
    classes = [row.label for row in rows]
    assert classes == sorted({*expected, *(answer for answer in predicted if answer is not None)})
    filled = [answer or "outside" for answer in predicted]
    reference = precision_recall_fscore_support(expected, filled, labels=classes, zero_division=0)
    actual = [(row.precision, row.recall, row.f1, row.support) for row in rows]
    np.testing.assert_allclose(np.array(actual).T, np.array(reference))
    average = f1_score(expected, filled, labels=classes, average="macro", zero_division=0)
    assert macro_f1(rows) == pytest.approx(average)


@given(pairs)
def test_confusion_pairs_count_every_wrong_answer_once(answers: list[tuple[str, str | None]]) -> None:
    expected, predicted = [truth for truth, _ in answers], [answer for _, answer in answers]
    result = confusion_pairs(expected, predicted)
    assert sum(pair["count"] for pair in result) == sum(truth != answer for truth, answer in answers)
    assert all(pair["count"] == answers.count((pair["expected"], pair["predicted"])) for pair in result)
    assert [pair["count"] for pair in result] == sorted((pair["count"] for pair in result), reverse=True)


def test_no_classes_have_no_macro_f1() -> None:
    assert macro_f1([]) == 0.0


def test_calibration_error_of_an_example_by_hand() -> None:
    # Bin (0.2, 0.4]: two answers, 0.3 on average, half right. Bin (0.8, 1.0]: three, 0.9 and a third right.
    confidence, correct = np.array([0.25, 0.35, 0.85, 0.9, 0.95]), np.array([1, 0, 1, 0, 0])
    expected = (2 * abs(0.5 - 0.3) + 3 * abs(1 / 3 - 0.9)) / 5
    assert expected_calibration_error(confidence, correct, bins=5) == pytest.approx(expected)


def test_calibration_bins_include_their_upper_bound() -> None:
    confidence = np.array([0.2, 0.3])
    assert expected_calibration_error(confidence, np.array([1, 0]), bins=5) == pytest.approx((0.8 + 0.3) / 2)


def test_calibration_error_at_its_extremes() -> None:
    assert expected_calibration_error(np.array([1.0, 1.0]), np.array([1, 1])) == 0
    assert expected_calibration_error(np.array([1.0, 1.0]), np.array([0, 0])) == 1
    assert expected_calibration_error(np.array([0.0]), np.array([0])) == 0
    assert expected_calibration_error(np.empty(0), np.empty(0)) == 0


def test_calibrated_answers_have_little_error() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(size=50_000)
    correct = generator.uniform(size=50_000) < confidence
    assert expected_calibration_error(confidence, correct) < 0.02
    assert expected_calibration_error(np.sqrt(confidence), correct) > 0.15
