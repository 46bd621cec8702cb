import pytest
import torch
from torch import nn

from posttrain.attribution.influence.curvature import Curvature
from posttrain.attribution.influence.functional_model import FunctionalModel
from posttrain.attribution.influence.ihvp.ekfac import Ekfac
from posttrain.attribution.influence.losses import CrossEntropy
from posttrain.store.errors import UserError

DAMPING = 0.03


def right_sides(size: int) -> torch.Tensor:
    return torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def ekfac_matrix(ekfac: Ekfac, curvature: Curvature) -> torch.Tensor:
    """EK-FAC's matrix, recovered from its inverse."""
    size = curvature.model.size
    eye = torch.eye(size, dtype=torch.float64)
    return torch.linalg.inv(ekfac.solve(curvature, eye, DAMPING).x) - DAMPING * eye


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_one_linear_layer_with_squared_error_is_exact(network, dense, squared_error, bias) -> None:
    """The matrix is the second moment of the inputs, times the identity."""
    generator = torch.Generator().manual_seed(7)
    targets = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    model = FunctionalModel(nn.Linear(4, 3, bias=bias).double(), network.model.outputs, squared_error)
    curvature = Curvature(model, list(zip(network.x, targets, strict=True)), block_size=6)
    b = right_sides(model.size)
    expected = dense.solve(curvature, b, DAMPING).x
    torch.testing.assert_close(Ekfac(samples=None).solve(curvature, b, DAMPING).x, expected)
    # Sampled from the model's predictions it is close.
    sampled = Ekfac(samples=400).solve(curvature, b, DAMPING).x
    assert 1e-4 < float((sampled - expected).norm() / expected.norm()) < 0.1


def test_one_record_of_a_classifier_is_exact(network, dense) -> None:
    model = FunctionalModel(nn.Linear(4, 3).double(), network.model.outputs, CrossEntropy())
    curvature = Curvature(model, network.train[:1])
    b = right_sides(model.size)
    torch.testing.assert_close(Ekfac(samples=None).solve(curvature, b, DAMPING).x, dense.solve(curvature, b, DAMPING).x)


def test_it_is_the_best_diagonal_in_the_basis_of_the_factors(network, dense) -> None:
    """For each layer: eigenvectors of the two moments, and the diagonal of the exact matrix in that basis."""
    curvature = Curvature(network.model, network.train, block_size=7)
    exact, model, slices = dense.matrix(curvature), network.model.module, network.model.slices
    expected = torch.zeros_like(exact)
    p = model(network.x).softmax(1).detach()
    output_hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    hidden = torch.tanh(model[0](network.x)).detach()
    backward = (1 - hidden**2)[:, :, None] * model[2].weight.detach().T
    moments = {
        "0": (network.x, torch.einsum("bij,bjk,blk->il", backward, output_hessian, backward)),
        "2": (hidden, output_hessian.sum(0)),
    }
    for name, (inputs, outputs) in moments.items():
        inputs_and_ones = torch.cat([inputs, torch.ones(20, 1, dtype=torch.float64)], 1)
        basis = torch.kron(torch.linalg.eigh(outputs)[1], torch.linalg.eigh(inputs_and_ones.T @ inputs_and_ones)[1])
        weight, bias = slices[f"{name}.weight"], slices[f"{name}.bias"]
        order = []
        for row in range(len(outputs)):
            width = inputs.shape[1]
            order += [*range(weight.start + row * width, weight.start + (row + 1) * width), bias.start + row]
        index = torch.tensor(order)
        block = exact[index[:, None], index]
        expected[index[:, None], index] = basis @ (basis.T @ block @ basis).diagonal().diag() @ basis.T
    result = ekfac_matrix(Ekfac(samples=None), curvature)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-9)
    assert float((result - exact).norm() / exact.norm()) > 0.05


class SumOverPositions(nn.Module):
    """The sum of a linear layer over two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.view(len(x), 2, 2)).sum(1)


def test_gradients_of_positions_are_summed_before_squaring(network, dense) -> None:
    """The gradient equals that of a layer without positions on their sum."""
    model = FunctionalModel(SumOverPositions(), network.model.outputs, CrossEntropy())
    summed = [(x.view(2, 2).sum(0), y) for x, y in network.train[:1]]
    without_positions = FunctionalModel(model.module.inner, network.model.outputs, CrossEntropy())
    b = right_sides(6)
    exact = dense.solve(Curvature(without_positions, summed), b, DAMPING).x
    torch.testing.assert_close(dense.solve(Curvature(model, network.train[:1]), b, DAMPING).x, exact)
    # With several records only the trace is exact: it is the same in every basis.
    result = ekfac_matrix(Ekfac(samples=None), Curvature(model, network.train))
    whole = dense.matrix(Curvature(model, network.train))
    torch.testing.assert_close(result.trace(), whole.trace())


def test_samples_depend_only_on_the_seed(network) -> None:
    curvature, b = Curvature(network.model, network.train), right_sides(network.model.size)
    first, same, other = (Ekfac(seed=seed).solve(curvature, b, DAMPING).x for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


def test_hooks_are_removed_afterwards(network) -> None:
    Ekfac().fit(Curvature(network.model, network.train))
    assert not any(part._forward_hooks for part in network.model.module.modules())


def test_unsupported_models_and_settings_are_refused(network) -> None:
    b = right_sides(network.model.size)
    with pytest.raises(UserError, match="damping: the curvature is singular"):
        Ekfac().solve(Curvature(network.model, network.train[:1]), b, 0.0)
    other = FunctionalModel(
        nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double(), network.model.outputs, CrossEntropy()
    )
    with pytest.raises(UserError, match=r"the weights of linear layers, not 1\.weight"):
        Ekfac().solve(Curvature(other, network.train), b, DAMPING)
    rootless = FunctionalModel(
        network.model.module, network.model.outputs, lambda outputs, batch: outputs.square().sum(1)
    )
    with pytest.raises(UserError, match="takes a loss that has roots"):
        Ekfac().solve(Curvature(rootless, network.train), b, DAMPING)
    two_calls = FunctionalModel(TwoCalls(), network.model.outputs, CrossEntropy())
    with pytest.raises(UserError, match="run once a batch, with a row a record: inner does not"):
        Ekfac().solve(Curvature(two_calls, network.train), b, DAMPING)


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))
