"""Dropout rates set on a model that was created with other rates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import pack, packed_attention
from posttrain.store.errors import UserError
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig
from posttrain.train.regularization.config import NoiseConfig
from posttrain.train.regularization.layers import apply_noise, set_dropout

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
FAMILIES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {}, ("attention_dropout",)),
    ("mistral", {}, ("attention_dropout",)),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2}, ("attn_pdrop", "resid_pdrop", "embd_pdrop")),
    ("gpt_neox", {}, ("attention_dropout", "hidden_dropout")),
    ("opt", {"ffn_dim": 96}, ("attention_dropout", "dropout")),
    ("phi", {}, ("attention_dropout", "resid_pdrop", "embd_pdrop")),
    ("starcoder2", {}, ("attention_dropout", "residual_dropout", "embedding_dropout")),
]


def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS).logits
    return result


@pytest.mark.parametrize(("kind", "settings", "names"), FAMILIES)
def test_set_dropout_equals_a_model_created_with_it(
    fresh: Fresh, kind: str, settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = fresh()
    config = AutoConfig.for_model(kind, **(COMMON | settings))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(COMMON | settings | dict.fromkeys(names, 0.4)))
    ).train()
    reference.load_state_dict(model.state_dict())
    before = logits(model)
    with set_dropout(LanguageModel(model, tiny.tokenizer, tiny.task), 0.4):
        dropped = logits(model)
        model.eval()
        assert torch.equal(logits(model), logits(reference.eval())), "evaluation drops nothing"
        model.train()
    assert torch.equal(dropped, logits(reference.train()))
    assert not torch.equal(dropped, before)
    assert torch.equal(logits(model), before), "the model's own dropout is restored"
    assert all(getattr(model.config, name) == getattr(config, name) for name in names)


def test_zero_switches_a_models_own_dropout_off(fresh: Fresh) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = fresh()
    config = AutoConfig.for_model("gpt2", **(COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 2}))
    model = AutoModelForCausalLM.from_config(config).train()
    lm = LanguageModel(model, tiny.tokenizer, tiny.task)
    with set_dropout(lm, 0.0):
        without_dropout = logits(model)
        assert torch.equal(without_dropout, logits(model.eval()))
        model.train()
    assert not torch.equal(without_dropout, logits(model))


def test_a_model_without_dropout_is_refused(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.train.regularization.layers._CONFIG_NAMES", ("resid_pdrop",))
    with (
        pytest.raises(UserError, match=r"train\.noise\.dropout: llama has no dropout"),
        apply_noise(fresh(), NoiseConfig(dropout=0.1)),
    ):
        pass


@pytest.mark.parametrize("with_adapter", [False, True])
def test_attention_dropout_applies_to_packed_rows(fresh: Fresh, with_adapter: bool) -> None:
    lm = fresh()
    unit = [lm.encode([{"role": "user", "content": "where is my card"}], "card lost")]
    if with_adapter:
        lm = add_adapter(lm, LoraConfig(rank=4))
        lm.model.train()
    packed = pack([unit])
    with packed_attention(lm, 128) as packs, torch.no_grad():
        assert packs
        before = predicting_states(lm, packed)
        with set_dropout(lm, 0.5):
            dropped = predicting_states(lm, packed)
            lm.model.eval()
            torch.testing.assert_close(predicting_states(lm, packed), before)
            lm.model.train()
        after = predicting_states(lm, packed)
    assert not torch.allclose(dropped, before)
    torch.testing.assert_close(after, before)


def test_an_empty_noise_config_changes_nothing(fresh: Fresh) -> None:
    lm = fresh()
    before = logits(lm.model)
    with apply_noise(lm, NoiseConfig()):
        assert torch.equal(logits(lm.model), before)
