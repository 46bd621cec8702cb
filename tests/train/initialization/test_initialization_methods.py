"""Fresh weights against the papers' variances."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.initialization.config import InitializationConfig, InitRuleConfig
from posttrain.train.initialization.initialize import (
    InitialDistribution,
    WeightRole,
    init_distribution,
    initialize_weights,
)

Fresh = Callable[..., LanguageModel]
# For 96 * 96 numbers and more, five standard errors of their variance.
TOLERANCE = 0.08


def variance(weight: torch.Tensor) -> float:
    return float(weight.detach().double().square().mean())


def initialized_weights(model: nn.Module, seed: int = 0, **settings: Any) -> dict[str, torch.Tensor]:
    """A model's weights after their initialisation."""
    initialize_weights(model, InitializationConfig(**settings), seed)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_normal(fresh: Fresh) -> None:
    lm = fresh()
    result = initialized_weights(lm.model, method="normal", std=0.03, gain=2.0)
    for name, weight in result.items():
        if name.endswith("proj.weight"):
            assert variance(weight) == pytest.approx(0.06**2, rel=TOLERANCE), name
        elif "norm" in name:
            assert bool((weight == 1).all()), "norms are unchanged"
    embeddings = result["model.embed_tokens.weight"]
    assert variance(embeddings[:256]) == pytest.approx(0.03**2, rel=TOLERANCE), "the gain is for matrices"
    assert bool((embeddings[lm.model.config.pad_token_id] == 0).all())


def test_xavier(fresh: Fresh) -> None:
    for name, weight in initialized_weights(fresh().model, method="xavier").items():
        if name.endswith("proj.weight"):
            outputs, inputs = weight.shape
            bound = math.sqrt(6 / (inputs + outputs))  # Glorot and Bengio, equation 16
            assert float(weight.abs().max()) == pytest.approx(bound, rel=0.01), name
            assert float(weight.abs().max()) <= bound
            assert variance(weight) == pytest.approx(bound**2 / 3, rel=TOLERANCE), name


def test_kaiming(fresh: Fresh) -> None:
    for name, weight in initialized_weights(fresh().model, method="kaiming", gain=1.5).items():
        if name.endswith("proj.weight"):
            assert variance(weight) == pytest.approx(1.5**2 * 2 / weight.shape[1], rel=TOLERANCE), name


def test_depth_scaled(fresh: Fresh) -> None:
    for name, weight in initialized_weights(fresh().model, method="depth_scaled", std=0.02).items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert variance(weight) == pytest.approx(0.02**2 / (2 * 2), rel=TOLERANCE), name
        elif name.endswith("proj.weight"):
            assert variance(weight) == pytest.approx(0.02**2, rel=TOLERANCE), name


def test_ds_init(fresh: Fresh) -> None:
    for name, weight in initialized_weights(fresh().model, method="ds_init").items():
        if name.endswith("proj.weight"):
            layer = 1 if ".0." in name else 2
            bound = math.sqrt(6 / sum(weight.shape)) / math.sqrt(layer)
            assert float(weight.abs().max()) == pytest.approx(bound, rel=0.01), name


def test_transposed_matrices(fresh: Fresh) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=2, vocab_size=261, n_positions=128))
    result = initialized_weights(model, method="kaiming")
    assert result["transformer.h.0.mlp.c_fc.weight"].shape == (64, 256)
    assert variance(result["transformer.h.0.mlp.c_fc.weight"]) == pytest.approx(2 / 64, rel=TOLERANCE)
    assert variance(result["transformer.h.0.mlp.c_proj.weight"]) == pytest.approx(2 / 256, rel=TOLERANCE)
    result = initialized_weights(model, method="depth_scaled", std=0.02)
    assert variance(result["transformer.h.1.mlp.c_proj.weight"]) == pytest.approx(0.02**2 / 6, rel=TOLERANCE)
    assert variance(result["transformer.h.1.attn.c_attn.weight"]) == pytest.approx(0.02**2, rel=TOLERANCE)
    assert variance(result["transformer.wpe.weight"]) == pytest.approx(0.02**2, rel=TOLERANCE)


