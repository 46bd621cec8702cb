"""Convolutions with standardised weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.store.errors import UserError
from posttrain.train.regularization.layers import standardize_weights

Fresh = Callable[..., LanguageModel]
IDS = torch.arange(20)[None]


@pytest.fixture
def mamba(fresh: Fresh) -> LanguageModel:
    """A small Mamba, whose layers have a convolution each."""
    from transformers import MambaConfig, MambaForCausalLM

    tiny = fresh()
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=261,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=None,
    )
    return LanguageModel(MambaForCausalLM(config).float().train(), tiny.tokenizer, tiny.task)


def convolutions(lm: LanguageModel) -> list[Any]:
    return [module for module in lm.model.modules() if isinstance(module, nn.Conv1d)]


def standardize(weight: Tensor) -> Tensor:
    flat = weight.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / flat.std(1, correction=0, keepdim=True)).view_as(weight)


def test_the_model_computes_and_saves_standardised_weights(mamba: LanguageModel, tmp_path: Path) -> None:
    before = [convolution.weight.detach().clone() for convolution in convolutions(mamba)]
    names = {name for name, _ in mamba.model.named_parameters()}
    with standardize_weights(mamba):
        for convolution, weight in zip(convolutions(mamba), before, strict=True):
            torch.testing.assert_close(convolution.weight, standardize(weight), atol=1e-4, rtol=1e-4)
            assert float(convolution.weight[0].detach().mean()) == pytest.approx(0, abs=1e-6)
        logits = mamba.model(input_ids=IDS).logits
        (logits.square().mean()).backward()
        for convolution in convolutions(mamba):  # a filter's mean and norm have no effect
            raw = convolution.parametrizations.weight.original
            assert float(raw.grad.abs().max()) > 0
            torch.testing.assert_close(raw.grad.sum(-1), torch.zeros_like(raw.grad.sum(-1)), atol=1e-6, rtol=0)
            torch.testing.assert_close((raw.grad * raw).sum(-1), torch.zeros_like(raw.grad.sum(-1)), atol=1e-6, rtol=0)
    assert {name for name, _ in mamba.model.named_parameters()} == names
    torch.testing.assert_close(mamba.model(input_ids=IDS).logits, logits)
    save_language_model(mamba, tmp_path, "float32")
    loaded = load_language_model(tmp_path, mamba.task, "float32")
    torch.testing.assert_close(loaded.model(input_ids=IDS).logits, logits)


def test_a_filter_of_equal_weights_has_a_gradient(mamba: LanguageModel) -> None:
    first = convolutions(mamba)[0]
    with torch.no_grad():
        first.weight[0] = 0.25
    with standardize_weights(mamba):
        assert bool((first.weight[0] == 0).all())
        mamba.model(input_ids=IDS).logits.square().mean().backward()
        assert bool(first.parametrizations.weight.original.grad.isfinite().all())


def test_an_exception_restores_the_model(mamba: LanguageModel) -> None:
    with pytest.raises(KeyError), standardize_weights(mamba):
        raise KeyError
    assert all(type(convolution) is nn.Conv1d for convolution in convolutions(mamba))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_without_convolutions_is_refused(fresh: Fresh, kind: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    lm = fresh()
    if kind == "gpt2":  # its Conv1D is a linear layer
        config = GPT2Config(n_embd=32, n_layer=1, n_head=1, vocab_size=261)
        lm = LanguageModel(GPT2LMHeadModel(config), lm.tokenizer, lm.task)
    message = rf"train\.weight_standardization: {kind} has no convolution that is trained; set it to false"
    with pytest.raises(UserError, match=message), standardize_weights(lm):
        pass
