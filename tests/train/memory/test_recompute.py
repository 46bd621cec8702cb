"""Activation checkpointing: the same gradients, less kept, the model as it was."""

import gc
from collections.abc import Callable, Iterator
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
from posttrain.train.config import LoraConfig, TrainConfig
from posttrain.train.lora import add_adapter
from posttrain.train.memory.activations import layer_costs
from posttrain.train.memory.micro_batch import MicroBatch
from posttrain.train.memory.recompute import layer_policies, recompute
from posttrain.train.memory.weights import ModelSpec

pytestmark = pytest.mark.slow

MODES = [{"mode": "full"}, *({"mode": "selective", "budget": f"{share}%"} for share in (80, 60, 40, 20, 5))]


def read_config(mode: dict[str, str], **settings: Any) -> TrainConfig:
    return TrainConfig.read({"recompute": mode, "precision": "float32", **settings}, "test")


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """What is there already is passed over when objects are listed, or it takes seconds in a long run of tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def packed(examples: list[TokenizedExample]) -> Packed:
    return pack([[example] for example in examples])


def gradients(lm: LanguageModel, packed: Packed) -> dict[str, torch.Tensor]:
    lm.model.zero_grad()
    torch.manual_seed(3)
    with packed_attention(lm, 500):
        token_log_probabilities(lm, predicting_states(lm, packed), packed.targets).sum().backward()
    return {name: item.grad.clone() for name, item in lm.model.named_parameters() if item.grad is not None}


def kept(lm: LanguageModel, packed: Packed) -> int:
    """Bytes that a forward pass leaves: what autograd keeps, and what functions hold that are to run again."""

    def alive() -> dict[int, torch.UntypedStorage]:
        tensors = (item.untyped_storage() for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter))
        return {storage.data_ptr(): storage for storage in tensors}

    actual: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        actual.setdefault(storage.data_ptr(), storage)
        return tensor

    with packed_attention(lm, 500):
        gc.collect()
        before = alive()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
        actual |= alive()
        del result
    return sum(storage.nbytes() for place, storage in actual.items() if place not in before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_are_the_same_to_the_bit(
    fresh: Callable[..., LanguageModel], packed: Packed, mode: dict[str, str], adapted: bool
) -> None:
    lm = fresh()
    if adapted:  # its dropout draws random numbers in every layer
        lm = add_adapter(lm, LoraConfig(rank=4, dropout=0.3))
        lm.model.train()
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.02)
    config = read_config(mode, method="lora" if adapted else "full")
    plain = gradients(lm, packed)
    assert any(bool(gradient.any()) for gradient in plain.values())
    before = kept(lm, packed)
    with recompute(lm, config, MicroBatch.of(packed)) as chosen:
        assert any(way.parts for way in chosen)
        again = gradients(lm, packed)
        less = kept(lm, packed)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name
    assert less < before


def test_attention_dropout_is_drawn_again(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    for layer in layers:
        layer.self_attn.attention_dropout = 0.5
    plain = gradients(lm, packed)
    with recompute(lm, read_config({"mode": "full"}), MicroBatch.of(packed)):
        again = gradients(lm, packed)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    lm.model.eval()
    assert any(not torch.equal(plain[name], item) for name, item in gradients(lm, packed).items())


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_is_what_was_said(
    fresh: Callable[..., LanguageModel], packed: Packed, mode: dict[str, str]
) -> None:
    lm, config = fresh(), read_config(mode)
    batch = MicroBatch.of(packed)
    costs = layer_costs(ModelSpec.of_model(lm.model), config, batch)
    with fuse_layers(lm):
        before = kept(lm, packed)
        with recompute(lm, config, batch) as chosen:
            less = kept(lm, packed)
    assert chosen == layer_policies(config, costs, 2)
    saved = sum(way.saved for way in chosen)
    assert before - less == pytest.approx(saved, rel=0.02)
    if mode["mode"] == "selective":
        left = 2 * costs.whole.kept - saved
        assert left <= config.recompute.allowed(2 * costs.whole.kept) or all(w.parts == {"layer"} for w in chosen)


def test_the_model_is_left_as_it_was(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    own = layers[0].forward

    def mine(*arguments: Any, **options: Any) -> Any:
        return own(*arguments, **options)

    layers[0].forward = mine

    def fail() -> None:
        with recompute(lm, read_config({"mode": "full"}), MicroBatch.of(packed)):
            assert layers[0].forward is not mine
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert layers[0].forward is mine
    assert not any("forward" in vars(module) for module in lm.model.modules() if module is not layers[0])
    with recompute(lm, TrainConfig(), MicroBatch.of(packed)) as chosen:
        assert chosen == []
        assert "forward" not in vars(layers[1])


def test_a_feed_forward_block_of_another_kind_is_computed_again_whole(
    fresh: Callable[..., LanguageModel], packed: Packed
) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None

    class Doubled(type(layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    for layer in layers:
        layer.mlp.__class__ = Doubled
    plain = gradients(lm, packed)
    with recompute(lm, read_config({"mode": "selective", "budget": "60%"}), MicroBatch.of(packed)) as chosen:
        assert any("activation" in way.parts for way in chosen)
        again = gradients(lm, packed)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_layers_without_known_parts(fresh: Callable[..., LanguageModel], packed: Packed) -> None:
    lm = fresh()
    layers = decoder_layers(lm.model)
    assert layers is not None
    for layer in layers:
        layer.block = layer.mlp
        del layer.mlp
    config = read_config({"mode": "selective", "budget": "20%"})
    with (
        pytest.raises(UserError, match=r"train\.recompute\.mode: LlamaDecoderLayer has no module .* use full or none"),
        recompute(lm, config, MicroBatch.of(packed)),
    ):
        pass


def test_a_whole_training_is_the_same(
    fresh: Callable[..., LanguageModel], examples: list[TokenizedExample], config: TrainConfig, fit: Any, tmp_path: Path
) -> None:
    """Needs the trainer to enter `recompute`."""
    plain = [step.loss for step in fit(fresh(), examples, config, 5, tmp_path / "a")]
    for number, mode in enumerate(({"mode": "full"}, {"mode": "selective", "budget": "40%"})):
        changed = config.model_copy(update={"recompute": read_config(mode).recompute})
        assert [step.loss for step in fit(fresh(), examples, changed, 5, tmp_path / str(number))] == plain
