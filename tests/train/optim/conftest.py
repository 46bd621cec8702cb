"""Two tiny models, and copies of their parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from posttrain.models.tiny import write_tiny_model
from posttrain.train.optim.parameter_groups import NamedParameter, parameter_locations

CopyParameters = Callable[[nn.Module], list[NamedParameter]]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Two layers, width 32, the head tied to the embedding."""
    from transformers import AutoModelForCausalLM

    folder = write_tiny_model(tmp_path_factory.mktemp("llama"), width=32)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.fixture(scope="session")
def gpt2() -> nn.Module:
    """Two layers, width 32, the head its own matrix."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=False)
    )


@pytest.fixture
def copy_parameters() -> CopyParameters:
    """``copy_parameters(model)``: copies of all its parameters, with names, kinds and depths."""

    def make(model: nn.Module) -> list[NamedParameter]:
        locations = parameter_locations(model)
        return [
            NamedParameter(name, weight.detach().clone(), *locations[name]) for name, weight in model.named_parameters()
        ]

    return make
