from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.optimizers import OptimizerState, build_optimizer
from posttrain.train.optim.parameter_groups import NamedParameter

pytestmark = pytest.mark.slow

Copies = Callable[[nn.Module], list[NamedParameter]]

OPTIMIZERS = ["adamw", "adafactor", "muon", "adam8bit", "sgd"]
LATE = "transformer.h.1.mlp.c_fc.weight"


def steps(named: Sequence[NamedParameter], state: OptimizerState, numbers: range) -> None:
    """Optimiser steps with gradients that depend on the step alone; one matrix has none before step 5."""
    for step in numbers:
        random = torch.Generator().manual_seed(step)
        for item in named:
            gradient = torch.randn(item.tensor.shape, generator=random)
            item.tensor.grad = None if item.name == LATE and step < 5 else gradient
        for group in state.optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1) * group["lr_scale"]
        state.optimizer.step()


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig.read({"name": name, "layer_decay": 0.8}, "test")


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("killed", [0, 3, 6])
def test_it_goes_on_where_it_was_bit_for_bit(
    name: str, killed: int, gpt2: nn.Module, copies: Copies, tmp_path: Path
) -> None:
    config = config_of(name)
    whole = copies(gpt2)
    uninterrupted = OptimizerState(build_optimizer(whole, config))
    steps(whole, uninterrupted, range(8))

    first = copies(gpt2)
    before = OptimizerState(build_optimizer(first, config))
    steps(first, before, range(killed))
    save_file({key: tensor.contiguous() for key, tensor in before.tensors().items()}, tmp_path / "state")
    second = [NamedParameter(item.name, item.tensor.clone(), item.kind, item.depth) for item in first]
    after = OptimizerState(build_optimizer(second, config))
    after.load(load_file(tmp_path / "state"))
    steps(second, after, range(killed, 8))

    for expected, actual in zip(whole, second, strict=True):
        assert torch.equal(expected.tensor, actual.tensor), expected.name
    expected_state, found_state = uninterrupted.tensors(), after.tensors()
    assert found_state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert found_state[key].dtype == value.dtype, key
        assert torch.equal(found_state[key], value), key


