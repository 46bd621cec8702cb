import logging

import pytest
import torch
from torch import Tensor, nn

from posttrain.attribution.influence.functional_model import Batch, FunctionalModel
from posttrain.attribution.influence.gradients import batch_gradients, record_gradients
from posttrain.attribution.influence.losses import CrossEntropy
from posttrain.store.errors import UserError


def all_gradients(model: FunctionalModel, records: list, **settings) -> Tensor:
    return torch.cat([result for _, result in record_gradients(model, records, **settings)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_mode_and_block_size_gives_the_gradients_of_autograd(network, dtype) -> None:
    module = network.model.module.to(dtype)
    model = FunctionalModel(module, network.model.outputs, CrossEntropy())
    records = [(x.to(dtype), y) for x, y in network.train]
    expected = []
    for x, y in records:
        module.zero_grad()
        nn.functional.cross_entropy(module(x[None]), y[None]).backward()
        expected.append(torch.cat([value.grad.flatten() for value in module.parameters()]))
    expected = torch.stack(expected)
    tolerances = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    for block_size in (1, 7, 20, None):
        for mode in ("vmap", "loop"):
            result = all_gradients(model, records, block_size=block_size, mode=mode)
            assert result.dtype == dtype
            torch.testing.assert_close(result, expected, **tolerances)


def test_only_parameters_that_require_a_gradient_count(network) -> None:
    network.model.module[0].requires_grad_(False)
    model = FunctionalModel(network.model.module, network.model.outputs, CrossEntropy())
    all_parameters = all_gradients(network.model, network.train)
    assert model.size == 5 * 3 + 3
    torch.testing.assert_close(all_gradients(model, network.train), all_parameters[:, -model.size :])


def test_the_model_runs_in_evaluation_mode_and_keeps_its_own_mode(network) -> None:
    module = nn.Sequential(network.model.module[0], nn.Dropout(0.5), network.model.module[2]).train()
    module[0].eval()
    model = FunctionalModel(module, network.model.outputs, CrossEntropy())
    without_dropout = FunctionalModel(nn.Sequential(module[0], module[2]), network.model.outputs, CrossEntropy())
    for mode in ("vmap", "loop"):
        torch.testing.assert_close(
            all_gradients(model, network.train, mode=mode), all_gradients(without_dropout, network.train)
        )
    assert [part.training for part in (module, *module)] == [True, False, True, True]


class Branching(nn.Module):
    """Branches on its input, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result if float(x.sum()) > 0 else 2 * result


def test_models_that_vmap_cannot_run_fall_back_to_a_loop_with_a_message(network, caplog) -> None:
    model = FunctionalModel(Branching(), network.model.outputs, CrossEntropy())
    batch = model.batch(network.train)
    with pytest.raises(RuntimeError):
        batch_gradients(model, batch, "vmap")
    with caplog.at_level(logging.INFO, "posttrain"):
        result = batch_gradients(model, batch)
    assert "a record at a time" in caplog.text
    torch.testing.assert_close(result, batch_gradients(model, batch, "loop"))


def test_an_error_of_the_loss_itself_is_raised(network) -> None:
    def broken(outputs: Tensor, batch: Batch) -> Tensor:
        raise ValueError("broken loss")

    model = FunctionalModel(network.model.module, network.model.outputs, broken)
    with pytest.raises(ValueError, match="broken loss"):
        batch_gradients(model, model.batch(network.train))


def test_losses_equal_those_of_the_records(network) -> None:
    expected = nn.functional.cross_entropy(network.model.module(network.x), network.y, reduction="none")
    result = network.model.losses_at(network.model.parameters, network.model.batch(network.train))
    torch.testing.assert_close(result.detach(), expected.detach())


def test_a_functional_model_keeps_its_parameters_when_training_continues(network) -> None:
    before = all_gradients(network.model, network.train)
    key = network.model.key
    with torch.no_grad():
        network.model.module[0].weight.add_(1)
    torch.testing.assert_close(all_gradients(network.model, network.train), before)
    changed = FunctionalModel(network.model.module, network.model.outputs, CrossEntropy())
    assert changed.key != key
    assert changed.at(network.model.parameters).key == key


def test_unusable_records_and_parameters_are_refused(network) -> None:
    model = network.model
    with pytest.raises(UserError, match="no records"):
        next(record_gradients(model, []))
    with pytest.raises(UserError, match="at least one record"):
        next(record_gradients(model, network.train, block_size=0))
    with pytest.raises(UserError, match=r"record 2: the gradient .* not finite"):
        list(record_gradients(model, [*network.train[:2], (network.x[2] * torch.nan, network.y[2])], block_size=2))
    with pytest.raises(UserError, match=r"lacks 1 parameters, the first is 2\.bias"):
        model.at({name: value for name, value in model.parameters.items() if name != "2.bias"})
    with pytest.raises(UserError, match="not those of the model"):
        model.at({name: value.flatten() for name, value in model.parameters.items()})
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match="no parameter"):
        FunctionalModel(model.module, model.outputs, model.losses)