def test_experts_and_convolutions() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM, MambaConfig, MambaForCausalLM, MixtralConfig
    from transformers import MixtralForCausalLM as Mixtral

    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixtral = initialized_weights(Mixtral(MixtralConfig(vocab_size=64, num_local_experts=4, **sizes)), method="kaiming")
    assert variance(mixtral["model.layers.0.mlp.experts.down_proj"]) == pytest.approx(2 / 96, rel=TOLERANCE)
    assert variance(mixtral["model.layers.0.mlp.experts.gate_up_proj"]) == pytest.approx(2 / 32, rel=TOLERANCE)
    gpt_oss = initialized_weights(
        GptOssForCausalLM(GptOssConfig(vocab_size=64, num_local_experts=4, **sizes)), method="kaiming"
    )
    assert variance(gpt_oss["model.layers.0.mlp.experts.down_proj"]) == pytest.approx(2 / 96, rel=TOLERANCE)
    assert variance(gpt_oss["model.layers.0.mlp.experts.gate_up_proj"]) == pytest.approx(2 / 32, rel=TOLERANCE)
    mamba_model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=512, state_size=4, num_hidden_layers=1))
    original = mamba_model.backbone.layers[0].mixer.A_log.detach().clone()
    result = initialized_weights(mamba_model, method="kaiming")
    assert variance(result["backbone.layers.0.mixer.conv1d.weight"]) == pytest.approx(2 / 4, rel=TOLERANCE)
    assert torch.equal(result["backbone.layers.0.mixer.A_log"], original), "it is no matrix"


@pytest.mark.parametrize(("method", "gain"), [("kaiming", 1.0), ("xavier", 1.0), ("normal", 1.0)])
def test_signals_keep_their_variance(method: Any, gain: float) -> None:
    """He et al., section 2.2: with ReLU, n Var(w) / 2 = 1; Glorot and Bengio, section 4.2: without, n Var(w) = 1."""
    width, depth = 512, 12
    generator = torch.Generator().manual_seed(1)
    role = WeightRole((width, width), None, depth, False)
    std = 1 / math.sqrt(width)
    signals = torch.randn(512, width, generator=generator)
    first = None
    for _ in range(depth):
        weight = init_distribution(method, gain, std, role, "w").draw(torch.Size((width, width)), generator)
        signals = (signals.relu() if method == "kaiming" else signals) @ weight.T
        first = first or float(signals.var())
    assert float(signals.var()) / first == pytest.approx(1, abs=0.25)
    assert init_distribution("normal", 2.0, std, role, "w").std == 2 * std


def test_weights_depend_only_on_the_seed(fresh: Fresh) -> None:
    first = initialized_weights(fresh().model, seed=1, method="xavier")
    torch.manual_seed(99)
    assert all(
        torch.equal(weight, first[name])
        for name, weight in initialized_weights(fresh().model, 1, method="xavier").items()
    )
    other_weights = initialized_weights(fresh().model, seed=2, method="xavier")
    equal_names = {name for name in first if torch.equal(first[name], other_weights[name])}
    assert equal_names == {name for name in first if "norm" in name}
    layers = [first[f"model.layers.{number}.mlp.up_proj.weight"] for number in (0, 1)]
    assert not torch.equal(*layers)


def test_a_rule_changes_only_the_matching_weights(fresh: Fresh) -> None:
    rules = [
        InitRuleConfig(match=r"layers\.1\..*down_proj", method="zeros"),
        InitRuleConfig(match="down_proj", method="normal", std=0.5),
        InitRuleConfig(match="input_layernorm", method="normal", gain=3.0),
    ]
    without_rules = initialized_weights(fresh().model, method="xavier")
    result = initialized_weights(fresh().model, method="xavier", rules=rules)
    changed_names = {name for name in without_rules if not torch.equal(without_rules[name], result[name])}
    assert changed_names == {name for name in without_rules if "down_proj" in name or "input_layernorm" in name}
    assert bool((result["model.layers.1.mlp.down_proj.weight"] == 0).all())
    assert variance(result["model.layers.0.mlp.down_proj.weight"]) == pytest.approx(0.25, rel=TOLERANCE)
    assert variance(result["model.layers.0.input_layernorm.weight"]) == pytest.approx(0.06**2, rel=0.5)


def test_invalid_rules_are_refused(fresh: Fresh) -> None:
    with pytest.raises(UserError, match=r"train\.initialization\.rules\.0: no parameter's name matches `w9`"):
        initialized_weights(fresh().model, method="xavier", rules=[InitRuleConfig(match="w9", method="zeros")])
    with pytest.raises(UserError, match=r"kaiming is for matrices, and `model.norm.weight` is none; use normal"):
        initialized_weights(
            fresh().model, method="xavier", rules=[InitRuleConfig(match=r"model\.norm", method="kaiming")]
        )
    with pytest.raises(ValidationError, match="is no regular expression"):
        InitRuleConfig(match="(", method="zeros")
    with pytest.raises(ValidationError, match="set a method too"):
        InitializationConfig(rules=[InitRuleConfig(match="a", method="zeros")])
    unknown_model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(UserError, match="not known which of the model's weights end a block; take normal"):
        initialized_weights(unknown_model, method="depth_scaled")


def test_a_uniform_distribution_has_the_given_standard_deviation() -> None:
    result = InitialDistribution(0.3, uniform=True).draw(torch.Size((40_000,)), torch.Generator().manual_seed(0))
    assert float(result.std()) == pytest.approx(0.3, rel=0.02)
