from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.store.errors import UserError
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.optimizers import _STATE_KEYS, OptimizerState, build_optimizer
from posttrain.train.optim.parameter_groups import NamedParameter

pytestmark = pytest.mark.slow

CopyParameters = Callable[[nn.Module], list[NamedParameter]]

OPTIMIZERS = ["adamw", "adafactor", "muon", "adam8bit", "sgd"]
LATE = "transformer.h.1.mlp.c_fc.weight"


def run_steps(parameters: Sequence[NamedParameter], state: OptimizerState, numbers: range) -> None:
    """Optimiser steps with gradients that depend on the step alone; one matrix has none before step 5."""
    for step in numbers:
        random = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.tensor.shape, generator=random)
            parameter.tensor.grad = None if parameter.name == LATE and step < 5 else gradient
        for group in state.optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        state.optimizer.step()


def config_of(name: str) -> OptimizerConfig:
    return OptimizerConfig.read({"name": name}, "test")


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("killed_at", [0, 3, 6])
def test_a_resumed_optimizer_is_equal_bit_for_bit(
    name: str, killed_at: int, gpt2: nn.Module, copy_parameters: CopyParameters, tmp_path: Path
) -> None:
    config = config_of(name)
    uninterrupted_parameters = copy_parameters(gpt2)
    uninterrupted = OptimizerState(build_optimizer(uninterrupted_parameters, config))
    run_steps(uninterrupted_parameters, uninterrupted, range(8))

    first_parameters = copy_parameters(gpt2)
    first_state = OptimizerState(build_optimizer(first_parameters, config))
    run_steps(first_parameters, first_state, range(killed_at))
    save_file({key: tensor.contiguous() for key, tensor in first_state.tensors().items()}, tmp_path / "state")
    resumed_parameters = [
        NamedParameter(item.name, item.tensor.clone(), item.kind, item.depth) for item in first_parameters
    ]
    resumed_state = OptimizerState(build_optimizer(resumed_parameters, config))
    resumed_state.load(load_file(tmp_path / "state"))
    run_steps(resumed_parameters, resumed_state, range(killed_at, 8))

    for expected, actual in zip(uninterrupted_parameters, resumed_parameters, strict=True):
        assert torch.equal(expected.tensor, actual.tensor), expected.name
    expected_state, actual_state = uninterrupted.tensors(), resumed_state.tensors()
    assert actual_state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert actual_state[key].dtype == value.dtype, key
        assert torch.equal(actual_state[key], value), key


