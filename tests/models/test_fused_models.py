"""Fused models compute the same up to rounding, are restored afterwards, and unknown operations stay unfused."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from posttrain.models.fused import fuse_layers
from posttrain.models.language_model import LanguageModel
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.train.lora import add_adapter
from posttrain.train.lora_config import LoraConfig

SIZES = {
    "model_type": "llama", "vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 261, "n_embd": 32, "n_layer": 2, "n_head": 4}
IDS = torch.arange(40).view(2, 20)


def build_model(settings: dict[str, Any]) -> LanguageModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    return LanguageModel(model.eval(), byte_tokenizer(), TaskConfig())


def logits_and_gradients(lm: LanguageModel) -> list[torch.Tensor]:
    lm.model.zero_grad()
    result = lm.model(input_ids=IDS).logits
    result.logsumexp(-1).sum().backward()
    return [result.detach(), *(weight.grad.clone() for weight in lm.model.parameters())]


def replaced_modules(lm: LanguageModel) -> set[str]:
    return {type(module).__name__ for module in lm.model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("config", "norms"),
    [
        (SIZES, {"LlamaRMSNorm"}),
        (SIZES | {"model_type": "qwen3"}, {"Qwen3RMSNorm"}),
        (SIZES | {"model_type": "gemma"}, set()),  # its weights are added to one
        (GPT2, set()),
        (
            SIZES | {"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1},
            {"GptOssRMSNorm"},
        ),  # half the angles
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_fused_model_computes_the_same_and_is_restored(config: dict[str, Any], norms: set[str]) -> None:
    lm = build_model(config)
    plain = logits_and_gradients(lm)
    with fuse_layers(lm):
        assert replaced_modules(lm) == norms
        fused = logits_and_gradients(lm)
    assert not replaced_modules(lm)
    for first, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)
    for first, other in zip(logits_and_gradients(lm), plain, strict=True):
        assert torch.equal(first, other)


def final_states(lm: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = lm.decoder(input_ids=IDS, use_cache=False).last_hidden_state
    return result.double()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_residual_stream_stays_in_float32(compiled: bool) -> None:
    config = SIZES | {"num_hidden_layers": 24, "initializer_range": 0.05}
    exact, lm = final_states(build_model(config)), build_model(config)
    lm.model.to(torch.bfloat16)
    unfused_error = (final_states(lm) - exact).norm()
    with fuse_layers(lm, compiled=compiled):
        error = (final_states(lm) - exact).norm()
        states = lm.decoder(input_ids=IDS, output_hidden_states=True).hidden_states
        float32_weights = {name for name, weight in lm.model.named_parameters() if weight.dtype == torch.float32}
    assert float32_weights == {name for name, _ in lm.model.named_parameters() if "norm" in name}
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.bfloat16}
    assert {state.dtype for state in states[:-1]} == {torch.float32}
    assert states[-1].dtype == torch.bfloat16
    assert error < 0.8 * unfused_error
    assert not lm.decoder.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("config", [SIZES | {"model_type": "gemma"}, GPT2])
def test_other_models_keep_their_residual_dtype(config: dict[str, Any]) -> None:
    lm = build_model(config)
    lm.model.to(torch.bfloat16)
    with fuse_layers(lm):
        states = lm.decoder(input_ids=IDS, output_hidden_states=True).hidden_states
    assert {state.dtype for state in states} == {torch.bfloat16}


def test_rotation_is_replaced_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.apply_rotary_pos_emb
    lm = build_model(SIZES)
    with fuse_layers(lm):
        assert modeling_llama.apply_rotary_pos_emb is not own
    assert modeling_llama.apply_rotary_pos_emb is own

    def other(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return own(q, k, cos, -sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    with fuse_layers(lm):  # a rotation in the other direction is not replaced
        assert modeling_llama.apply_rotary_pos_emb is other


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_model_with_an_adapter(dropout: float) -> None:
    lm = add_adapter(build_model(SIZES | {"attention_bias": True}), LoraConfig(rank=4, dropout=dropout))
    for name, weight in lm.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    lm.model.train()
    runs = []
    for condition in (nullcontext, lambda: fuse_layers(lm)):
        torch.manual_seed(3)
        lm.model.zero_grad()
        with condition():
            assert ("Linear" in replaced_modules(lm)) == bool(runs)
            result = lm.model(input_ids=IDS).logits
            result.logsumexp(-1).sum().backward()
            with lm.model.disable_adapter():
                base_logits = lm.model(input_ids=IDS).logits
        gradients = [weight.grad.clone() for weight in lm.model.parameters() if weight.requires_grad]
        runs.append([result.detach(), base_logits.detach(), *gradients])
    assert not replaced_modules(lm)
    for first, other in zip(*runs, strict=True):
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-4)


def test_adapters_of_other_kinds_are_not_fused() -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    settings = PeftConfig(r=4, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    lm = build_model(SIZES)
    lm = LanguageModel(get_peft_model(lm.model, settings), lm.tokenizer, lm.task)
    with fuse_layers(lm):
        assert replaced_modules(lm) == {"LlamaRMSNorm"}


def test_a_vocabulary_may_be_tiny() -> None:
    lm = build_model(SIZES | {"vocab_size": 16, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0})
    lm.model.to(torch.bfloat16)
    with fuse_layers(lm):
        states = lm.decoder(input_ids=IDS % 16, output_hidden_states=True).hidden_states
    assert states[0].dtype == torch.float32
