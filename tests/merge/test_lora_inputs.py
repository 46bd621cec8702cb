"""LoRA adapters as inputs of a merge, against peft's own merging."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.merge import api
from posttrain.merge.api import merge
from posttrain.merge.lora_adapter import _pattern_values, _read_updates
from posttrain.store.errors import UserError

Read = Callable[[Path], dict[str, Tensor]]

_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8},
    "rslora": {"r": 8, "lora_alpha": 3, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 6},
        "alpha_pattern": {"layers.0.mlp.down_proj": 32},
    },
    "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "o_proj"]},
    "whole": {"r": 4, "lora_alpha": 8, "modules_to_save": ["norm"]},
    "biases": {"r": 4, "lora_alpha": 8, "bias": "lora_only"},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", _VARIANTS)
def test_an_adapter_is_applied_as_peft_merges_it(
    variant: str, make_model: Any, make_adapter: Any, read_weights: Read, tmp_path: Path
) -> None:
    # Its own head, as peft merges the update of a tied embedding into the head too.
    config = {"tie_word_embeddings": False, "attention_bias": variant == "biases"}
    base = make_model("base", dtype=torch.float32, config=config, change=lambda w: _own_head(w, variant == "biases"))
    adapter = make_adapter(base, "adapter", **_VARIANTS[variant])
    merge([f"{base}+{adapter}"], tmp_path / "out")
    expected, before = read_weights(tmp_path / "adapter-merged"), read_weights(base)
    result = read_weights(tmp_path / "out")
    assert result.keys() == expected.keys()
    assert any(not torch.equal(before[name], expected[name]) for name in expected)
    for name in expected:
        assert (result[name] - expected[name]).abs().max() <= 1e-6, name


def test_an_adapter_that_changes_during_the_merge_is_refused(
    make_model: Any, make_adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model("base", dtype=torch.float32)
    adapter = make_adapter(base, "adapter", r=4, lora_alpha=8)
    original = api.run_plan

    def changed_before(*arguments: Any) -> Any:
        (adapter / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text() + " ")
        return original(*arguments)

    monkeypatch.setattr(api, "run_plan", changed_before)
    with pytest.raises(UserError, match=r"adapter_config\.json.*was changed while it was read"):
        merge([f"{base}+{adapter}"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


_EMBEDDED: dict[str, dict[str, Any]] = {
    "update": {"target_modules": ["embed_tokens", "q_proj"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tied": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("variant", _EMBEDDED)
def test_an_adapter_on_one_end_of_a_tied_model_leaves_the_other_as_it_was(
    variant: str, make_model: Any, make_adapter: Any, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def logits(folder: Path, adapter: Path | None = None) -> Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, adapter) if adapter else model
        return model.eval()(torch.arange(5, 25)[None]).logits.detach()

    base = make_model("base", dtype=torch.float32)
    adapter = make_adapter(base, "adapter", r=4, lora_alpha=8, **_EMBEDDED[variant])
    expected = logits(base, adapter)
    assert (expected - logits(base)).abs().max() > 0.1
    merge([f"{base}+{adapter}"], tmp_path / "out")
    assert (logits(tmp_path / "out") - expected).abs().max() < 1e-5
    if variant != "both":  # whose change has the full rank
        recipe = {"models": [f"{base}+{adapter}"], "base": str(base), "method": "task_arithmetic", "as_adapter": True}
        merge(recipe, tmp_path / "extracted", root=tmp_path)
        assert (logits(base, tmp_path / "extracted") - expected).abs().max() < 1e-4


def _own_head(weights: dict[str, Tensor], biases: bool) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if biases:
        for name in [name for name in weights if "self_attn" in name]:
            weights[name.replace(".weight", ".bias")] = torch.full((len(weights[name]),), 0.25)


@pytest.mark.slow
def test_adapters_of_different_ranks_are_merged_on_the_fly(
    make_model: Any, make_adapter: Any, read_weights: Read, tmp_path: Path
) -> None:
    base = make_model("base")
    first = make_adapter(base, "first", 1, r=2, lora_alpha=4)
    second = make_adapter(base, "second", 2, r=7, lora_alpha=7, target_modules=["k_proj", "down_proj"])
    # Relative to the folder of the recipe, and one of them alone, which knows its base.
    recipe = {"method": "linear", "models": ["base+first", str(second)], "dtype": "float32"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    merge(tmp_path / "recipe.yaml", tmp_path / "out")
    expected = [read_weights(tmp_path / f"{path.name}-merged") for path in (first, second)]
    result = read_weights(tmp_path / "out")
    for name in result:
        assert torch.allclose(result[name], (expected[0][name] + expected[1][name]) / 2, atol=1e-6), name


@pytest.mark.slow
def test_the_result_has_the_dtype_of_the_model_below_the_adapter(
    make_model: Any, make_adapter: Any, read_weights: Read, tmp_path: Path
) -> None:
    base = make_model("base")
    adapter = make_adapter(base, "adapter", r=2)
    merge([f"{base}+{adapter}", base], tmp_path / "out")
    assert {value.dtype for value in read_weights(tmp_path / "out").values()} == {torch.bfloat16}


def _edit(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.slow
def test_adapters_that_cannot_be_applied(make_model: Any, make_adapter: Any, tmp_path: Path) -> None:
    base = make_model("base")
    adapter = make_adapter(base, "adapter", r=2)

    def refused(text: str, model: str | Path | None = None) -> None:
        with pytest.raises(UserError, match=text):
            merge([model or f"{base}+{adapter}"], tmp_path / "out")
        assert not (tmp_path / "out").exists()

    config = (adapter / "adapter_config.json").read_text()
    for changes, text in (
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"alpha_pattern": {"(": 3}}, "damaged alpha_pattern"),
    ):
        _edit(adapter, **changes)
        refused(text)
        (adapter / "adapter_config.json").write_text(config)
    (adapter / "adapter_config.json").write_text(config[: len(config) // 2])
    refused("cannot be read")
    (adapter / "adapter_config.json").write_text(config)
    _edit(adapter, base_model_name_or_path=None)
    refused("names no base model", adapter)
    _edit(adapter, base_model_name_or_path="/nowhere/else")
    refused("is an adapter for `/nowhere/else`, which is not a model here", adapter)

    wider = make_model("wider", change=lambda weights: _widen(weights))
    refused(r"q_proj.weight has the shape \[100, 96\] in the model and \[96, 96\] in the adapter", f"{wider}+{adapter}")
    weights = load_file(adapter / "adapter_model.safetensors")
    first = next(name for name in weights if "lora_B" in name)
    save_file({**weights, first: weights[first] * float("nan")}, adapter / "adapter_model.safetensors")
    refused(f"tensor {first[:40]}.* holds NaN")
    save_file({n: w for n, w in weights.items() if n != first}, adapter / "adapter_model.safetensors")
    refused("has no tensor")
    save_file({**weights, "base_model.model.strange.weight": torch.ones(3)}, adapter / "adapter_model.safetensors")
    refused("strange.weight is not in the model")
    (adapter / "adapter_model.safetensors").unlink()
    refused("holds no adapter_model.safetensors")


def _widen(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat([weights[name], weights[name][:4]])


def test_the_first_pattern_that_matches_counts() -> None:
    patterns = {"layers.1.q_proj": 1, r".*\.0\.[qv]_proj": 2, "0.q_proj": 3, "v_proj": 4}
    value = _pattern_values(patterns, 9)
    modules = ("model.layers.1.q_proj", "model.layers.0.q_proj", "0.q_proj", "model.v_proj", "model.my_v_proj")
    assert [value(module) for module in modules] == [1, 2, 3, 4, 9]
    # One a module, as `extract_lora` writes them: the square of their number would take minutes.
    many = {f"model.layers.{layer}.q_proj": layer for layer in range(20_000)}
    value = _pattern_values(many, 9)
    assert all(value(module) == layer for module, layer in many.items())


def test_an_update_of_a_transposed_weight_is_transposed(tmp_path: Path) -> None:
    """As of GPT-2's layers, which store their weights as inputs by outputs."""
    down, up = torch.randn(2, 4), torch.randn(6, 2)
    file = tmp_path / "adapter_model.safetensors"
    name = "base_model.model.h.0.attn.c_attn"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, file)
    with safe_open(file, "pt") as stored:
        names = set(stored.keys())
    settings = {"lora_alpha": 6, "fan_in_fan_out": True}
    updates = _read_updates(file, names, settings, {"h.0.attn.c_attn.weight": (4, 6)})
    left, right = updates["h.0.attn.c_attn.weight"]
    torch.testing.assert_close(right @ left, 3 * (up @ down).T)
