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

Copies = Callable[[nn.Module], list[NamedParameter]]
Reference = Callable[[NamedParameter, float], Optimizer]

BETAS, EPS = (0.8, 0.97), 1e-6


def adamw(one: NamedParameter, decay: float) -> Optimizer:
    return AdamW([one.tensor], betas=BETAS, eps=EPS, weight_decay=decay, fused=True)


def adafactor(one: NamedParameter, decay: float) -> Optimizer:
    return Adafactor([one.tensor], beta2_decay=-0.7, d=2.0, weight_decay=decay)


def muon(one: NamedParameter, decay: float) -> Optimizer:
    if one.kind != "matrix":
        return adamw(one, decay)
    return Muon([one.tensor], weight_decay=decay, momentum=0.9, ns_steps=4, adjust_lr_fn="match_rms_adamw")


def sgd(one: NamedParameter, decay: float) -> Optimizer:
    return SGD([one.tensor], momentum=0.9, nesterov=True, weight_decay=decay)


def plain_sgd(one: NamedParameter, decay: float) -> Optimizer:
    return SGD([one.tensor], weight_decay=decay)


def adam8bit(one: NamedParameter, decay: float) -> Optimizer:
    if one.kind not in ("matrix", "head"):
        return adamw(one, decay)
    from torchao.optim import AdamW8bit

    reference: Optimizer = AdamW8bit([one.tensor], betas=BETAS, eps=EPS, weight_decay=decay)
    return reference


CASES: list[tuple[dict[str, Any], Reference]] = [
    ({"name": "adamw"}, adamw),
    ({"name": "adafactor", "adafactor": {"beta2_decay": -0.7, "clip_threshold": 2.0}}, adafactor),
    ({"name": "muon", "momentum": 0.9, "muon": {"iterations": 4}}, muon),
    ({"name": "sgd", "momentum": 0.9}, sgd),
    ({"name": "sgd", "momentum": 0.0}, plain_sgd),
    ({"name": "adam8bit"}, adam8bit),
]


