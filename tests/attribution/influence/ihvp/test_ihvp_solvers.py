import logging

import numpy as np
import pytest
import torch

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.ihvp.arnoldi import Arnoldi
from posttrain.attribution.influence.ihvp.conjugate_gradient import ConjugateGradient
from posttrain.attribution.influence.ihvp.exact import Exact
from posttrain.attribution.influence.ihvp.lissa import Lissa, largest_eigenvalue
from posttrain.store.errors import UserError

DAMPING = 0.2


def right_sides(size: int) -> torch.Tensor:
    return torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def answer(network) -> tuple[Curvature, torch.Tensor, torch.Tensor]:
    """The Gauss-Newton matrix, right-hand sides and their exact solutions."""
    curvature, b = Curvature(network.learner, network.train), right_sides(network.learner.size)
    whole = curvature.dense() + DAMPING * torch.eye(len(b), dtype=torch.float64)
    return curvature, b, torch.linalg.inv(whole) @ b


@pytest.mark.parametrize(
    ("solver", "tolerance"),
    [
        (Exact(), 1e-11),
        (ConjugateGradient(tolerance=1e-10), 1e-9),
        (Arnoldi(steps=43), 1e-8),
        (Lissa(steps=150), 1e-8),
        (Lissa(steps=150, scale=2.0), 1e-4),
    ],
)
def test_all_come_to_the_exact_solution(answer, solver, tolerance) -> None:
    curvature, b, expected = answer
    found = solver.solve(curvature, b, DAMPING)
    assert float((found.x - expected).norm() / expected.norm()) < tolerance
    left = (curvature.dense() + DAMPING * torch.eye(len(b), dtype=torch.float64)) @ found.x - b
    np.testing.assert_allclose(found.residuals, (left.norm(dim=0) / b.norm(dim=0)).numpy(), rtol=1e-3, atol=1e-13)


def test_float32_is_solved_to_float32(network) -> None:
    network.learner.model.float()
    from posttrain.attribution.influence.functional_model import FunctionalModel

    learner = FunctionalModel(network.learner.model, network.learner.outputs, network.learner.losses)
    curvature = Curvature(learner, [(x.float(), y) for x, y in network.train])
    b = right_sides(learner.size).float()
    expected = torch.linalg.solve(curvature.dense() + DAMPING * torch.eye(len(b), dtype=torch.float64), b.double())
    for solver in (Exact(), ConjugateGradient(), Arnoldi(steps=43), Lissa(steps=100)):
        found = solver.solve(curvature, b, DAMPING)
        assert float((found.x.double() - expected).norm() / expected.norm()) < 3e-4


def test_conjugate_gradient_needs_no_more_steps_than_parameters(logistic) -> None:
    fitted, _ = logistic
    curvature = Curvature(fitted.learner, fitted.train)
    ConjugateGradient(tolerance=1e-9, steps=50).solve(curvature, right_sides(15), 0.02)
    products = curvature.evaluations / 60
    assert products <= 3 * (15 + 3)


def test_a_right_side_of_zeros_gives_zeros(answer) -> None:
    curvature, b, _ = answer
    b[:, 1] = 0
    for solver in (Exact(), ConjugateGradient(), Arnoldi(steps=43), Lissa(steps=50)):
        found = solver.solve(curvature, b, DAMPING)
        assert not found.x[:, 1].any()
        assert found.residuals[1] == 0


def test_conjugate_gradient_refuses_negative_curvature(network) -> None:
    curvature = Curvature(network.learner, network.train, "hessian")
    with pytest.raises(UserError, match="curvature is not positive"):
        ConjugateGradient().solve(curvature, right_sides(network.learner.size), 0.0)


def test_conjugate_gradient_warns_when_it_is_stopped_early(answer, caplog) -> None:
    curvature, b, _ = answer
    with caplog.at_level(logging.WARNING, "posttrain"):
        found = ConjugateGradient(steps=2).solve(curvature, b, DAMPING)
    assert "conjugate gradient: 3 of 3 test records are solved to a residual above" in caplog.text
    assert found.residuals.min() > 1e-3


