"""The variance of activations and gradients by layer, measured and judged."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from posttrain.models.language_model import LanguageModel
from posttrain.store.errors import UserError
from posttrain.train.initialization.activation_stats import (
    LayerVariance,
    layer_variances,
    variance_table,
    variance_warnings,
)
from posttrain.train.initialization.config import InitializationConfig, InitRuleConfig
from posttrain.train.initialization.initialize import initialize_weights

Fresh = Callable[..., LanguageModel]
IDS = torch.arange(40).view(2, 20)


def loss_of(lm: LanguageModel) -> Callable[[], Tensor]:
    return lambda: lm.model(input_ids=IDS, labels=IDS).loss


def deep_model(tmp_path: Path, fresh: Fresh, rules: list[InitRuleConfig]) -> LanguageModel:
    """A model of six layers, initialised as GPT-2."""
    from transformers import AutoModelForCausalLM

    base = fresh()
    config = base.model.config
    config.num_hidden_layers = 6
    lm = LanguageModel(AutoModelForCausalLM.from_config(config).float().train(), base.tokenizer, base.task)
    initialize_weights(lm.model, InitializationConfig(method="depth_scaled", std=0.1, rules=rules), 0)
    return lm


def test_variances_are_those_of_the_hidden_states(fresh: Fresh) -> None:
    lm = fresh()
    result = layer_variances(lm, loss_of(lm))
    states: list[Tensor] = []

    def record_output(module: torch.nn.Module, arguments: object, output: Tensor) -> None:
        output.retain_grad()
        states.append(output)

    layers = [lm.model.get_input_embeddings(), *lm.decoder.layers]
    hooks = [layer.register_forward_hook(record_output) for layer in layers]
    lm.model(input_ids=IDS, labels=IDS).loss.backward()
    for hook in hooks:
        hook.remove()
    assert [layer_stats.layer for layer_stats in result] == ["embeddings", "0", "1"]
    for layer_stats, state in zip(result, states, strict=True):
        assert layer_stats.activations == pytest.approx(float(state.detach().double().var(correction=0)), rel=1e-4)
        assert layer_stats.gradients == pytest.approx(float(state.grad.double().var(correction=0)), rel=1e-4)


def test_measuring_leaves_the_model_unchanged(fresh: Fresh) -> None:
    lm = fresh()
    torch.manual_seed(4)
    state = torch.get_rng_state()

    def loss() -> Tensor:
        torch.rand(3)
        return loss_of(lm)()

    layer_variances(lm, loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for weight in lm.model.parameters())
    assert not any(module._forward_hooks for module in lm.model.modules())


def test_a_good_initialisation_raises_no_warning(fresh: Fresh, tmp_path: Path) -> None:
    lm = deep_model(tmp_path, fresh, [])
    assert variance_warnings(layer_variances(lm, loss_of(lm))) == []


def test_an_exploding_layer_is_named(fresh: Fresh, tmp_path: Path) -> None:
    rule = InitRuleConfig(match=r"layers\.3\..*(down|gate|up)_proj", method="normal", std=2.0)
    lm = deep_model(tmp_path, fresh, [rule])
    lines = variance_warnings(layer_variances(lm, loss_of(lm)))
    assert lines, "the planted fault is detected"
    assert any(line.startswith("the variance of activations changes by") for line in lines)
    assert all(line.endswith("from layer 2 to layer 3") for line in lines), lines


def test_a_nan_weight_is_located(fresh: Fresh, tmp_path: Path) -> None:
    lm = deep_model(tmp_path, fresh, [])
    with torch.no_grad():
        lm.decoder.layers[2].mlp.up_proj.weight[0, 0] = math.nan
    result = layer_variances(lm, loss_of(lm))
    lines = variance_warnings(result)
    assert "the variance of activations of layer 2 is nan" in lines
    assert "the variance of activations of layer 1 is nan" not in lines
    assert result[3].to_json()["activations"] is None


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_warnings_depend_on_the_ratio(kind: str) -> None:
    def stats_of(*values: float) -> list[LayerVariance]:
        names = ["embeddings", *map(str, range(len(values)))]
        other_kind = "gradients" if kind == "activations" else "activations"
        return [
            LayerVariance(**{"layer": name, kind: value, other_kind: 1.0})
            for name, value in zip(names, values, strict=False)
        ]

    assert variance_warnings(stats_of(1e-9, 1.0, 9.9, 1.0)) == [], "embeddings may be of any size"
    assert variance_warnings(stats_of(1.0, 1.0, 11.0, 12.0)) == [
        f"the variance of {kind} changes by 11 from layer 0 to layer 1"
    ]
    assert variance_warnings(stats_of(1.0, 1.0, 0.05)) == [
        f"the variance of {kind} changes by 0.05 from layer 0 to layer 1"
    ]
    assert variance_warnings(stats_of(1.0, 0.0, 1.0)) == [f"the variance of {kind} of layer 0 is 0"]
    assert variance_warnings(stats_of(1.0, math.inf, 1.0)) == [f"the variance of {kind} of layer 0 is inf"]


def test_the_variance_table_has_ratios() -> None:
    result = [
        LayerVariance("embeddings", 0.0025, 4e-6),
        LayerVariance("0", 0.01, 1e-6),
        LayerVariance("1", 0.02, math.nan),
    ]
    lines = variance_table(result).splitlines()
    assert lines[0].split() == ["layer", "activations", "ratio", "gradients", "ratio"]
    assert [line.split() for line in lines[1:]] == [
        ["embeddings", "0.0025", "4e-06"],
        ["0", "0.01", "4", "1e-06", "0.25"],
        ["1", "0.02", "2", "nan", "nan"],
    ]
    assert result[1].to_json() == {"layer": "0", "activations": 0.01, "gradients": 1e-6}


def test_a_model_without_a_list_of_layers_is_refused(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = fresh()
    monkeypatch.setattr(lm, "decoder", torch.nn.Linear(2, 2))
    with pytest.raises(UserError, match="llama has no list of layers"):
        layer_variances(lm, loss_of(lm))