def set_gradients(named: Sequence[NamedParameter], step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for item in named:
        item.tensor.grad = torch.randn(item.tensor.shape, generator=random) * 10.0 ** (step % 3 - 1)


def set_rates(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize(("settings", "reference"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_it_is_the_librarys_optimizer_bit_for_bit(
    model: str, settings: dict[str, Any], reference: Reference, copies: Copies, request: pytest.FixtureRequest
) -> None:
    module = request.getfixturevalue(model)
    ours, theirs = copies(module), copies(module)
    config = OptimizerConfig.read(
        {"betas": BETAS, "eps": EPS, "weight_decay": 0.1, "layer_decay": 0.5, **settings}, "test"
    )
    scales = {"embedding": 0.125, 0: 0.25, 1: 0.5, None: 1.0}
    # One optimiser a tensor, so that a mistake in the grouping cannot be in both.
    each = [reference(first, 0.1 if first.kind in ("matrix", "head") else 0.0) for first in theirs]
    optimizer = build_optimizer(ours, config)
    assert isinstance(optimizer, Optimizer)
    before = [first.tensor.clone() for first in ours]
    for step, rate in enumerate([1e-2, 3e-2, 0.0, 1e-3]):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        set_rates(optimizer, rate)
        optimizer.step()
        for first, single in zip(theirs, each, strict=True):
            value = rate * scales["embedding" if first.kind == "embedding" else first.depth]
            now = single.param_groups[0]["lr"]
            single.param_groups[0]["lr"] = torch.tensor(value) if isinstance(now, Tensor) else value
            single.step()
    for mine, other, old in zip(ours, theirs, before, strict=True):
        assert torch.equal(mine.tensor, other.tensor), mine.name
        assert not torch.equal(mine.tensor, old), mine.name


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reference"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_the_rate_starts_at_zero(
    settings: dict[str, Any], reference: Reference, gpt2: nn.Module, copies: Copies
) -> None:
    named = copies(gpt2)
    optimizer = build_optimizer(named, OptimizerConfig.read(settings, "test"))
    set_gradients(named, 0)
    optimizer.step()
    for first, other in zip(named, copies(gpt2), strict=True):
        assert torch.equal(first.tensor, other.tensor), first.name


def test_muons_matrices_have_a_rate_of_their_own(gpt2: nn.Module, copies: Copies) -> None:
    named = copies(gpt2)
    config = OptimizerConfig.read({"name": "muon", "layer_decay": 0.5, "muon": {"rate_scale": 20.0}}, "test")
    optimizer = build_optimizer(named, config)
    scales = {name: group["lr_scale"] for group in optimizer.param_groups for name in group["param_names"]}
    for item in named:
        below = {-1: 3, 0: 2, 1: 1, None: 0}[item.depth]
        assert scales[item.name] == (20.0 if item.kind == "matrix" else 1.0) * 0.5**below, item.name


def test_muon_takes_hidden_matrices_only(gpt2: nn.Module, copies: Copies) -> None:
    named = [*copies(gpt2), NamedParameter("h.0.experts", torch.ones(2, 3, 3), "matrix", 0)]
    optimizer = build_optimizer(named, OptimizerConfig(name="muon"))
    set_gradients(named, 0)
    optimizer.step()
    for item in named:
        keys = (
            {"momentum_buffer"}
            if item.kind == "matrix" and item.tensor.ndim == 2
            else {"step", "exp_avg", "exp_avg_sq"}
        )
        assert set(optimizer.state[item.tensor]) == keys, item.name


def test_parts_follow_torchs_own_state_dict(gpt2: nn.Module, copies: Copies) -> None:
    ours, fresh = copies(gpt2), copies(gpt2)
    config = OptimizerConfig(name="muon")
    optimizer, other = build_optimizer(ours, config), build_optimizer(fresh, config)
    for step in range(6):
        if step == 3:
            for mine, its in zip(ours, fresh, strict=True):
                its.tensor.copy_(mine.tensor)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares what it is given
        for named, item in ((ours, optimizer), (fresh, other)):
            set_gradients(named, step)
            set_rates(item, 1e-2)
            if step >= 3 or item is optimizer:
                item.step()
    assert isinstance(other, CombinedOptimizer)
    assert all(part.state is other.state for part in other.parts)
    for mine, its in zip(ours, fresh, strict=True):
        assert torch.equal(mine.tensor, its.tensor), mine.name


def test_a_closure_is_called_once_with_gradients() -> None:
    weight, bias = torch.ones(2, 2), torch.ones(2)
    optimizer = build_optimizer(
        [NamedParameter("w", weight, "matrix", 0), NamedParameter("b", bias, "bias", 0)], OptimizerConfig(name="muon")
    )
    seen = []

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert seen == [True]
    weight.grad = torch.ones(2, 2)
    optimizer.zero_grad()
    assert weight.grad is None


def test_nothing_to_train() -> None:
    with pytest.raises(UserError, match=r"^train: there is no parameter to train$"):
        build_optimizer([], OptimizerConfig())


@pytest.mark.parametrize("name", ["muon", "adam8bit"])
def test_no_matrices(name: Any) -> None:
    named = [NamedParameter("e", torch.zeros(4, 4), "embedding", None), NamedParameter("n", torch.zeros(4), "norm", 0)]
    with pytest.raises(UserError, match=rf"^train.optimizer.name: {name} is for weight matrices, .*; use adamw$"):
        build_optimizer(named, OptimizerConfig(name=name))


def test_adam8bit_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"^train.optimizer.name: adam8bit needs .*; pip install torchao$") as caught:
        build_optimizer([NamedParameter("w", torch.zeros(4, 4), "matrix", 0)], OptimizerConfig(name="adam8bit"))
    assert "\n" not in str(caught.value)


class _Torchao:
    AdamW8bit = None


@pytest.mark.parametrize(
    ("device", "message"), [("meta", "does not run on `meta`"), ("cpu", "on a CPU needs a C\\+\\+ compiler")]
)
def test_adam8bit_where_it_cannot_run(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", _Torchao)
    monkeypatch.setitem(sys.modules, "torchao.optim", _Torchao)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=rf"^train.optimizer.name: adam8bit {message}; .*adafactor"):
        build_optimizer(
            [NamedParameter("w", torch.zeros(4, 4, device=device), "matrix", 0)], OptimizerConfig(name="adam8bit")
        )
