"""Small models whose influence is known in closed form, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import Batch, FunctionalModel
from posttrain.attribution.influence.ihvp.solver import Solution
from posttrain.attribution.influence.losses import CrossEntropy


def run(model: nn.Module, batch: Batch) -> Tensor:
    """The model on a batch of inputs and targets."""
    outputs: Tensor = model(batch[0])
    return outputs


class SquaredError:
    """Half the squared distance of outputs [B, D] to targets [B, D]: a loss whose Hessian is the identity."""

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs - batch[-1]).square().flatten(1).sum(1) / 2

    def roots(self, outputs: Tensor, batch: Batch, samples: int | None, generator: torch.Generator | None) -> Tensor:
        if samples is None:
            return torch.eye(outputs.shape[1], dtype=outputs.dtype)[:, None].expand(-1, len(outputs), -1)
        return torch.randn((samples, *outputs.shape), generator=generator, dtype=outputs.dtype) / samples**0.5


@pytest.fixture
def squared_error() -> SquaredError:
    return SquaredError()


def pairs(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x, y, strict=True))


@dataclass
class FittedModel:
    """A trained model with its records; ``penalty`` is the coefficient of half the squared length in the mean loss."""

    model: FunctionalModel
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    penalty: float

    @property
    def train(self) -> list[tuple[Tensor, Tensor]]:
        return pairs(self.x, self.y)

    @property
    def test(self) -> list[tuple[Tensor, Tensor]]:
        return pairs(self.test_x, self.test_y)


@pytest.fixture
def ridge() -> FittedModel:
    """Ridge regression without intercept, solved exactly."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    truth = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    y = x @ truth + torch.randn(40, 1, generator=generator, dtype=torch.float64)
    test_x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    test_y = test_x @ truth + torch.randn(7, 1, generator=generator, dtype=torch.float64)
    penalty = 0.05
    model = nn.Linear(5, 1, bias=False).double()
    solution = torch.linalg.solve(x.T @ x + len(x) * penalty * torch.eye(5, dtype=torch.float64), x.T @ y)
    model.weight.data = solution.T.clone()
    return FittedModel(FunctionalModel(model, run, SquaredError()), x, y, test_x, test_y, penalty)


Fit = Callable[[Tensor], Tensor]


@pytest.fixture
def logistic() -> tuple[FittedModel, Fit]:
    """Softmax regression on three classes, and its fit: from record weights [N] to weights and bias [3, 5]."""
    generator = torch.Generator().manual_seed(1)
    truth = 2 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    test_x = torch.randn(6, 4, generator=generator, dtype=torch.float64)

    def classes(inputs: Tensor) -> Tensor:
        return torch.multinomial((inputs @ truth.T).softmax(1), 1, generator=generator)[:, 0]

    y, test_y, penalty = classes(x), classes(test_x), 0.02
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    inputs = torch.cat([x, ones], 1)

    def objective(flat: Tensor, weights: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(inputs @ flat.view(3, 5).T, y, reduction="none")
        return (weights * losses).sum() / len(x) + penalty / 2 * flat.square().sum()

    start = torch.zeros(15, dtype=torch.float64)

    def fit(weights: Tensor) -> Tensor:
        flat = start
        for _ in range(30):
            step = torch.linalg.solve(
                torch.func.hessian(objective)(flat, weights), torch.func.grad(objective)(flat, weights)
            )
            flat = flat - step
            if float(step.norm()) < 1e-13:
                return flat.view(3, 5)
        raise AssertionError("Newton's method did not converge")

    solution = fit(torch.ones(len(x), dtype=torch.float64))
    start = solution.flatten()
    model = nn.Linear(4, 3).double()
    model.weight.data, model.bias.data = solution[:, :4].clone(), solution[:, 4].clone()
    return FittedModel(FunctionalModel(model, run, CrossEntropy()), x, y, test_x, test_y, penalty), fit


@pytest.fixture
def network() -> FittedModel:
    """An untrained network of two layers, with random classes."""
    generator = torch.Generator().manual_seed(2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=generator)
    return FittedModel(FunctionalModel(model, run, CrossEntropy()), x, y, x[:4] + 0.1, y[:4], 0.0)


class DenseSolver:
    """The reference for all solvers: LU factors of the whole matrix."""

    def matrix(self, curvature: Curvature) -> Tensor:
        """H, float64 [P, P]; `test_curvature` checks products with it against the formulas."""
        return curvature.product(torch.eye(curvature.model.size, dtype=torch.float64))

    def solve(self, curvature: Curvature, b: Tensor, damping: float) -> Solution:
        matrix = self.matrix(curvature) + damping * torch.eye(len(b), dtype=torch.float64)
        x = torch.linalg.solve(matrix, b.double())
        residuals = (matrix @ x - b).norm(dim=0) / b.double().norm(dim=0)
        return Solution(x, residuals.numpy())


@pytest.fixture
def dense() -> DenseSolver:
    return DenseSolver()
