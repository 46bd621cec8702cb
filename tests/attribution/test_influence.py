"""EK-FAC and influence functions against closed forms, in float64."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posttrain.attribution.causal_lm import IGNORE_INDEX, CrossEntropy
from posttrain.attribution.influence import Batch, InfluenceModel, fit_ekfac, influence_functions
from posttrain.store.errors import UserError

DAMPING = 0.03


class SquaredError:
    """Half the squared distance of outputs [B, D] to targets [B, D]: a loss whose Hessian is the identity."""

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs - batch[-1]).square().flatten(1).sum(1) / 2

    def roots(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        return torch.eye(outputs.shape[1], dtype=outputs.dtype)[:, None].expand(-1, len(outputs), -1)


class ExactCrossEntropy(CrossEntropy):
    """Cross-entropy with all roots instead of one that is drawn: the columns sqrt(p_k) (e_k - p)."""

    def roots(self, outputs: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
        p = outputs.softmax(-1)
        roots: Tensor = p.T.sqrt()[:, :, None] * (torch.eye(p.shape[1], dtype=p.dtype)[:, None] - p)
        return roots


def stack(records: Sequence[Any]) -> Batch:
    return tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in zip(*records, strict=True))


def wrap(module: nn.Module, loss: Any) -> InfluenceModel:
    return InfluenceModel(module, lambda batch: module(batch[0]), loss, stack)


Records = list[tuple[Tensor, Tensor]]


def matrix(model: InfluenceModel, records: Records) -> Tensor:
    """The Gauss-Newton matrix by its formula, the mean of J' L J, over the parameters in the module's order."""
    parameters = {name: value.detach() for name, value in model.module.named_parameters()}
    size = sum(value.numel() for value in parameters.values())
    total = torch.zeros(size, size, dtype=torch.float64)
    for x, y in records:

        def outputs(parameters: dict[str, Tensor], x: Tensor = x) -> Tensor:
            result: Tensor = torch.func.functional_call(model.module, parameters, (x[None],))
            return result[0]

        jacobians: dict[str, Tensor] = torch.func.jacrev(outputs)(parameters)  # type: ignore[assignment]
        jacobian = torch.cat([part.flatten(1) for part in jacobians.values()], 1)
        hessian = torch.func.hessian(lambda values, y=y: model.loss(values[None], (y[None],))[0])(outputs(parameters))
        total += jacobian.T @ hessian @ jacobian  # type: ignore[operator]
    return total / len(records)


def order(model: InfluenceModel) -> Tensor:
    """The index of each weight among the parameters in the module's order, by layer, row and column with the bias."""
    slices, start = {}, 0
    for name, value in model.module.named_parameters():
        slices[name] = torch.arange(start, start + value.numel()).view(value.shape)
        start += value.numel()
    parts = []
    for name in model.layers:
        weight = slices[f"{name}.weight" if name else "weight"]
        bias = slices.get(f"{name}.bias" if name else "bias")
        parts.append((weight if bias is None else torch.cat([weight, bias[:, None]], 1)).flatten())
    return torch.cat(parts)


def ekfac_matrix(model: InfluenceModel, records: Records) -> Tensor:
    """EK-FAC's matrix over the parameters in the order of `order`, recovered from its inverse."""
    blocks = []
    for layer in fit_ekfac(model, records).values():
        size = layer.eigenvalues.numel()
        eye = torch.eye(size, dtype=torch.float64)
        inverse = layer.solve(eye.view(size, *layer.eigenvalues.shape), DAMPING).flatten(1)
        blocks.append(torch.linalg.inv(inverse) - DAMPING * eye)
    return torch.block_diag(*blocks)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.attribution.influence._BLOCK_RECORDS", (7, 7))


@pytest.fixture
def network() -> InfluenceModel:
    """An untrained network of two layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return wrap(module, ExactCrossEntropy())


@pytest.fixture
def records() -> Records:
    """20 records of 4 features and 3 classes."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(3, (20,), generator=generator), strict=True))


