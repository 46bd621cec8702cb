import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.optimizers import CombinedOptimizer, build_optimizer
from posttrain.train.optim.parameter_groups import NamedParameter

CopyParameters = Callable[[nn.Module], list[NamedParameter]]
Reference = Callable[[NamedParameter, float], Optimizer]

BETAS = (0.8, 0.97)


def adamw(parameter: NamedParameter, decay: float) -> Optimizer:
    return AdamW([parameter.tensor], betas=BETAS, weight_decay=decay, fused=True)


def adafactor(parameter: NamedParameter, decay: float) -> Optimizer:
    return Adafactor([parameter.tensor], weight_decay=decay)


def muon(parameter: NamedParameter, decay: float) -> Optimizer:
    if parameter.kind != "matrix":
        return adamw(parameter, decay)
    return Muon([parameter.tensor], weight_decay=decay, adjust_lr_fn="match_rms_adamw")


def sgd(parameter: NamedParameter, decay: float) -> Optimizer:
    return SGD([parameter.tensor], weight_decay=decay)


def adam8bit(parameter: NamedParameter, decay: float) -> Optimizer:
    if parameter.kind not in ("matrix", "head"):
        return adamw(parameter, decay)
    from torchao.optim import AdamW8bit

    reference: Optimizer = AdamW8bit([parameter.tensor], betas=BETAS, weight_decay=decay)
    return reference


CASES: list[Reference] = [adamw, adafactor, muon, sgd, adam8bit]


