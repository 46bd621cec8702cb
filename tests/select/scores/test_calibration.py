"""Temperatures, and what they do to calibration."""

import numpy as np
import pytest
import torch

from posttrain.evaluate.metrics import expected_calibration_error
from posttrain.select.scores.calibration import (
    at_temperature,
    calibrate_answers,
    calibrate_labels,
    fit_answer_temperature,
    fit_temperature,
)
from posttrain.select.scores.labelled import forgetting_events


def drawn(temperature: float, rows: int = 4000, labels: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities that are too sharp by a temperature, and truths drawn from the right ones."""
    generator = np.random.default_rng(3)
    right = torch.tensor(generator.normal(size=(rows, labels))).log_softmax(1).numpy()
    truth = np.array([generator.choice(labels, p=np.exp(row)) for row in right])
    return torch.tensor(right * temperature).log_softmax(1).numpy(), truth


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_was_put_in_is_found(temperature: float) -> None:
    logs, truth = drawn(temperature)
    assert fit_temperature(logs, truth) == pytest.approx(temperature, rel=0.06)


def test_against_gradient_descent() -> None:
    logs, truth = drawn(2.0, rows=200)
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
    logs, truth = drawn(3.0)
    result = calibrate_labels(logs, truth, expected_calibration_error)
    assert result is not None
    assert result.ece_before > 0.15
    assert result.ece_after < 0.05
    assert result.records == 4000
    confidence = np.exp(logs.max(axis=1))
    assert result.ece_before == pytest.approx(expected_calibration_error(confidence, logs.argmax(1) == truth))


def test_the_error_after_is_of_records_that_the_temperature_has_not_seen() -> None:
    """Each fold's temperature would be refuted by its own records, and is not fitted to them."""
    logs, truth = drawn(1.0, rows=50)
    seen: list[np.ndarray] = []
    calibrate_labels(logs, truth, lambda confidence, correct: float(seen.append(confidence) or 0.0))  # type: ignore[func-returns-value]
    for fold in range(5):
        rows = np.arange(50) % 5 == fold
        expected = at_temperature(logs[rows], fit_temperature(logs[~rows], truth[~rows]))
        np.testing.assert_array_equal(seen[1][rows], np.exp(expected.max(axis=1)))


def test_few_records_say_nothing_and_sure_ones_stay_finite() -> None:
    logs, truth = drawn(1.0, rows=29)
    assert calibrate_labels(logs, truth, expected_calibration_error) is None
    always_right = np.log(np.tile([0.9, 0.1], (40, 1)))
    assert 0.05 <= fit_temperature(always_right, np.zeros(40, int)) < 0.2
    assert fit_temperature(always_right, np.ones(40, int)) == pytest.approx(20, rel=1e-2)


def test_temperature_keeps_the_order_and_one_changes_nothing() -> None:
    logs, _ = drawn(1.0, rows=20)
    assert at_temperature(logs, 1.0) is logs
    cooler = at_temperature(logs, 2.5)
    np.testing.assert_allclose(np.exp(cooler).sum(axis=1), 1)
    np.testing.assert_array_equal(np.argsort(cooler, 1), np.argsort(logs, 1))


def test_forgetting_is_going_from_right_to_wrong() -> None:
    looks = np.array([[0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]], bool)
    assert forgetting_events(looks).tolist() == [2.0, 0.0, np.inf, 2.0]
    assert forgetting_events(looks[:1]).tolist() == [np.inf, 0.0, np.inf, 0.0]
    with pytest.raises(ValueError, match="shape"):
        forgetting_events(looks[0])


def answered(temperature: float, rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Surprisals that say too much of confidence by a temperature, and whether each answer is right."""
    generator = np.random.default_rng(5)
    nats = generator.exponential(size=rows)
    return nats * temperature, (generator.random(rows) < np.exp(-nats)).astype(float)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 1.0, 3.0])
def test_the_temperature_of_answers_that_was_put_in_is_found(temperature: float) -> None:
    nats, right = answered(temperature)
    assert fit_answer_temperature(nats, right) == pytest.approx(temperature, rel=0.06)


def test_the_temperature_of_answers_against_gradient_descent() -> None:
    nats, right = answered(0.3, rows=300)
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


def test_answers_that_look_surer_than_they_are_right_are_calibrated() -> None:
    nats, right = answered(0.1)
    result = calibrate_answers(nats, right, expected_calibration_error)
    assert result is not None
    assert result.ece_before == pytest.approx(expected_calibration_error(np.exp(-nats), right))
    assert result.ece_before > 0.3
    assert result.ece_after < 0.05
    assert calibrate_answers(nats[:29], right[:29], expected_calibration_error) is None


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_answers_that_are_all_alike_keep_the_temperature_finite(right: float) -> None:
    nats = np.r_[0.0, np.linspace(0.01, 2, 40)]
    assert 1e-3 <= fit_answer_temperature(nats, np.full(41, right)) <= 20
