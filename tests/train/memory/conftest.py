"""Small models of known families, micro-batches, and the bytes that autograd saves for them."""

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
from posttrain.train.config import TrainConfig
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig


def packed_row(lengths: Sequence[int], vocabulary: int, supervised: int = 10) -> Packed:
    """Sequences without a shared prefix; the last ``supervised`` tokens of each are learned."""
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
    """``model(kind, config, layers=2)``: a random model of a family, prepared for training with the config."""
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
            network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(common | settings)))
            lm = LanguageModel(network.to(DTYPES[config.dtype]), tiny.tokenizer, tiny.task)
            if config.method == "lora":
                lm = add_adapter(lm, config.lora)
        lm.model.train()
        return lm

    return make


@contextmanager
def count_saved_bytes(lm: LanguageModel) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves meanwhile, by address; weights and buffers are excluded."""
    parameter_storages = {
        tensor.untyped_storage().data_ptr() for tensor in (*lm.model.parameters(), *lm.model.buffers())
    }
    storage_bytes: dict[int, int] = {}
    tensors: list[Tensor] = []  # so that no address is reused

    def pack_hook(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            storage_bytes[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        yield storage_bytes


@pytest.fixture
def kept_bytes() -> Callable[..., int]:
    """``kept_bytes(lm, packed, config, condition)``: bytes that a forward pass saves for the backward pass."""

    def measure(
        lm: LanguageModel, packed: Packed, config: TrainConfig, condition: AbstractContextManager[Any] | None = None
    ) -> int:
        with fuse_layers(lm), packed_attention(lm, 500) as packs, count_saved_bytes(lm) as storage_bytes:
            assert packs
            storage_bytes.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "autocast"):
                if condition is None:
                    token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
                else:
                    with condition:
                        token_log_probabilities(lm, predicting_states(lm, packed), packed.targets)
            return sum(storage_bytes.values())

    return measure


CONFIGS = {
    "full bfloat16": TrainConfig(precision="bfloat16"),
    "full float16": TrainConfig(precision="float16"),
    "full float32": TrainConfig(precision="float32"),
    "full autocast": TrainConfig(precision="autocast"),
    "lora bfloat16": TrainConfig(precision="bfloat16", method="lora", lora=LoraConfig(rank=4)),
    "lora float16": TrainConfig(method="lora", precision="float16", lora=LoraConfig(rank=4)),
    "lora float32": TrainConfig(method="lora", precision="float32", lora=LoraConfig(rank=4)),
    "lora autocast": TrainConfig(method="lora", precision="autocast", lora=LoraConfig(rank=4)),
    "lora dropout": TrainConfig(precision="bfloat16", method="lora", lora=LoraConfig(rank=4, dropout=0.1)),
    "lora queries": TrainConfig(
        precision="bfloat16", method="lora", lora=LoraConfig(rank=4, targets=["q_proj", "down_proj"])
    ),
}


@pytest.fixture(params=list(CONFIGS))
def train_config(request: pytest.FixtureRequest) -> TrainConfig:
    """Each kind of training in turn."""
    return CONFIGS[request.param]
