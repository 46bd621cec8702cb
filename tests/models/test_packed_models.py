"""Which models get packed rows, and that padded rows for the others are right too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.models import attention
from posttrain.models.chat import TokenizedExample
from posttrain.models.head import predicting_states
from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import _states_and_input_gradients, pack, packed_attention

Family = Callable[..., LanguageModel]
XGLM = {"d_model": 64, "ffn_dim": 96, "attention_heads": 2, "num_layers": 2}
SEQUENCES = [
    TokenizedExample(ids, [at > 1 for at in range(len(ids))])
    for ids in ([5, 6, 7, 8, 9, 10], [30, 31, 32], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51])
]


def scale_to_initialisation(lm: LanguageModel) -> LanguageModel:
    """Scales the layers to the size of an initialisation, where attention has little effect."""
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if weight.ndim >= 2 and "layers" in name:
                weight.mul_(0.02 / 0.15)
    return lm


@pytest.mark.parametrize(
    ("kind", "settings", "packs"),
    [
        ("llama", {}, True),
        ("mixtral", {"num_local_experts": 4}, True),
        ("gemma2", {"head_dim": 32}, False),  # caps its attention scores
        ("gpt_oss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}, False),  # has sinks
        ("stablelm", {}, False),
        ("nemotron", {}, False),
        ("xglm", XGLM, False),
        (
            "deepseek_v3",  # its values are not as wide as its keys
            {
                "num_key_value_heads": 2,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "first_k_dense_replace": 2,
            },
            False,
        ),
    ],
)
@pytest.mark.parametrize("small", [False, True])
@torch.no_grad()
def test_a_packed_sequence_has_the_states_of_a_separate_one(
    family: Family, kind: str, settings: dict[str, Any], packs: bool, small: bool
) -> None:
    lm = family(kind, **settings)
    if small:
        scale_to_initialisation(lm)
    before = lm.decoder.config._attn_implementation
    expected = [lm.decoder(torch.tensor([item.ids[:-1]])).last_hidden_state[0, 1:] for item in SEQUENCES]
    with packed_attention(lm, 12) as result:
        assert result == packs
        assert lm.decoder.config._attn_implementation == (attention.PACKED_ATTENTION if packs else before)
        states = predicting_states(lm, pack([[item] for item in SEQUENCES], padded=not result))
    assert lm.decoder.config._attn_implementation == before
    torch.testing.assert_close(states, torch.cat(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slight_attention_across_sequences_is_detected(
    family: Family, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def unconfined_attention(
        _module: Any, query: Any, key: Any, value: Any, _mask: Any, **_options: Any
    ) -> tuple[Any, None]:
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2), None

    lm = scale_to_initialisation(family("llama"))
    lm.model.to(dtype)
    with packed_attention(lm, 12) as packs:
        assert packs
    monkeypatch.setattr(attention, "packed_attention_forward", unconfined_attention)
    with packed_attention(lm, 12) as packs:
        assert not packs


def test_a_sequence_depends_on_its_own_tokens_only(family: Family) -> None:
    lm = family("mixtral", num_local_experts=4)
    packed = pack([[item] for item in SEQUENCES])
    with packed_attention(lm, 12):
        states, gradients = _states_and_input_gradients(lm, packed, 1)
        assert torch.equal(states, predicting_states(lm, packed))
    assert gradients.abs().sum(1).bool().tolist() == [False] * 5 + [True] * 2 + [False] * 11
    assert all(weight.grad is None for weight in lm.model.parameters())
