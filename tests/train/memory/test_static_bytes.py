"""Bytes of weights, masters, gradients, optimizer state and snapshots against a real training."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.train.checkpoint.config import CheckpointConfig
from posttrain.train.config import TrainConfig
from posttrain.train.lora_config import LoraConfig
from posttrain.train.memory.weights import (
    ModelSpec,
    master_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    snapshot_bytes,
)
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.master_weights import MasterWeights

Model = Callable[..., LanguageModel]


def bytes_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def test_bytes_of_weights_masters_and_gradients(train_config: TrainConfig, model: Model) -> None:
    lm = model("llama", train_config)
    spec = ModelSpec.from_model(lm.model)
    masters = MasterWeights(lm.model, train_config.optimizer)
    assert parameter_bytes(spec, train_config) == bytes_of(lm.model.parameters())
    copies = [master for weight, master in zip(masters.weights, masters.masters, strict=True) if weight is not master]
    assert master_bytes(spec, train_config) == bytes_of(copies)
    assert 4 * spec.count(trained=True) == bytes_of(master.grad for master in masters.masters)
    masters.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "sgd", "adam8bit"])
def test_bytes_of_the_optimizer_state(name: str, model: Model) -> None:
    optimizer = OptimizerConfig(name=name)  # type: ignore[arg-type]
    config = TrainConfig(precision="bfloat16", optimizer=optimizer)
    lm = model("llama", config, intermediate_size=192)
    spec = ModelSpec.from_model(lm.model)
    masters = MasterWeights(lm.model, optimizer)
    for master in masters.masters:
        assert master.grad is not None
        master.grad.fill_(0.1)
    with torch.compiler.set_stance("force_eager"):  # torchao's compiled step has the same state, a minute later
        masters.step(1e-3)
    saved_tensors = {key: value for key, value in masters.tensors().items() if not key.startswith("master.")}
    # Step counters and torchao's tables of the 256 values of a byte are negligible.
    state = [value for key, value in saved_tensors.items() if value.ndim and ":qmap" not in key]
    assert optimizer_state_bytes(spec, optimizer) == bytes_of(state)
    assert snapshot_bytes(spec, config) == bytes_of(state) + bytes_of(masters.masters)
    masters.close()


def test_only_background_checkpoints_need_a_snapshot(model: Model) -> None:
    spec = ModelSpec.from_model(model("llama", TrainConfig(precision="bfloat16")).model)
    for checkpoint in (CheckpointConfig(background=False), CheckpointConfig(every_seconds=None)):
        assert snapshot_bytes(spec, TrainConfig(precision="bfloat16", checkpoint=checkpoint)) == 0
    assert snapshot_bytes(spec, TrainConfig(precision="bfloat16")) == 12 * spec.count()


def test_the_table_counts_weights_by_kind(model: Model) -> None:
    full_spec = ModelSpec.from_model(model("llama", TrainConfig(precision="bfloat16"), tie_word_embeddings=False).model)
    layer_count = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
    assert full_spec.table() == {
        "embedding": 300 * 64,
        "matrix": 2 * layer_count,
        "norm": 5 * 64,
        "head": 300 * 64,
        "adapter": 0,
        "trained": full_spec.count(),
    }
    lora = TrainConfig(precision="bfloat16", method="lora", lora=LoraConfig(rank=4))
    adapted_lm = model("llama", lora)
    table = ModelSpec.from_model(adapted_lm.model).table()
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 160), (64, 160), (160, 64)]
    assert table["adapter"] == table["trained"] == 2 * sum(4 * (inputs + outputs) for inputs, outputs in shapes)
    assert table["matrix"] == 2 * layer_count


def test_the_spec_of_a_config_is_that_of_the_model(train_config: TrainConfig, model: Model) -> None:
    lm = model("llama", train_config)
    config: Any = lm.model.config
    before = torch.get_rng_state()
    assert ModelSpec.from_config(config, train_config) == ModelSpec.from_model(lm.model)
    assert torch.equal(torch.get_rng_state(), before)


def test_lora_targets_that_match_nothing_are_refused(model: Model) -> None:
    from posttrain.store.errors import UserError

    lm = model("llama", TrainConfig(precision="bfloat16"))
    lora = TrainConfig(precision="bfloat16", method="lora", lora=LoraConfig(targets=["nowhere"]))
    with pytest.raises(UserError, match=r"train\.lora\.targets"):
        ModelSpec.from_config(lm.model.config, lora)
