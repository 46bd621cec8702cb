"""RegMean against least squares in float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.store.errors import UserError
from posttrain.testing.merge_methods import merge_tensor

OUTPUTS, INPUTS = 37, 24


def draw(models: int, rows: int = 200) -> tuple[list[Tensor], list[np.ndarray]]:
    """Draws layers [outputs, inputs], and inputs [rows, inputs] whose features are correlated, otherwise by model."""
    generator = np.random.default_rng(3)
    weights = [torch.from_numpy(generator.normal(size=(OUTPUTS, INPUTS)).astype(np.float32)) for _ in range(models)]
    mixes = [np.eye(INPUTS) + 0.5 * generator.normal(size=(INPUTS, INPUTS)) / INPUTS**0.5 for _ in range(models)]
    return weights, [generator.normal(size=(rows, INPUTS)) @ mix for mix in mixes]


def grams(inputs: list[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy((matrix.T @ matrix).astype(np.float32)) for matrix in inputs]


@pytest.mark.parametrize("models", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_layer_is_the_least_squares_solution(models: int, weighted: bool) -> None:
    weights, inputs = draw(models)
    weight = [1.0 + 2 * number * weighted for number in range(models)]
    # argmin_W sum_i w_i |X_i W - X_i W_i|^2 of the stacked rows: what no Gram matrix has touched.
    rows = np.concatenate([factor**0.5 * matrix for factor, matrix in zip(weight, inputs, strict=True)])
    targets = np.concatenate(
        [
            factor**0.5 * matrix @ layer.double().numpy().T
            for factor, matrix, layer in zip(weight, inputs, weights, strict=True)
        ]
    )
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    result = merge_tensor("regmean", weights, statistics=grams(inputs), alpha=1.0, weight=weight).double().numpy()
    assert np.abs(result - expected).max() <= 2e-5
    # And the mean is not: the test can fail.
    if models > 1:
        assert np.abs(np.mean([layer.numpy() for layer in weights], axis=0) - expected).max() > 0.1


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.9])
def test_off_diagonals_are_scaled(alpha: float) -> None:
    weights, inputs = draw(3)
    shrunk = []
    for matrix in inputs:
        gram = (matrix.T @ matrix).astype(np.float32).astype(np.float64)
        shrunk.append(alpha * gram + (1 - alpha) * np.diag(np.diag(gram)))
    product = sum(gram @ layer.double().numpy().T for gram, layer in zip(shrunk, weights, strict=True))
    expected = np.linalg.solve(sum(shrunk), product).T
    result = merge_tensor("regmean", weights, statistics=grams(inputs), alpha=alpha).double().numpy()
    assert np.abs(result - expected).max() <= 2e-6


def test_orthogonal_inputs_give_each_model_its_own_features() -> None:
    weights, inputs = draw(2)
    inputs[0][:, 10:] = 0
    inputs[1][:, :10] = 0
    result = merge_tensor("regmean", weights, statistics=grams(inputs))
    torch.testing.assert_close(result[:, :10], weights[0][:, :10], rtol=0, atol=1e-5)
    torch.testing.assert_close(result[:, 10:], weights[1][:, 10:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
def test_what_no_input_tells_becomes_the_mean(alpha: float) -> None:
    weights, inputs = draw(2)
    for matrix in inputs:
        matrix[:, 3] = 0
    mean = (weights[0].double() + weights[1].double()) / 2
    result = merge_tensor("regmean", weights, statistics=grams(inputs), alpha=alpha).double()
    torch.testing.assert_close(result[:, 3], mean[:, 3], rtol=0, atol=1e-6)
    nothing = merge_tensor("regmean", weights, statistics=[torch.zeros(INPUTS, INPUTS)] * 2, alpha=alpha).double()
    torch.testing.assert_close(nothing, mean, rtol=0, atol=1e-6)


def test_fewer_rows_than_inputs_still_fit_every_model() -> None:
    weights, inputs = draw(2, rows=5)
    result = merge_tensor("regmean", weights, statistics=grams(inputs), alpha=1.0).double().numpy()
    for matrix, layer in zip(inputs, weights, strict=True):
        # Ten rows of 24 unknowns: some layer gives exactly what both give, and the smallest ridge finds nearly it.
        change = matrix @ (result - layer.double().numpy()).T
        mean = matrix @ (sum(weights).double().numpy() / 2 - layer.double().numpy()).T
        assert np.abs(change).max() < 1e-3 * np.abs(mean).max()


def test_identical_models_give_themselves_to_the_bit() -> None:
    weights, inputs = draw(1)
    result = merge_tensor("regmean", weights * 4, statistics=grams(draw(4)[1]))
    assert torch.equal(result, weights[0])
    assert torch.equal(merge_tensor("regmean", weights, statistics=grams(inputs)), weights[0])


def test_without_gram_matrices_it_is_the_weighted_mean() -> None:
    weights, _ = draw(2)
    vectors = [layer[0] for layer in weights]
    result = merge_tensor("regmean", vectors, weight=[1.0, 3.0])
    torch.testing.assert_close(result, 0.25 * vectors[0] + 0.75 * vectors[1], rtol=0, atol=1e-6)


def test_a_gram_matrix_of_nan_is_named() -> None:
    weights, inputs = draw(2)
    inputs[1][0, 0] = np.nan
    with pytest.raises(UserError, match="Gram matrix of weight"):
        merge_tensor("regmean", weights, statistics=grams(inputs))


def test_a_matrix_that_is_no_gram_matrix_is_refused() -> None:
    weights, _ = draw(1)
    with pytest.raises(UserError, match=r"alpha: .*lower it"):
        merge_tensor("regmean", weights, statistics=[-torch.eye(INPUTS)])
