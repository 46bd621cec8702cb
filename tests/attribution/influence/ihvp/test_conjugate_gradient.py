import logging

import numpy as np
import pytest
import torch

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.store.errors import UserError

DAMPING = 0.2


def right_sides(size: int) -> torch.Tensor:
    return torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def problem(network) -> tuple[Curvature, torch.Tensor]:
    """The Gauss-Newton matrix, and right-hand sides."""
    return Curvature(network.model, network.train), right_sides(network.model.size)


@pytest.mark.slow
def test_it_reaches_the_exact_solution(problem, dense) -> None:
    curvature, b = problem
    expected = dense.solve(curvature, b, DAMPING).x
    solution = ConjugateGradient(tolerance=1e-10).solve(curvature, b, DAMPING)
    assert float((solution.x - expected).norm() / expected.norm()) < 1e-9
    residual = (dense.matrix(curvature) + DAMPING * torch.eye(len(b), dtype=torch.float64)) @ solution.x - b
    np.testing.assert_allclose(
        solution.residuals, (residual.norm(dim=0) / b.norm(dim=0)).numpy(), rtol=1e-3, atol=1e-13
    )


def test_float32_is_solved_to_float32_precision(network, dense) -> None:
    network.model.module.float()
    model = FunctionalModel(network.model.module, network.model.outputs, network.model.losses)
    curvature = Curvature(model, [(x.float(), y) for x, y in network.train])
    b = right_sides(model.size).float()
    expected = dense.solve(curvature, b, DAMPING).x
    x = ConjugateGradient().solve(curvature, b, DAMPING).x
    assert float((x.double() - expected).norm() / expected.norm()) < 3e-4


def test_it_takes_no_more_steps_than_parameters(logistic) -> None:
    fitted, _ = logistic
    curvature = Curvature(fitted.model, fitted.train)
    ConjugateGradient(tolerance=1e-9, steps=50).solve(curvature, right_sides(15), 0.02)
    products = curvature.evaluations / 60
    assert products <= 3 * (15 + 3)


def test_a_right_hand_side_of_zeros_gives_zeros(problem) -> None:
    curvature, b = problem
    b[:, 1] = 0
    solution = ConjugateGradient().solve(curvature, b, DAMPING)
    assert not solution.x[:, 1].any()
    assert solution.residuals[1] == 0


def test_it_refuses_negative_curvature(network) -> None:
    model = FunctionalModel(
        network.model.module, network.model.outputs, lambda outputs, batch: -outputs.square().sum(1)
    )
    curvature = Curvature(model, network.train)
    with pytest.raises(UserError, match="curvature is not positive"):
        ConjugateGradient().solve(curvature, right_sides(network.model.size), 0.0)


def test_it_warns_when_it_is_stopped_early(problem, caplog) -> None:
    curvature, b = problem
    with caplog.at_level(logging.WARNING, "posttrain"):
        solution = ConjugateGradient(steps=2).solve(curvature, b, DAMPING)
    assert "conjugate gradient: 3 of 3 test records are solved to a residual above" in caplog.text
    assert solution.residuals.min() > 1e-3