def set_gradients(parameters: Sequence[NamedParameter], step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.tensor.grad = torch.randn(parameter.tensor.shape, generator=random) * 10.0 ** (step % 3 - 1)


def set_rates(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("reference", CASES)
def test_steps_are_those_of_the_librarys_optimizer(
    model: str,
    reference: Reference,
    copy_parameters: CopyParameters,
    request: pytest.FixtureRequest,
) -> None:
    module = request.getfixturevalue(model)
    actual, expected = copy_parameters(module), copy_parameters(module)
    config = OptimizerConfig.read({"name": reference.__name__, "betas": BETAS, "weight_decay": 0.1}, "test")
    # One optimiser for each tensor, so that the reference has no grouping to get wrong.
    references = [reference(parameter, 0.1 if parameter.kind in ("matrix", "head") else 0.0) for parameter in expected]
    optimizer = build_optimizer(actual, config)
    assert isinstance(optimizer, Optimizer)
    originals = [parameter.tensor.clone() for parameter in actual]
    for step, rate in enumerate([1e-2, 3e-2, 0.0, 1e-3]):
        set_gradients(actual, step)
        set_gradients(expected, step)
        set_rates(optimizer, rate)
        optimizer.step()
        for reference_optimizer in references:
            lr = reference_optimizer.param_groups[0]["lr"]
            reference_optimizer.param_groups[0]["lr"] = torch.tensor(rate) if isinstance(lr, Tensor) else rate
            reference_optimizer.step()
    for actual_parameter, expected_parameter, original in zip(actual, expected, originals, strict=True):
        assert torch.equal(actual_parameter.tensor, expected_parameter.tensor), actual_parameter.name
        assert not torch.equal(actual_parameter.tensor, original), actual_parameter.name


@pytest.mark.slow
@pytest.mark.parametrize("reference", CASES)
def test_the_learning_rate_starts_at_zero(
    reference: Reference, gpt2: nn.Module, copy_parameters: CopyParameters
) -> None:
    parameters = copy_parameters(gpt2)
    optimizer = build_optimizer(parameters, OptimizerConfig.read({"name": reference.__name__}, "test"))
    set_gradients(parameters, 0)
    optimizer.step()
    for first, other in zip(parameters, copy_parameters(gpt2), strict=True):
        assert torch.equal(first.tensor, other.tensor), first.name


def test_muon_is_only_for_hidden_matrices(gpt2: nn.Module, copy_parameters: CopyParameters) -> None:
    parameters = [*copy_parameters(gpt2), NamedParameter("h.0.experts", torch.ones(2, 3, 3), "matrix", 0)]
    optimizer = build_optimizer(parameters, OptimizerConfig(name="muon"))
    set_gradients(parameters, 0)
    optimizer.step()
    for parameter in parameters:
        keys = (
            {"momentum_buffer"}
            if parameter.kind == "matrix" and parameter.tensor.ndim == 2
            else {"step", "exp_avg", "exp_avg_sq"}
        )
        assert set(optimizer.state[parameter.tensor]) == keys, parameter.name


def test_a_combined_optimizer_loads_torchs_state_dict(gpt2: nn.Module, copy_parameters: CopyParameters) -> None:
    original_parameters, loaded_parameters = copy_parameters(gpt2), copy_parameters(gpt2)
    config = OptimizerConfig(name="muon")
    optimizer, loaded = build_optimizer(original_parameters, config), build_optimizer(loaded_parameters, config)
    for step in range(6):
        if step == 3:
            for original_parameter, loaded_parameter in zip(original_parameters, loaded_parameters, strict=True):
                loaded_parameter.tensor.copy_(original_parameter.tensor)
            loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors of the dict
        for parameters, each_optimizer in ((original_parameters, optimizer), (loaded_parameters, loaded)):
            set_gradients(parameters, step)
            set_rates(each_optimizer, 1e-2)
            if step >= 3 or each_optimizer is optimizer:
                each_optimizer.step()
    assert isinstance(loaded, CombinedOptimizer)
    assert all(part.state is loaded.state for part in loaded.parts)
    for original_parameter, loaded_parameter in zip(original_parameters, loaded_parameters, strict=True):
        assert torch.equal(original_parameter.tensor, loaded_parameter.tensor), original_parameter.name


def test_step_calls_the_closure_once_with_gradients() -> None:
    weight, bias = torch.ones(2, 2), torch.ones(2)
    optimizer = build_optimizer(
        [NamedParameter("w", weight, "matrix", 0), NamedParameter("b", bias, "bias", 0)], OptimizerConfig(name="muon")
    )
    grad_modes = []

    def closure() -> float:
        grad_modes.append(torch.is_grad_enabled())
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert grad_modes == [True]
    weight.grad = torch.ones(2, 2)
    optimizer.zero_grad()
    assert weight.grad is None


def test_no_parameters_to_train_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^train: there is no parameter to train$"):
        build_optimizer([], OptimizerConfig())


@pytest.mark.parametrize("name", ["muon", "adam8bit"])
def test_an_optimizer_for_matrices_needs_matrices(name: Any) -> None:
    parameters = [
        NamedParameter("e", torch.zeros(4, 4), "embedding", None),
        NamedParameter("n", torch.zeros(4), "norm", 0),
    ]
    with pytest.raises(UserError, match=rf"^train.optimizer.name: {name} is for weight matrices, .*; use adamw$"):
        build_optimizer(parameters, OptimizerConfig(name=name))


def test_adam8bit_without_torchao_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"^train.optimizer.name: adam8bit needs .*; .*pip install torchao$") as caught:
        build_optimizer([NamedParameter("w", torch.zeros(4, 4), "matrix", 0)], OptimizerConfig(name="adam8bit"))
    assert "\n" not in str(caught.value)


class _Torchao:
    AdamW8bit = None


@pytest.mark.parametrize(
    ("device", "message"), [("meta", "does not run on `meta`"), ("cpu", "on a CPU needs a C\\+\\+ compiler")]
)
def test_adam8bit_on_an_unsupported_device_is_refused(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", _Torchao)
    monkeypatch.setitem(sys.modules, "torchao.optim", _Torchao)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=rf"^train.optimizer.name: adam8bit {message}; .*adafactor"):
        build_optimizer(
            [NamedParameter("w", torch.zeros(4, 4, device=device), "matrix", 0)], OptimizerConfig(name="adam8bit")
        )