@pytest.mark.parametrize(
    ("name", "matrix", "vector"),
    [
        ("adamw", {"step", "exp_avg", "exp_avg_sq"}, {"step", "exp_avg", "exp_avg_sq"}),
        ("adafactor", {"step", "row_var", "col_var"}, {"step", "variance"}),
        ("muon", {"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}),
        ("sgd", set(), set()),
    ],
)
def test_names_and_shapes_of_the_state(
    name: str, matrix: set[str], vector: set[str], gpt2: nn.Module, copy_parameters: CopyParameters
) -> None:
    parameters = copy_parameters(gpt2)
    state = OptimizerState(build_optimizer(parameters, config_of(name)))
    assert state.tensors() == {}
    run_steps(parameters, state, range(2))
    result = state.tensors()
    weight, norm = "transformer.h.0.mlp.c_fc.weight", "transformer.h.0.ln_1.weight"
    assert {key.partition(".")[0] for key in result if key.endswith(weight)} == matrix
    assert {key.partition(".")[0] for key in result if key.endswith(norm)} == vector
    assert not any(key.endswith(LATE) for key in result), "it had no gradient yet"
    for parameter in parameters:
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            assert result.get(f"{key}.{parameter.name}", parameter.tensor).shape == parameter.tensor.shape


def test_8_bit_moments_are_saved_in_8_bits(gpt2: nn.Module, copy_parameters: CopyParameters) -> None:
    parameters = copy_parameters(gpt2)
    state = OptimizerState(build_optimizer(parameters, config_of("adam8bit")))
    run_steps(parameters, state, range(1))
    weight = "transformer.h.0.mlp.c_proj.weight"
    result = state.tensors()
    assert result[f"exp_avg:codes.{weight}"].dtype == torch.uint8
    assert result[f"exp_avg:codes.{weight}"].shape == (128, 32)
    assert all(type(tensor) is Tensor for tensor in result.values())
    assert result["exp_avg.transformer.wte.weight"].dtype == torch.float32, "embeddings keep 32 bits"
    state.load(result)
    matrix = next(parameter.tensor for parameter in parameters if parameter.name == weight)
    assert [state.optimizer.state[matrix][key].signed for key in ("exp_avg", "exp_avg_sq")] == [True, False]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_do_not_change_the_loaded_state(name: str, gpt2: nn.Module, copy_parameters: CopyParameters) -> None:
    config, parameters = config_of(name), copy_parameters(gpt2)
    state = OptimizerState(build_optimizer(parameters, config))
    run_steps(parameters, state, range(2))
    loaded = clones(state.tensors())
    original = clones(loaded)
    resumed_parameters = copy_parameters(gpt2)
    resumed = OptimizerState(build_optimizer(resumed_parameters, config))
    resumed.load(loaded)
    run_steps(resumed_parameters, resumed, range(2, 4))
    assert all(torch.equal(loaded[key], original[key]) for key in original)
    assert not original or not all(torch.equal(resumed.tensors()[key], original[key]) for key in original)


def test_load_replaces_the_whole_state(gpt2: nn.Module, copy_parameters: CopyParameters) -> None:
    parameters = copy_parameters(gpt2)
    state = OptimizerState(build_optimizer(parameters, config_of("muon")))
    run_steps(parameters, state, range(6))
    assert f"momentum_buffer.{LATE}" in state.tensors()
    remaining = {key: tensor.clone() for key, tensor in state.tensors().items() if not key.endswith(LATE)}
    state.load(remaining)
    assert state.tensors().keys() == remaining.keys()
    state.load({})
    assert state.tensors() == {}


class _NumberState(torch.optim.Optimizer):
    """Keeps numbers in its state, and not only tensors."""

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


def test_numbers_load_with_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_STATE_KEYS, "_NumberState", {"count", "mean", "warm", "single"})
    weight = torch.zeros(2, 2)
    state = OptimizerState(_NumberState(weight))
    state.optimizer.step()
    tensors = state.tensors()
    assert tensors["count.weight"].item() == 2**40 + 1
    assert "nothing.weight" not in tensors
    resumed = OptimizerState(_NumberState(weight))
    resumed.load(tensors)
    result = resumed.optimizer.state[weight]
    assert (result["count"], result["mean"], result["warm"]) == (2**40 + 1, 0.1, True)
    assert [type(result[key]) for key in ("count", "mean", "warm", "single")] == [int, float, bool, Tensor]


# adam8bit accepts adamw's moments: those of small tensors have 32 bits in both. sgd has nothing to save.
PAIRS = [
    (saved, loaded)
    for saved in OPTIMIZERS
    for loaded in OPTIMIZERS
    if saved not in ("sgd", loaded) and (saved, loaded) != ("adamw", "adam8bit")
]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_another_optimizers_state_is_refused(
    saved: str, loaded: str, gpt2: nn.Module, copy_parameters: CopyParameters
) -> None:
    source_parameters, target_parameters = copy_parameters(gpt2), copy_parameters(gpt2)
    source, target = (
        OptimizerState(build_optimizer(source_parameters, config_of(saved))),
        OptimizerState(build_optimizer(target_parameters, config_of(loaded))),
    )
    run_steps(source_parameters, source, range(1))
    run_steps(target_parameters, target, range(1))
    original = clones(target.tensors())
    with pytest.raises(
        UserError, match=r"^the saved optimiser state `\S+` is not this optimiser's: \w+ keeps no "
    ) as caught:
        target.load(source.tensors())
    assert "\n" not in str(caught.value)
    assert all(torch.equal(target.tensors()[key], original[key]) for key in original)


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
