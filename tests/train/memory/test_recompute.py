"""Activation checkpointing: equal gradients, fewer saved bytes, and a model that is restored afterwards."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.models.chat import TokenizedExample
from posttrain.models.fused import fuse_layers
from posttrain.models.head import predicting_states, token_log_probabilities
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Packed, pack, packed_attention
from posttrain.models.shape import decoder_layers
from posttrain.store.errors import UserError
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.memory.activations import layer_costs
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.recompute import layer_policies, recompute
from posttrain.train.memory.weights import ModelSpec

pytestmark = pytest.mark.slow

MODES = [{"mode": "full"}, *({"mode": "selective", "budget": f"{share}%"} for share in (80, 40, 5))]


def read_config(mode: dict[str, str], **settings: Any) -> TrainConfig:
    return TrainConfig.read({"recompute": mode, "precision": "float32", **settings}, "test")


@pytest.fixture
def packed(examples: list[TokenizedExample]) -> Packed:
    return pack([[example] for example in examples])


def gradients(lm: LanguageModel, packed: Packed) -> dict[str, torch.Tensor]:
    lm.model.zero_grad()
    torch.manual_seed(3)
    with packed_attention(lm, 500):
        token_log_probabilities(lm, predicting_states(lm, packed), packed.targets).sum().backward()
    return {name: item.grad.clone() for name, item in lm.model.named_parameters() if item.grad is not None}


def saved_bytes(lm: LanguageModel, packed: Packed) -> int:
    """Bytes that a forward pass holds: tensors that autograd saves, and those held for the recomputation."""

    def live_storages() -> dict[int, torch.UntypedStorage]:
        tensors = (item.untyped_storage() for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter))
        return {storage.data_ptr(): storage for storage in tensors}

    storages: dict[int, torch.UntypedStorage] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        return tensor

    with packed_attention(lm, 500):
        gc.collect()
        before = live_storages()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            result = token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
        storages |= live_storages()
        del result
    return sum(storage.nbytes() for address, storage in storages.items() if address not in before)


@pytest.mark.parametrize(
    ("mode", "with_adapter"), [*((mode, False) for mode in MODES), (MODES[0], True), (MODES[2], True)]
)
def test_gradients_are_equal_bit_for_bit(
    fresh: Callable[..., LanguageModel], packed: Packed, mode: dict[str, str], with_adapter: bool
) -> None:
    lm = fresh()
    if with_adapter:  # its dropout draws random numbers in every layer
        lm = add_adapter(lm, LoraConfig(rank=4, dropout=0.3))
        lm.model.train()
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.02)
    config = read_config(mode, method="lora" if with_adapter else "full")
    expected = gradients(lm, packed)
    assert any(bool(gradient.any()) for gradient in expected.values())
    full_bytes = saved_bytes(lm, packed)
    with recompute(lm, config, MicroBatch.from_packed(packed)) as policies:
        assert any(policy.parts for policy in policies)
        actual = gradients(lm, packed)
        reduced_bytes = saved_bytes(lm, packed)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, actual[name]), name
    assert reduced_bytes < full_bytes


def test_attention_dropout_repeats_its_random_numbers(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    for layer in layers:
        layer.self_attn.attention_dropout = 0.5
    expected = gradients(lm, packed)
    with recompute(lm, read_config({"mode": "full"}), MicroBatch.from_packed(packed)):
        actual = gradients(lm, packed)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    lm.model.eval()
    assert any(not torch.equal(expected[name], item) for name, item in gradients(lm, packed).items())


@pytest.mark.parametrize("mode", MODES)
def test_saved_bytes_are_those_of_the_policies(
    fresh: Callable[..., LanguageModel], packed: Packed, mode: dict[str, str]
) -> None:
    lm, config = fresh(), read_config(mode)
    batch = MicroBatch.from_packed(packed)
    costs = layer_costs(ModelSpec.from_model(lm.model), config, batch)
    with fuse_layers(lm):
        full_bytes = saved_bytes(lm, packed)
        with recompute(lm, config, batch) as policies:
            reduced_bytes = saved_bytes(lm, packed)
    assert policies == layer_policies(config, costs, 2)
    saving = sum(policy.saved for policy in policies)
    assert full_bytes - reduced_bytes == pytest.approx(saving, rel=0.02)
    if mode["mode"] == "selective":
        remaining = 2 * costs.whole.stored - saving
        assert remaining <= config.recompute.allowed(2 * costs.whole.stored) or all(
            policy.parts == {"layer"} for policy in policies
        )


def test_the_model_is_restored(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    original = layers[0].forward

    def custom_forward(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **options)

    layers[0].forward = custom_forward

    def fail() -> None:
        with recompute(lm, read_config({"mode": "full"}), MicroBatch.from_packed(packed)):
            assert layers[0].forward is not custom_forward
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert layers[0].forward is custom_forward
    assert not any("forward" in vars(module) for module in lm.model.modules() if module is not layers[0])
    with recompute(lm, TrainConfig(), MicroBatch.from_packed(packed)) as policies:
        assert policies == []
        assert "forward" not in vars(layers[1])


def test_an_unknown_feed_forward_block_is_recomputed_whole(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None

    class Doubled(type(layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    for layer in layers:
        layer.mlp.__class__ = Doubled
    expected = gradients(lm, packed)
    with recompute(lm, read_config({"mode": "selective", "budget": "60%"}), MicroBatch.from_packed(packed)) as policies:
        assert any("activation" in policy.parts for policy in policies)
        actual = gradients(lm, packed)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_layers_without_known_parts_are_refused(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    for layer in layers:
        layer.block = layer.mlp
        del layer.mlp
    config = read_config({"mode": "selective", "budget": "20%"})
    with (
        pytest.raises(UserError, match=r"train\.recompute\.mode: LlamaDecoderLayer has no module .* use full or none"),
        recompute(lm, config, MicroBatch.from_packed(packed)),
    ):
        pass


def test_a_training_with_recomputation_is_the_same(
    fresh: Callable[..., LanguageModel], examples: list[TokenizedExample], config: TrainConfig, fit: Any, tmp_path: Path
) -> None:
    """The trainer enters `recompute`."""
    expected = [step.loss for step in fit(fresh(), examples, config, 5, tmp_path / "a")]
    for number, mode in enumerate(({"mode": "full"}, {"mode": "selective", "budget": "40%"})):
        changed_config = config.model_copy(update={"recompute": read_config(mode).recompute})
        assert [step.loss for step in fit(fresh(), examples, changed_config, 5, tmp_path / str(number))] == expected
