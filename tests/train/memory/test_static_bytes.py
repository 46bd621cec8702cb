"""Weights, masters, gradients, optimisers' state and checkpoints against those of a real training."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import LoraConfig, TrainConfig
from posttrain.train.memory.weights import (
    ModelSpec,
    gradient_bytes,
    master_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    snapshot_bytes,
    step_bytes,
)
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.master_weights import MasterWeights

Model = Callable[..., LanguageModel]


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def test_weights_masters_and_sums(trained: TrainConfig, model: Model) -> None:
    lm = model("llama", trained)
    blueprint = ModelSpec.of_model(lm.model)
    masters = MasterWeights(lm.model, trained.optimizer)
    assert parameter_bytes(blueprint, trained) == bytes_of(lm.model.parameters())
    copies = [master for weight, master in zip(masters.weights, masters.masters, strict=True) if weight is not master]
    assert master_bytes(blueprint, trained) == bytes_of(copies)
    assert gradient_bytes(blueprint) == bytes_of(master.grad for master in masters.masters)
    masters.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd", "plain sgd", "adam8bit"])
def test_what_optimisers_remember(name: str, model: Model) -> None:
    optimizer = OptimizerConfig(name="sgd", momentum=0.0) if name == "plain sgd" else OptimizerConfig(name=name)  # type: ignore[arg-type]
    config = TrainConfig(optimizer=optimizer)
    lm = model("llama", config, intermediate_size=192)
    blueprint = ModelSpec.of_model(lm.model)
    masters = MasterWeights(lm.model, optimizer)
    for master in masters.masters:
        assert master.grad is not None
        master.grad.fill_(0.1)
    masters.step(1e-3)
    held = {key: value for key, value in masters.tensors().items() if not key.startswith("master.")}
    # Step counters, and torchao's tables of the 256 values that a byte stands for, are of no weight.
    state = [value for key, value in held.items() if value.ndim and ":qmap" not in key]
    assert optimizer_state_bytes(blueprint, optimizer) == bytes_of(state)
    assert snapshot_bytes(blueprint, config) == bytes_of(state) + bytes_of(masters.masters)
    masters.close()


def test_only_checkpoints_in_the_background_are_copied(model: Model) -> None:
    blueprint = ModelSpec.of_model(model("llama", TrainConfig()).model)
    for checkpoint in (CheckpointConfig(background=False), CheckpointConfig(every_seconds=None)):
        assert snapshot_bytes(blueprint, TrainConfig(checkpoint=checkpoint)) == 0
    assert snapshot_bytes(blueprint, TrainConfig()) == 12 * blueprint.count()


@pytest.mark.parametrize(("name", "numbers"), [("adamw", 0), ("adafactor", 4), ("sgd", 8)])
def test_what_a_step_works_with(name: str, numbers: int, model: Model) -> None:
    optimizer = OptimizerConfig(name=name)  # type: ignore[arg-type]
    blueprint = ModelSpec.of_model(model("llama", TrainConfig(optimizer=optimizer)).model)
    assert step_bytes(blueprint, optimizer) == numbers * 300 * 64  # the largest weight is the embedding


def test_the_table_of_weights(model: Model) -> None:
    full = ModelSpec.of_model(model("llama", TrainConfig(), tie_word_embeddings=False).model)
    a_layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
    assert full.table() == {
        "embedding": 300 * 64,
        "matrix": 2 * a_layer,
        "norm": 5 * 64,
        "head": 300 * 64,
        "adapter": 0,
        "trained": full.count(),
    }
    assert full.count("matrix", "norm") == 2 * a_layer + 5 * 64
    lora = TrainConfig(method="lora", lora=LoraConfig(rank=4))
    adapted = model("llama", lora)
    table = ModelSpec.of_model(adapted.model).table()
    ends = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    assert table["adapter"] == table["trained"] == 2 * sum(4 * (into + out) for into, out in ends)
    assert table["matrix"] == 2 * a_layer


def test_a_config_says_the_same_as_the_model(trained: TrainConfig, model: Model) -> None:
    lm = model("llama", trained)
    config: Any = lm.model.config
    before = torch.get_rng_state()
    assert ModelSpec.of(config, trained) == ModelSpec.of_model(lm.model)
    assert torch.equal(torch.get_rng_state(), before)


def test_adapters_that_fit_nothing_are_one_line(model: Model) -> None:
    from posttrain.store.errors import UserError

    lm = model("llama", TrainConfig())
    lora = TrainConfig(method="lora", lora=LoraConfig(targets=["nowhere"]))
    with pytest.raises(UserError, match=r"train\.lora\.targets"):
        ModelSpec.of(lm.model.config, lora)