@pytest.mark.parametrize(
    ("name", "matrix", "vector"),
    [
        ("adamw", {"step", "exp_avg", "exp_avg_sq"}, {"step", "exp_avg", "exp_avg_sq"}),
        ("adafactor", {"step", "row_var", "col_var"}, {"step", "variance"}),
        ("muon", {"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}),
        ("sgd", {"momentum_buffer"}, {"momentum_buffer"}),
    ],
)
def test_names_and_shapes(name: str, matrix: set[str], vector: set[str], gpt2: nn.Module, copies: Copies) -> None:
    named = copies(gpt2)
    state = OptimizerState(build_optimizer(named, config_of(name)))
    assert state.tensors() == {}
    steps(named, state, range(2))
    result = state.tensors()
    weight, norm = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.ln_1.weight"
    assert {key.partition(".")[0] for key in result if key.endswith(weight)} == matrix
    assert {key.partition(".")[0] for key in result if key.endswith(norm)} == vector
    assert not any(key.endswith(LATE) for key in result), "it had no gradient yet"
    for item in named:
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            assert result.get(f"{key}.{item.name}", item.tensor).shape == item.tensor.shape


def test_moments_of_8_bits_are_saved_in_8_bits(gpt2: nn.Module, copies: Copies) -> None:
    named = copies(gpt2)
    state = OptimizerState(build_optimizer(named, config_of("adam8bit")))
    steps(named, state, range(1))
    weight = "transformer.h.0.mlp.c_proj.weight"
    result = state.tensors()
    assert result[f"exp_avg:codes.{weight}"].dtype == torch.uint8
    assert result[f"exp_avg:codes.{weight}"].shape == (128, 32)
    assert all(type(tensor) is Tensor for tensor in result.values())
    assert result["exp_avg.transformer.wte.weight"].dtype == torch.float32, "embeddings keep 32 bits"
    state.load(result)
    matrix = next(item.tensor for item in named if item.name == weight)
    assert [state.optimizer.state[matrix][key].signed for key in ("exp_avg", "exp_avg_sq")] == [True, False]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_loaded_is_not_changed_by_going_on(name: str, gpt2: nn.Module, copies: Copies) -> None:
    config, named = config_of(name), copies(gpt2)
    state = OptimizerState(build_optimizer(named, config))
    steps(named, state, range(2))
    given = clones(state.tensors())
    kept = clones(given)
    other = copies(gpt2)
    resumed = OptimizerState(build_optimizer(other, config))
    resumed.load(given)
    steps(other, resumed, range(2, 4))
    assert all(torch.equal(given[key], kept[key]) for key in kept)
    assert not all(torch.equal(resumed.tensors()[key], kept[key]) for key in kept)


def test_loading_forgets_what_was_there(gpt2: nn.Module, copies: Copies) -> None:
    named = copies(gpt2)
    state = OptimizerState(build_optimizer(named, config_of("muon")))
    steps(named, state, range(6))
    assert f"momentum_buffer.{LATE}" in state.tensors()
    kept = {key: tensor.clone() for key, tensor in state.tensors().items() if not key.endswith(LATE)}
    state.load(kept)
    assert state.tensors().keys() == kept.keys()
    state.load({})
    assert state.tensors() == {}


class _Numbers(torch.optim.Optimizer):
    """Remembers what tensors are not the only form of."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__([{"params": [("weight", tensor)]}], {})

    def step(self, closure: Any = None) -> None:
        self.state[self.param_groups[0]["params"][0]] = {
            "count": 2**40 + 1,
            "mean": 0.1,
            "warm": True,
            "nothing": None,
            "single": torch.tensor(0.1),
        }


def test_numbers_come_back_as_they_were() -> None:
    weight = torch.zeros(2, 2)
    state = OptimizerState(_Numbers(weight))
    state.optimizer.step()
    saved = state.tensors()
    assert saved["count.weight"].item() == 2**40 + 1
    assert "nothing.weight" not in saved
    resumed = OptimizerState(_Numbers(weight))
    resumed.load(saved)
    result = resumed.optimizer.state[weight]
    assert (result["count"], result["mean"], result["warm"]) == (2**40 + 1, 0.1, True)
    assert [type(result[key]) for key in ("count", "mean", "warm", "single")] == [int, float, bool, Tensor]


# adam8bit goes on from adamw's moments: those of small tensors have 32 bits in both.
OTHERS = [(a, b) for a in OPTIMIZERS for b in OPTIMIZERS if a != b and (a, b) != ("adamw", "adam8bit")]


@pytest.mark.parametrize(("saved", "loaded"), OTHERS)
def test_another_optimizers_state_is_refused(saved: str, loaded: str, gpt2: nn.Module, copies: Copies) -> None:
    named, other = copies(gpt2), copies(gpt2)
    source, target = (
        OptimizerState(build_optimizer(named, config_of(saved))),
        OptimizerState(build_optimizer(other, config_of(loaded))),
    )
    steps(named, source, range(1))
    steps(other, target, range(1))
    kept = clones(target.tensors())
    with pytest.raises(
        UserError, match=r"^the saved optimiser state `\S+` is not this optimiser's: \w+ keeps no "
    ) as e:
        target.load(source.tensors())
    assert "\n" not in str(e.value)
    assert all(torch.equal(target.tensors()[key], kept[key]) for key in kept)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"exp_avg.other": torch.zeros(4, 3)}, "`other` is not trained here"),
        ({"exp_avg.w": torch.zeros(3, 4)}, r"\(3, 4\) does not fit a parameter of \(4, 3\)"),
        ({"exp_avg.w": torch.zeros(4)}, r"\(4,\) does not fit a parameter of \(4, 3\)"),
    ],
)
def test_another_models_state_is_refused(tensors: dict[str, Tensor], message: str) -> None:
    state = OptimizerState(build_optimizer([NamedParameter("w", torch.zeros(4, 3), "matrix", 0)], OptimizerConfig()))
    with pytest.raises(UserError, match=message):
        state.load(tensors)