def test_ridge_is_leave_one_out_up_to_the_leverage() -> None:
    """Without record i, the retrained solution moves by exactly 1 / (1 - h_i) times the influence."""
    generator = torch.Generator().manual_seed(0)
    x, test_x = (torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (40, 7))
    truth = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    y, test_y = (
        inputs @ truth + torch.randn(len(inputs), 1, generator=generator, dtype=torch.float64) for inputs in (x, test_x)
    )
    penalty, (n, d) = 0.05, x.shape
    normal = x.T @ x + n * penalty * torch.eye(d, dtype=torch.float64)
    module = nn.Linear(5, 1, bias=False).double()
    whole = torch.linalg.solve(normal, x.T @ y)[:, 0]
    module.weight.data = whole[None].clone()
    train, test = (list(zip(*pair, strict=True)) for pair in ((x, y), (test_x, test_y)))
    result = influence_functions(wrap(module, SquaredError()), train, test, damping=penalty)
    leverage = (x * torch.linalg.solve(normal, x.T).T).sum(1)
    test_gradients = (test_x @ whole - test_y[:, 0])[:, None] * test_x
    expected = torch.empty(n, len(test_x), dtype=torch.float64)
    for row in range(n):
        others = torch.arange(n) != row
        without = torch.linalg.solve(normal - x[row, :, None] * x[row], x[others].T @ y[others])[:, 0]
        expected[row] = (1 - leverage[row]) * (test_gradients @ (without - whole))
    assert float(expected.abs().max()) > 0.01
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("bias", [True, False])
def test_one_linear_layer_with_squared_error_is_exact(records: Records, bias: bool) -> None:
    """The matrix is the second moment of the inputs, times the identity."""
    model = wrap(nn.Linear(4, 3, bias=bias).double(), SquaredError())
    generator = torch.Generator().manual_seed(7)
    train = [(x, torch.randn(3, generator=generator, dtype=torch.float64)) for x, _ in records]
    index = order(model)
    torch.testing.assert_close(ekfac_matrix(model, train), matrix(model, train)[index[:, None], index])


def test_one_record_of_a_classifier_is_exact(records: Records) -> None:
    model = wrap(nn.Linear(4, 3).double(), ExactCrossEntropy())
    index = order(model)
    exact = matrix(model, records[:1])[index[:, None], index]
    torch.testing.assert_close(ekfac_matrix(model, records[:1]), exact, rtol=1e-6, atol=1e-9)


def test_it_is_the_best_diagonal_in_the_basis_of_the_factors(network: InfluenceModel, records: Records) -> None:
    """For each layer: eigenvectors of the two moments, and the diagonal of the exact matrix in that basis."""
    x = torch.stack([features for features, _ in records])
    first, second = network.module[0], network.module[2]  # type: ignore[index]
    p = network.module(x).softmax(1).detach()
    output_hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    hidden = torch.tanh(first(x)).detach()
    backward = (1 - hidden**2)[:, :, None] * second.weight.detach().T
    moments = [
        (x, torch.einsum("bij,bjk,blk->il", backward, output_hessian, backward)),
        (hidden, output_hessian.sum(0)),
    ]
    index = order(network)
    exact = matrix(network, records)[index[:, None], index]
    blocks, start = [], 0
    for inputs, outputs in moments:
        with_one = torch.cat([inputs, torch.ones(20, 1, dtype=torch.float64)], 1)
        basis = torch.kron(torch.linalg.eigh(outputs)[1], torch.linalg.eigh(with_one.T @ with_one)[1])
        block = exact[start : start + len(basis), start : start + len(basis)]
        blocks.append(basis @ (basis.T @ block @ basis).diagonal().diag() @ basis.T)
        start += len(basis)
    result = ekfac_matrix(network, records)
    torch.testing.assert_close(result, torch.block_diag(*blocks), rtol=1e-6, atol=1e-9)
    assert float((result - exact).norm() / exact.norm()) > 0.05


class SumOverPositions(nn.Module):
    """The sum of a linear layer over two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(len(x), 2, 2)).sum(1)


def test_gradients_of_positions_are_summed_before_squaring(records: Records) -> None:
    """With several records only the trace is exact: it is the same in every basis."""
    model = wrap(SumOverPositions(), ExactCrossEntropy())
    torch.testing.assert_close(ekfac_matrix(model, records).trace(), matrix(model, records).trace())


class FirstPosition(SumOverPositions):
    """A linear layer at the first of the positions; the others are padding."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(len(x), -1, 2))[:, 0]


def test_padding_changes_nothing(records: Records) -> None:
    model = wrap(FirstPosition(), ExactCrossEntropy())
    plain = [(x[:2], y) for x, y in records]
    torch.testing.assert_close(ekfac_matrix(model, records), ekfac_matrix(model, plain))


