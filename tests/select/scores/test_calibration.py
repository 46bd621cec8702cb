"""Temperatures, and their effect on the calibration error."""

import numpy as np
import pytest
import torch

from posttrain.models.calibration import at_temperature, expected_calibration_error, fit_temperature
from posttrain.select.scores import calibration
from posttrain.select.scores.calibration import (
    calibrate_answers,
    calibrate_labels,
    fit_answer_temperature,
)


def overconfident_labels(temperature: float, rows: int = 4000, labels: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities too sharp by a temperature, and labels sampled from the calibrated ones."""
    generator = np.random.default_rng(3)
    calibrated = torch.tensor(generator.normal(size=(rows, labels))).log_softmax(1).numpy()
    truth = np.array([generator.choice(labels, p=np.exp(row)) for row in calibrated])
    return torch.tensor(calibrated * temperature).log_softmax(1).numpy(), truth


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_is_recovered(temperature: float) -> None:
    logs, truth = overconfident_labels(temperature)
    assert fit_temperature(logs, truth) == pytest.approx(temperature, rel=0.06)


def test_the_temperature_equals_that_of_gradient_descent() -> None:
    logs, truth = overconfident_labels(2.0, rows=200)
    inverse = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([inverse], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(torch.tensor(logs) * inverse, torch.tensor(truth))
        value.backward()
        return value

    optimizer.step(loss)
    assert fit_temperature(logs, truth) == pytest.approx(1 / float(inverse.detach()), rel=1e-4)


def test_calibration_lowers_the_error_of_sharp_probabilities() -> None:
    logs, truth = overconfident_labels(3.0)
    result = calibrate_labels(logs, truth)
    assert result is not None
    assert result.ece_before > 0.15
    assert result.ece_after < 0.05
    assert result.records == 4000
    confidence = np.exp(logs.max(axis=1))
    assert result.ece_before == pytest.approx(expected_calibration_error(confidence, logs.argmax(1) == truth))


def test_the_error_after_calibration_is_cross_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fold's temperature is fitted to the other folds."""
    logs, truth = overconfident_labels(1.0, rows=50)
    confidences: list[np.ndarray] = []

    def record(confidence: np.ndarray, correct: np.ndarray) -> float:
        confidences.append(confidence)
        return 0.0

    monkeypatch.setattr(calibration, "expected_calibration_error", record)
    calibrate_labels(logs, truth)
    for fold in range(5):
        rows = np.arange(50) % 5 == fold
        expected = at_temperature(logs[rows], fit_temperature(logs[~rows], truth[~rows]))
        np.testing.assert_array_equal(confidences[1][rows], np.exp(expected.max(axis=1)))


def test_few_records_give_no_result_and_the_temperature_stays_finite() -> None:
    logs, truth = overconfident_labels(1.0, rows=29)
    assert calibrate_labels(logs, truth) is None
    always_right = np.log(np.tile([0.9, 0.1], (40, 1)))
    assert 0.05 <= fit_temperature(always_right, np.zeros(40, int)) < 0.2
    assert fit_temperature(always_right, np.ones(40, int)) == pytest.approx(20, rel=1e-2)


def test_temperature_keeps_the_order_and_temperature_one_changes_nothing() -> None:
    logs, _ = overconfident_labels(1.0, rows=20)
    assert at_temperature(logs, 1.0) is logs
    cooler = at_temperature(logs, 2.5)
    np.testing.assert_allclose(np.exp(cooler).sum(axis=1), 1)
    np.testing.assert_array_equal(np.argsort(cooler, 1), np.argsort(logs, 1))


def overconfident_answers(temperature: float, rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Surprisals scaled by a temperature, and whether each answer is right."""
    generator = np.random.default_rng(5)
    nats = generator.exponential(size=rows)
    return nats * temperature, (generator.random(rows) < np.exp(-nats)).astype(float)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 3.0])
def test_the_temperature_of_answers_is_recovered(temperature: float) -> None:
    nats, right = overconfident_answers(temperature)
    assert fit_answer_temperature(nats, right) == pytest.approx(temperature, rel=0.06)


def test_the_temperature_of_answers_equals_that_of_gradient_descent() -> None:
    nats, right = overconfident_answers(0.3, rows=300)
    scores = np.where(np.arange(300) % 3, right, 0.5)  # as token F1 gives them
    inverse = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([inverse], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        confidence = torch.exp(-torch.tensor(nats) * inverse)
        value = torch.nn.functional.binary_cross_entropy(confidence, torch.tensor(scores))
        value.backward()
        return value

    optimizer.step(loss)
    assert fit_answer_temperature(nats, scores) == pytest.approx(1 / float(inverse.detach()), rel=1e-4)


def test_overconfident_answers_are_calibrated() -> None:
    nats, right = overconfident_answers(0.1)
    result = calibrate_answers(nats, right)
    assert result is not None
    assert result.ece_before == pytest.approx(expected_calibration_error(np.exp(-nats), right))
    assert result.ece_before > 0.3
    assert result.ece_after < 0.05
    assert calibrate_answers(nats[:29], right[:29]) is None


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_answers_of_equal_correctness_keep_the_temperature_finite(right: float) -> None:
    nats = np.r_[0.0, np.linspace(0.01, 2, 40)]
    assert 1e-3 <= fit_answer_temperature(nats, np.full(41, right)) <= 20


def test_a_temperature_that_helps_no_other_record_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities that are right already, and a fit that is not."""
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(3), 400)
    truth = np.array([generator.choice(3, p=row) for row in probabilities])
    monkeypatch.setattr(calibration, "fit_temperature", lambda logs, right: 8.0)
    result = calibration.calibrate_labels(np.log(probabilities), truth)
    assert result is not None
    assert result.ece_after > result.ece_before
    assert result.temperature == 1.0
