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
from posttrain.train.memory.recompute import recompute, recomputed_layers

pytestmark = pytest.mark.slow

MODES = ["full", "50%"]


def read_config(mode: str, **settings: Any) -> TrainConfig:
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
    ("mode", "with_adapter"), [(mode, with_adapter) for mode in MODES for with_adapter in (False, True)]
)
def test_gradients_are_equal_bit_for_bit(
    fresh: Callable[..., LanguageModel], packed: Packed, mode: str, with_adapter: bool
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
    with recompute(lm, config) as count:
        assert count
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
    with recompute(lm, read_config("full")):
        actual = gradients(lm, packed)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    lm.model.eval()
    assert any(not torch.equal(expected[name], item) for name, item in gradients(lm, packed).items())


def test_a_share_of_the_layers_is_recomputed(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()

    def kept(mode: str) -> int:
        with fuse_layers(lm), recompute(lm, read_config(mode)):
            return saved_bytes(lm, packed)

    none, half, full = map(kept, ("none", "50%", "full"))
    assert none - half == pytest.approx(half - full, rel=0.02), "two layers alike"
    assert full < none / 4
    assert [recomputed_layers(read_config(f"{share}%"), 30) for share in (0, 1, 50, 100)] == [0, 1, 15, 30]
    for wrong in ("some", "-5%", "101%", "50"):
        with pytest.raises(UserError, match="recompute"):
            read_config(wrong)


def test_the_model_is_restored(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    original = layers[0].forward

    def custom_forward(*arguments: Any, **options: Any) -> Any:
        return original(*arguments, **options)

    layers[0].forward = custom_forward

    def fail() -> None:
        with recompute(lm, read_config("full")):
            assert layers[0].forward is not custom_forward
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert layers[0].forward is custom_forward
    assert not any("forward" in vars(module) for module in lm.model.modules() if module is not layers[0])
    with recompute(lm, TrainConfig()) as count:
        assert count == 0
        assert "forward" not in vars(layers[1])


def test_a_model_without_a_list_of_layers_is_refused(fresh: Callable[..., LanguageModel]) -> None:
    lm = fresh()
    lm.model.model.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(lm.model.model.layers)})
    with pytest.raises(UserError, match=r"no list of layers"), recompute(lm, read_config("full")):
        pass


def test_a_training_with_recomputation_is_the_same(
    fresh: Callable[..., LanguageModel], examples: list[TokenizedExample], config: TrainConfig, fit: Any, tmp_path: Path
) -> None:
    """The trainer enters `recompute`."""
    expected = [step.loss for step in fit(fresh(), examples, config, 5, tmp_path / "a")]
    for number, mode in enumerate(MODES):
        changed_config = config.model_copy(update={"recompute": mode})
        assert [step.loss for step in fit(fresh(), examples, changed_config, 5, tmp_path / str(number))] == expected
