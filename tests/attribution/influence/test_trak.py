import numpy as np
import pytest
import torch
from torch import nn

from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.losses import IGNORE_INDEX, CrossEntropy
from posttrain.attribution.influence.projection import Projection
from posttrain.attribution.influence.trak import Margin, trak
from posttrain.attribution.values import standard_errors_of_sums
from posttrain.store.errors import UserError


class Binary(nn.Module):
    """Logistic regression as two classes whose logits are 0 and x w: the log-odds of the right one are +-x w."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        odds = x @ self.weight
        return torch.stack([torch.zeros_like(odds), odds], 1)


@pytest.fixture
def binary() -> tuple[FunctionalModel, torch.Tensor, torch.Tensor, float]:
    """A fitted logistic regression with its inputs, signs +-1 of the classes, and the penalty on the summed loss."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    y = (torch.rand(50, generator=generator) < torch.sigmoid(x.sum(1))).long()
    sign, penalty = (2 * y - 1).double(), 0.5
    weight = torch.zeros(4, dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(sign * (x @ weight))
        gradient = -(x.T @ (sign * (1 - p))) + penalty * weight
        hessian = x.T @ ((p * (1 - p))[:, None] * x) + penalty * torch.eye(4, dtype=torch.float64)
        weight = weight - torch.linalg.solve(hessian, gradient)
    assert float(gradient.norm()) < 1e-12
    return FunctionalModel(Binary(weight), lambda model, batch: model(batch[0]), CrossEntropy()), x, sign, penalty


def records(x: torch.Tensor, sign: torch.Tensor) -> list:
    return list(zip(x, (sign > 0).long(), strict=True))


def test_without_projection_it_is_the_closed_form(binary) -> None:
    model, x, sign, _ = binary
    result = trak([model], records(x, sign)[:40], records(x, sign)[40:], projection=None)
    f = sign[:, None] * x
    p = torch.sigmoid(f @ model.parameters["weight"])
    expected = f[:40] @ torch.linalg.inv(f[:40].T @ f[:40]) @ f[40:].T * (1 - p[:40])[:, None]
    np.testing.assert_allclose(result.scores, expected.numpy(), rtol=1e-9)
    assert result.evaluations == 50
    np.testing.assert_allclose(result.standard_errors, standard_errors_of_sums(result.scores))


def test_newton_equals_one_newton_step_to_each_leave_one_out_solution(binary) -> None:
    """The step is computed from sums over the other records, not by TRAK's formula."""
    model, x, sign, penalty = binary
    result = trak([model], records(x, sign), records(x, sign), projection=None, damping=penalty, newton=True)
    weight, f = model.parameters["weight"], sign[:, None] * x
    p = torch.sigmoid(f @ weight)
    for row in range(50):
        others = torch.arange(50) != row
        gradient = -(f[others].T @ (1 - p[others])) + penalty * weight
        hessian = f[others].T @ ((p * (1 - p))[others, None] * f[others]) + penalty * torch.eye(4, dtype=torch.float64)
        leave_one_out = weight - torch.linalg.solve(hessian, gradient)
        np.testing.assert_allclose(result.scores[row], (f @ (weight - leave_one_out)).numpy(), rtol=1e-8, atol=1e-12)
    assert (result.scores.diagonal() > 0).all()


def test_the_margin_is_the_log_odds_even_of_a_certain_model() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [0.0, 60.0, 0.0]])
    targets = torch.tensor([0, 1])
    p = logits.double().softmax(1).gather(1, targets[:, None])[:, 0]
    result = Margin()(logits, (targets,))
    torch.testing.assert_close(result[0].double(), ((1 - p) / p).log()[0])
    assert float(result[1]) == pytest.approx(np.log(2) - 60, rel=1e-6)
    rows = torch.stack([logits, logits.flip(1)])
    several = torch.tensor([[0, IGNORE_INDEX], [2, 1]])
    torch.testing.assert_close(
        Margin()(rows, (several,)),
        torch.stack([result[0], result[0] + Margin()(rows[1, 1:], (torch.tensor([1]),))[0]]),
    )


def test_several_models_with_their_own_projections_are_averaged(binary) -> None:
    model, x, sign, _ = binary
    train, test = records(x, sign)[:40], records(x, sign)[40:]
    models = [model, model.at({"weight": model.parameters["weight"] * 0.7 + 0.1})]
    result = trak(models, train, test, projection=Projection(3, 8, "dense"))
    f = sign[:, None] * x
    kernels, error_probabilities = [], []
    for number, model in enumerate(models):
        g = Projection(3, 8 + number, "dense")(f)
        kernels.append(g[:40] @ torch.linalg.inv(g[:40].T @ g[:40]) @ g[40:].T)
        error_probabilities.append(1 - torch.sigmoid(f[:40] @ model.parameters["weight"]))
    mean_error_probability = (error_probabilities[0] + error_probabilities[1])[:, None] / 2
    np.testing.assert_allclose(
        result.scores, ((kernels[0] + kernels[1]) / 2 * mean_error_probability).numpy(), rtol=1e-8
    )
    by_model = torch.stack([(kernel * mean_error_probability).sum(1) for kernel in kernels])
    np.testing.assert_allclose(result.values, by_model.mean(0))
    np.testing.assert_allclose(result.standard_errors, (by_model[0] - by_model[1]).abs().numpy() / 2)


def test_trak_caches_gradients(binary, tmp_path) -> None:
    model, x, sign, _ = binary
    train, test = records(x, sign)[:40], records(x, sign)[40:]
    first, again = (trak([model], train, test, projection=Projection(3), folder=tmp_path) for _ in range(2))
    assert (first.evaluations, again.evaluations) == (50, 0)
    np.testing.assert_array_equal(first.scores, again.scores)


def test_missing_records_models_and_other_losses_are_refused(binary, squared_error) -> None:
    model, x, sign, _ = binary
    data = records(x, sign)
    with pytest.raises(UserError, match="there are no test records"):
        trak([model], data, [], projection=None)
    with pytest.raises(UserError, match="there are no models"):
        trak([], data, data, projection=None)
    with pytest.raises(UserError, match="3 records do not fill 4 dimensions"):
        trak([model], data[:3], data, projection=None)
    with pytest.raises(UserError, match="damping must be 0 or more"):
        trak([model], data, data, projection=None, damping=-1)
    other = FunctionalModel(model.module, model.outputs, squared_error)
    with pytest.raises(UserError, match="whose loss is the cross-entropy"):
        trak([other], data, data, projection=None)