def test_lissa_refuses_a_scale_at_which_it_diverges(answer) -> None:
    curvature, b, _ = answer
    largest = float(torch.linalg.eigvalsh(curvature.dense()).max()) + DAMPING
    with pytest.raises(UserError, match="diverges"):
        Lissa(scale=0.4 * largest, steps=100).solve(curvature, b, DAMPING)
    with pytest.raises(UserError, match="diverges"):
        Lissa(scale=0.4 * largest, steps=5).solve(curvature, b, DAMPING)
    Lissa(scale=0.6 * largest, steps=150).solve(curvature, b, DAMPING)


def test_lissa_refuses_negative_curvature(network) -> None:
    curvature = Curvature(network.learner, network.train, "hessian")
    with pytest.raises(UserError, match="diverges"):
        Lissa(steps=3000).solve(curvature, right_sides(network.learner.size), 0.0)


def test_lissa_warns_when_steps_are_few(answer, caplog) -> None:
    curvature, b, _ = answer
    with caplog.at_level(logging.WARNING, "posttrain"):
        Lissa(steps=5).solve(curvature, b, DAMPING)
    assert "LiSSA: 3 of 3" in caplog.text


def test_lissa_by_mini_batches_comes_near_and_nearer_with_repeats(answer) -> None:
    curvature, b, expected = answer
    found = {
        repeats: Lissa(steps=40, batch=5, repeats=repeats, scale=1.2, seed=1).solve(curvature, b, DAMPING).x
        for repeats in (1, 8)
    }
    errors = {repeats: float((x - expected).norm() / expected.norm()) for repeats, x in found.items()}
    assert 0.001 < errors[8] < errors[1] / 2
    assert errors[8] < 0.1
    again = Lissa(steps=40, batch=5, scale=1.2, seed=1).solve(curvature, b, DAMPING).x
    assert torch.equal(found[1], again)


def test_the_largest_eigenvalue_is_found(answer) -> None:
    curvature, b, _ = answer
    largest = float(torch.linalg.eigvalsh(curvature.dense()).max())
    assert 0.99 * largest < largest_eigenvalue(curvature, b, 0) <= largest * (1 + 1e-12)


def test_arnoldi_of_low_rank_is_the_inverse_on_the_largest_eigenvectors(answer) -> None:
    curvature, b, _ = answer
    eigenvalues, vectors = torch.linalg.eigh(curvature.dense())
    top, kept = eigenvalues[-4:], vectors[:, -4:]
    found = Arnoldi(steps=43, rank=4).solve(curvature, b, DAMPING)
    torch.testing.assert_close(found.x, kept @ ((kept.T @ b) / (top + DAMPING)[:, None]), rtol=1e-7, atol=1e-9)
    assert found.residuals.min() > 0.1


def test_arnoldi_refuses_an_eigenvalue_that_is_not_positive(network) -> None:
    curvature = Curvature(network.learner, network.train, "hessian")
    with pytest.raises(UserError, match="the curvature has the eigenvalue -"):
        Arnoldi(steps=43).solve(curvature, right_sides(network.learner.size), 0.0)


def test_exact_refuses_a_singular_matrix(network) -> None:
    # Adding the same number to all logits changes nothing.
    curvature = Curvature(network.learner, network.train)
    with pytest.raises(UserError, match="singular"):
        Exact().solve(curvature, right_sides(network.learner.size), 0.0)


def test_settings_are_checked(answer) -> None:
    curvature, b, _ = answer
    for solver, what in (
        (Lissa(steps=0), "at least 1"),
        (Lissa(scale=-1.0), "above 0"),
        (Lissa(batch=0), "at least 1"),
        (Arnoldi(steps=0), "at least 1"),
        (Arnoldi(rank=0), "at least 1"),
    ):
        before = curvature.evaluations
        with pytest.raises(UserError, match=what):
            solver.solve(curvature, b, DAMPING)
        assert curvature.evaluations == before
