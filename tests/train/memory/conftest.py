"""Small models of known families, micro-batches, and what autograd keeps of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.models.chat import TokenizedExample
from posttrain.models.fused import fuse_layers
from posttrain.models.head import predicting_states, token_log_probabilities
from posttrain.models.language_model import DTYPES, LanguageModel
from posttrain.models.packing import Packed, pack, packed_attention
from posttrain.train.config import LoraConfig, TrainConfig
from posttrain.train.lora import add_adapter


def packed_row(lengths: Sequence[int], vocabulary: int, supervised: int = 10) -> Packed:
    """Sequences that share no beginning, the last ``supervised`` tokens of each learned."""
    units = [
        [
            TokenizedExample(
                [(at * 7 + number * 31) % (vocabulary - 1) for at in range(length)],
                [at >= length - supervised for at in range(length)],
            )
        ]
        for number, length in enumerate(lengths)
    ]
    return pack(units)


@pytest.fixture
def row() -> Callable[..., Packed]:
    return packed_row


@pytest.fixture
def model(fresh: Callable[..., LanguageModel]) -> Callable[..., LanguageModel]:
    """``model(kind, config, layers=2)``: a random model of a family as the config has it trained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(kind: str, config: TrainConfig, layers: int = 2, **settings: Any) -> LanguageModel:
        common = {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        tiny = fresh()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(common | settings)))
            lm = LanguageModel(made.to(DTYPES[config.dtype]), tiny.tokenizer, tiny.task)
            if config.method == "lora":
                lm = add_adapter(lm, config.lora)
        lm.model.train()
        return lm

    return make


@contextmanager
def counted(lm: LanguageModel) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps meanwhile, by place; weights and buffers are left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*lm.model.parameters(), *lm.model.buffers())}
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # so that no place is used twice

    def pack_hook(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        yield kept


@pytest.fixture
def kept_bytes() -> Callable[..., int]:
    """``kept_bytes(lm, packed, config, condition)``: what a forward pass leaves for the backward pass."""

    def measure(
        lm: LanguageModel, packed: Packed, config: TrainConfig, condition: AbstractContextManager[Any] | None = None
    ) -> int:
        with fuse_layers(lm), packed_attention(lm, 500) as packs, counted(lm) as kept:
            assert packs
            kept.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "autocast"):
                if condition is None:
                    token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
                else:
                    with condition:
                        token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
            return sum(kept.values())

    return measure


CONFIGS = {
    "full bfloat16": TrainConfig(),
    "full float16": TrainConfig(precision="float16"),
    "full float32": TrainConfig(precision="float32"),
    "full autocast": TrainConfig(precision="autocast"),
    "lora bfloat16": TrainConfig(method="lora", lora=LoraConfig(rank=4)),
    "lora float16": TrainConfig(method="lora", precision="float16", lora=LoraConfig(rank=4)),
    "lora float32": TrainConfig(method="lora", precision="float32", lora=LoraConfig(rank=4)),
    "lora autocast": TrainConfig(method="lora", precision="autocast", lora=LoraConfig(rank=4)),
    "lora dropout": TrainConfig(method="lora", lora=LoraConfig(rank=4, dropout=0.1)),
    "lora queries": TrainConfig(method="lora", lora=LoraConfig(rank=4, targets=["q_proj", "down_proj"])),
}


@pytest.fixture(params=list(CONFIGS))
def trained(request: pytest.FixtureRequest) -> TrainConfig:
    """One way to train after the other."""
    return CONFIGS[request.param]