def test_scores_are_products_of_gradients_with_the_inverse(network: InfluenceModel, records: Records) -> None:
    """By autograd a record at a time, with the default damping of a tenth of the mean eigenvalue."""
    result = influence_functions(network, records, records[:3])
    index = order(network)
    gradients = []
    for x, y in records:
        loss = nn.functional.cross_entropy(network.module(x[None]), y[None])
        flat = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.module.parameters()))])
        gradients.append(flat[index])
    stacked, whole = torch.stack(gradients), ekfac_matrix(network, records)
    damped = whole + 0.1 * whole.trace() / len(whole) * torch.eye(len(whole), dtype=torch.float64)
    expected = stacked @ torch.linalg.solve(damped, stacked[:3].T) / 20
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-6, atol=1e-12)
    assert (result.diagonal() > 0).all()


def test_drawn_roots_sum_to_the_hessian_within_their_standard_error() -> None:
    outputs = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    draws = 20_000
    targets = torch.tensor([[0, 1, IGNORE_INDEX], [3, 3, 2]])
    many = outputs.repeat(draws, 1, 1)
    roots = CrossEntropy().roots(many, (targets.repeat(draws, 1),), torch.Generator().manual_seed(3))
    assert roots.shape == (1, 2 * draws, 3, 4)
    flat = roots.view(draws, 2, 12)
    assert not flat[:, 0, 8:].any()
    result = torch.einsum("rbi,rbj->bij", flat, flat) / draws
    errors = ((torch.einsum("rbi,rbj->bij", flat**2, flat**2) / draws - result**2).clamp(min=0) / draws).sqrt()
    p = outputs.softmax(-1)
    for record in range(2):
        blocks = [p[record, t].diag() - p[record, t][:, None] * p[record, t] for t in range(3)]
        if record == 0:
            blocks[2] = torch.zeros(4, 4, dtype=torch.float64)
        deviation = (result[record] - torch.block_diag(*blocks)).abs()
        assert bool((deviation <= 4.5 * errors[record] + 1e-12).all())


def test_drawn_roots_depend_only_on_the_seed(network: InfluenceModel, records: Records) -> None:
    drawn = wrap(network.module, CrossEntropy())
    first, same, other = (fit_ekfac(drawn, records, seed)["0"].eigenvalues for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)
    assert not any(part._forward_hooks for part in network.module.modules())


@pytest.mark.parametrize("damage", ["", "flip", "cut", "empty"])
def test_finished_work_is_not_computed_again(
    network: InfluenceModel, records: Records, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = influence_functions(network, records, records[:3], folder=tmp_path)
    files = sorted(tmp_path.glob("*.block"))
    assert [file.stem for file in files] == ["00000000-00000007", "00000007-00000014", "00000014-00000020", "solutions"]
    content = bytearray(files[1].read_bytes())
    content[-3] ^= 1
    if damage:
        files[1].write_bytes({"flip": content, "cut": content[:100], "empty": b""}[damage])
    else:
        files[1].unlink()
    passes = 0

    def outputs(batch: Batch) -> Tensor:
        nonlocal passes
        passes += 1
        result: Tensor = network.module(batch[0])
        return result

    counted = InfluenceModel(network.module, outputs, network.loss, stack)
    with caplog.at_level(logging.WARNING, "posttrain"):
        again = influence_functions(counted, records, records[:3], folder=tmp_path)
    np.testing.assert_array_equal(again, first)
    assert passes == 1
    assert (f"{files[1]} is damaged" in caplog.text) == bool(damage)


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.inner(x))
        return result


def test_unsupported_models_are_refused(network: InfluenceModel, records: Records) -> None:
    normalised = wrap(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double(), ExactCrossEntropy())
    with pytest.raises(UserError, match=r"the weights of linear layers, not 1\.weight"):
        influence_functions(normalised, records, records)
    with pytest.raises(UserError, match="run once a batch, with a row per record: inner does not"):
        influence_functions(wrap(TwoCalls(), ExactCrossEntropy()), records, records)
    network.module.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter of the model requires a gradient"):
        influence_functions(network, records, records)


def test_a_model_with_nan_is_refused(records: Records) -> None:
    broken = wrap(nn.Linear(4, 3).double(), SquaredError())
    train = [(x, torch.zeros(3, dtype=torch.float64)) for x, _ in records]
    train[4] = (train[4][0], torch.full((3,), torch.nan, dtype=torch.float64))
    with pytest.raises(UserError, match="a gradient is not finite"):
        influence_functions(broken, train, train[:2], damping=0.1)
