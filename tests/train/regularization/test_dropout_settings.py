"""Dropout given to a model that was made with another one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import pack, packed_attention
from posttrain.store.errors import UserError
from posttrain.train.config import LoraConfig
from posttrain.train.lora import add_adapter
from posttrain.train.regularization.config import DropoutConfig, NoiseConfig
from posttrain.train.regularization.dropout import apply_noise, set_dropout

Fresh = Callable[..., LanguageModel]
IDS = torch.arange(24)[None]
COMMON = {
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 256,
    "eos_token_id": 257,
    "bos_token_id": None,
}
FAMILIES: list[tuple[str, dict[str, Any], dict[str, tuple[str, ...]]]] = [
    ("llama", {}, {"attention": ("attention_dropout",)}),
    ("mistral", {}, {"attention": ("attention_dropout",)}),
    (
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 2},
        {"attention": ("attn_pdrop",), "residual": ("resid_pdrop",), "embedding": ("embd_pdrop",)},
    ),
    ("gpt_neox", {}, {"attention": ("attention_dropout",), "residual": ("hidden_dropout",)}),
    ("opt", {"ffn_dim": 96}, {"attention": ("attention_dropout",), "residual": ("dropout",)}),
    ("phi", {}, {"attention": ("attention_dropout",), "residual": ("resid_pdrop",), "embedding": ("embd_pdrop",)}),
    (
        "starcoder2",
        {},
        {"attention": ("attention_dropout",), "residual": ("residual_dropout",), "embedding": ("embedding_dropout",)},
    ),
]


def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS).logits
    return result


@pytest.mark.parametrize(("kind", "settings", "fields"), FAMILIES)
def test_it_is_what_a_model_made_so_does(
    fresh: Fresh, kind: str, settings: dict[str, Any], fields: dict[str, tuple[str, ...]]
) -> None:
    tiny = fresh()
    plain = AutoConfig.for_model(kind, **(COMMON | settings))
    for place, names in fields.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(plain).train()
        made = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **(COMMON | settings | dict.fromkeys(names, 0.4)))
        ).train()
        made.load_state_dict(model.state_dict())
        before = logits(model)
        with set_dropout(LanguageModel(model, tiny.tokenizer, tiny.task), DropoutConfig(**{place: 0.4})):
            inside = logits(model)
            model.eval()
            assert torch.equal(logits(model), logits(made.eval())), "nothing is dropped when it is only asked"
            model.train()
        assert torch.equal(inside, logits(made.train())), place
        assert not torch.equal(inside, before), place
        assert torch.equal(logits(model), before), "it is its own again"
        assert all(getattr(model.config, name) == getattr(plain, name) for name in names)


def test_zero_switches_a_models_own_dropout_off(fresh: Fresh) -> None:
    tiny = fresh()
    config = AutoConfig.for_model("gpt2", **(COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 2}))
    model = AutoModelForCausalLM.from_config(config).train()
    lm = LanguageModel(model, tiny.tokenizer, tiny.task)
    with set_dropout(lm, DropoutConfig(attention=0, residual=0, embedding=0)):
        inside = logits(model)
        assert torch.equal(inside, logits(model.eval()))
        model.train()
    assert not torch.equal(inside, logits(model))


@pytest.mark.parametrize("place", ["residual", "embedding"])
def test_a_model_without_a_place_for_it(fresh: Fresh, place: str) -> None:
    with (
        pytest.raises(UserError, match=rf"train\.noise\.dropout\.{place}: llama has no {place} dropout"),
        apply_noise(fresh(), NoiseConfig(dropout=DropoutConfig(**{place: 0.1}))),
    ):
        pass


@pytest.mark.parametrize("adapted", [False, True])
def test_attention_in_packed_rows_is_dropped_too(fresh: Fresh, adapted: bool) -> None:
    lm = fresh()
    unit = [lm.encode([{"role": "user", "content": "where is my card"}], "card lost")]
    if adapted:
        lm = add_adapter(lm, LoraConfig(rank=4))
        lm.model.train()
    packed = pack([unit])
    with packed_attention(lm, 128) as packs, torch.no_grad():
        assert packs
        before = predicting_states(lm, packed)
        with set_dropout(lm, DropoutConfig(attention=0.5)):
            inside = predicting_states(lm, packed)
            lm.model.eval()
            torch.testing.assert_close(predicting_states(lm, packed), before)
            lm.model.train()
        after = predicting_states(lm, packed)
    assert not torch.allclose(inside, before)
    torch.testing.assert_close(after, before)


def test_nothing_set_changes_nothing(fresh: Fresh) -> None:
    lm = fresh()
    before = logits(lm.model)
    with apply_noise(lm, NoiseConfig()):
        assert torch.equal(logits(lm.model), before)
