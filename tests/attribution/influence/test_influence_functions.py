from pathlib import Path

import numpy as np
import pytest
import torch

from posttrain.attribution.influence.gradients import record_gradients
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.ekfac import Ekfac
from posttrain.attribution.influence.ihvp.solver import Solver
from posttrain.attribution.influence.influence_functions import influence_functions
from posttrain.store.errors import UserError


def gradients(model, records) -> torch.Tensor:
    return torch.cat([result for _, result in record_gradients(model, records)])


def test_ridge_is_leave_one_out_up_to_the_leverage(ridge, dense) -> None:
    """Without record i, the retrained solution moves by exactly 1 / (1 - h_i) times the influence."""
    result = influence_functions(ridge.model, ridge.train, ridge.test, damping=ridge.penalty, solver=dense)
    n, d = ridge.x.shape
    normal = ridge.x.T @ ridge.x + n * ridge.penalty * torch.eye(d, dtype=torch.float64)
    whole = ridge.model.flat(ridge.model.parameters)
    leverage = (ridge.x * torch.linalg.solve(normal, ridge.x.T).T).sum(1)
    test_gradients = gradients(ridge.model, ridge.test)
    expected = torch.empty(n, len(ridge.test_x), dtype=torch.float64)
    for row in range(n):
        others = torch.arange(n) != row
        without = torch.linalg.solve(
            normal - ridge.x[row, :, None] * ridge.x[row], ridge.x[others].T @ ridge.y[others]
        )[:, 0]
        expected[row] = (1 - leverage[row]) * (test_gradients @ (without - whole))
        # The leave-one-out residual by the identity.
        residual = ridge.y[row, 0] - ridge.x[row] @ whole
        torch.testing.assert_close(ridge.y[row, 0] - ridge.x[row] @ without, residual / (1 - leverage[row]))
    assert float(expected.abs().max()) > 0.01
    np.testing.assert_allclose(result.scores, expected.numpy(), rtol=1e-9, atol=1e-14)
    assert result.residuals.max() < 1e-12


def test_logistic_is_the_derivative_of_retraining(logistic, dense) -> None:
    """Central differences in a record's weight, each retrained to the minimum."""
    fitted, fit = logistic
    result = influence_functions(fitted.model, fitted.train, fitted.test, damping=fitted.penalty, solver=dense)
    step, ones = 1e-4, torch.ones(len(fitted.x), dtype=torch.float64)
    for row in (0, 7, 31, 59):
        ends = []
        for sign in (-1, 1):
            weights = ones.clone()
            weights[row] += sign * step
            solution = fit(weights)
            parameters = {"weight": solution[:, :4], "bias": solution[:, 4]}
            ends.append(fitted.model.losses_at(parameters, (fitted.test_x, fitted.test_y)))
        expected = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(result.scores[row], expected.numpy(), rtol=1e-6, atol=1e-10)
        assert float(expected.abs().max()) > 1e-4


@pytest.mark.slow
def test_logistic_influence_predicts_leave_one_out(logistic) -> None:
    fitted, fit = logistic
    result = influence_functions(fitted.model, fitted.train, fitted.test, damping=fitted.penalty)
    before = fitted.model.losses_at(fitted.model.parameters, (fitted.test_x, fitted.test_y))
    rises = []
    for row in range(0, len(fitted.x), 3):
        weights = torch.ones(len(fitted.x), dtype=torch.float64)
        weights[row] = 0
        solution = fit(weights)
        parameters = {"weight": solution[:, :4], "bias": solution[:, 4]}
        rises.append((fitted.model.losses_at(parameters, (fitted.test_x, fitted.test_y)) - before).numpy())
    actual, scores = np.stack(rises), result.scores[::3]
    for column in range(actual.shape[1]):
        assert np.corrcoef(scores[:, column], actual[:, column])[0, 1] > 0.98
    # The first-order estimate is too small by the leverage.
    assert np.linalg.norm(scores - actual) < 0.25 * np.linalg.norm(actual)
    assert (np.sign(scores) == np.sign(actual)).mean() > 0.97


def test_a_record_lowers_its_own_loss(logistic, dense) -> None:
    fitted, _ = logistic
    result = influence_functions(fitted.model, fitted.train, fitted.train, damping=fitted.penalty, solver=dense)
    assert (result.scores.diagonal() > 0).all()
    np.testing.assert_allclose(result.scores, result.scores.T, atol=1e-15)


def test_float32_agrees_with_float64(logistic) -> None:
    fitted, _ = logistic
    exact = influence_functions(fitted.model, fitted.train, fitted.test, damping=0.02)
    fitted.model.module.float()
    from posttrain.attribution.influence.functional_model import FunctionalModel

    low = FunctionalModel(fitted.model.module, fitted.model.outputs, fitted.model.losses)
    train, test = ([(x.float(), y) for x, y in records] for records in (fitted.train, fitted.test))
    result = influence_functions(low, train, test, damping=0.02)
    np.testing.assert_allclose(result.scores, exact.scores, rtol=2e-3, atol=1e-5 * np.abs(exact.scores).max())
    assert result.scores.dtype == np.float64


def test_evaluations_are_gradients_and_products_with_records(logistic, dense) -> None:
    fitted, _ = logistic
    result = influence_functions(fitted.model, fitted.train, fitted.test, damping=fitted.penalty, solver=dense)
    assert result.evaluations == 60 + 6 + 60 * 15


def test_damping_and_records_are_checked_before_any_work(network) -> None:
    model, train, test = network.model, network.train, network.test
    with pytest.raises(UserError, match=r"damping must be 0 or more, not -0.1"):
        influence_functions(model, train, test, damping=-0.1)
    with pytest.raises(UserError, match="no training records"):
        influence_functions(model, [], test, damping=0.1)
    with pytest.raises(UserError, match="no test records"):
        influence_functions(model, train, [], damping=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [ConjugateGradient(), Ekfac()], ids=lambda solver: type(solver).__name__)
def test_cached_results_are_not_computed_again(network, tmp_path: Path, solver: Solver) -> None:
    settings = {"damping": 0.1, "solver": solver, "block_size": 5}
    expected = influence_functions(network.model, network.train, network.test, **settings)
    first = influence_functions(network.model, network.train, network.test, **settings, folder=tmp_path)
    assert first.evaluations == expected.evaluations
    next(tmp_path.glob("*.block")).unlink()
    again = influence_functions(network.model, network.train, network.test, **settings, folder=tmp_path)
    assert again.evaluations == 5, "one block of training records, and no linear solve"
    for result in (first, again):
        np.testing.assert_array_equal(result.scores, expected.scores)
        assert (result.residuals is None) == (expected.residuals is None)
    other = influence_functions(
        network.model, network.train, network.test, **settings | {"damping": 1.0}, folder=tmp_path
    )
    assert np.abs(other.scores - expected.scores).max() > 0
