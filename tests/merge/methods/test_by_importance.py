"""Merging by the importance of layers and heads against sums head by head in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_family import Weights, weights_of, write_relative
from safetensors.torch import save_file

from posttrain.merge.api import merge
from posttrain.merge.config import MergeConfig
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

HEADS, GROUPS, SIZE, LAYERS = 4, 2, 32, 4
WEIGHT = [3.0, 1.0, 0.0]
IMPORTANCE = [[0.5, 1.0, 0.0, 0.25], [1.0, 2.0, 0.0, 0.25], [0.25, 0.25, 3.0, 0.0]]
FAMILY = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}  # whose attention has these biases


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of four heads in two groups, with biases of queries, keys and values."""
    import json

    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "base", width=128, layers=LAYERS)
    config = json.loads((root / "base" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 1)
    (root / "base" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": GROUPS} | FAMILY))
    tensors = weights_of(root / "base")
    for layer in range(LAYERS):
        for name in "kv":
            key = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            tensors[key] = torch.cat([tensors[key], tensors[key].flip(0)])
        for name, rows in (("q", HEADS * SIZE), ("k", GROUPS * SIZE), ("v", GROUPS * SIZE)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.arange(rows).double() / rows
    save_file({name: t.float() for name, t in tensors.items()}, root / "base" / "model.safetensors", {"format": "pt"})
    for seed, name in enumerate("abc", 1):
        write_relative(root / name, root / "base", seed, scale=0.1)
    return root


def merged(models: Path, out: Path, **parameters: Any) -> Weights:
    rule = {"match": r"layers\.", "weight": WEIGHT, "importance": IMPORTANCE}
    recipe = {
        "method": "by_importance",
        "models": [str(models / name) for name in "abc"],
        "parameters": parameters,
        "layers": [rule],
        "dtype": "float32",
    }
    merge(recipe, out)
    return weights_of(out)


def reference(models: Path, choose: bool) -> Weights:
    """Sums each head's rows, or columns of the output projection, with the shares of its group."""
    weights = [weights_of(models / name) for name in "abc"]
    importance = np.array(IMPORTANCE)
    result = {}
    for name, first in weights[0].items():
        shares = np.array(WEIGHT) / 4 if ".layers." in name else np.full(3, 1 / 3)
        total = sum(share * own[name] for share, own in zip(shares, weights, strict=True))
        for head in range(HEADS):
            group = head // 2
            needed = importance[:, 2 * group] + importance[:, 2 * group + 1]
            own_shares = np.eye(3)[needed.argmax()] if choose else needed / needed.sum()
            rows = slice(head * SIZE, (head + 1) * SIZE)
            if "k_proj" in name or "v_proj" in name:
                rows = slice(group * SIZE, (group + 1) * SIZE)
            summed = sum(share * own[name] for share, own in zip(own_shares, weights, strict=True))
            if "o_proj" in name:
                total[:, rows] = summed[:, rows]
            elif "self_attn" in name:
                total[rows] = summed[rows]
        assert total.shape == first.shape
        result[name] = total
    return result


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["average", "choose"])
def test_heads_are_merged_one_by_one(models: Path, tmp_path: Path, heads: str) -> None:
    expected = reference(models, choose=heads == "choose")
    for name, tensor in merged(models, tmp_path / "out", heads=heads).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def test_layers_from_the_boundary_on_are_one_models(models: Path, tmp_path: Path) -> None:
    weights, first = merged(models, tmp_path / "out", layer_boundary=0.5), weights_of(models / "a")
    expected = reference(models, choose=False)
    for name, tensor in weights.items():
        kept = any(f".layers.{layer}." in name for layer in (2, 3))
        torch.testing.assert_close(tensor, first[name] if kept else expected[name], rtol=0, atol=0 if kept else 1e-6)


def test_a_boundary_of_zero_keeps_all_layers(models: Path, tmp_path: Path) -> None:
    first = weights_of(models / "a")
    for name, tensor in merged(models, tmp_path / "out", layer_boundary=0.0).items():
        assert torch.equal(tensor, first[name]) == (".layers." in name), name


def test_without_importances_all_models_count_alike(models: Path, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"models": [str(models / name) for name in "ab"], "dtype": "float32"}
    merge(recipe | {"method": "linear"}, tmp_path / "linear")
    merge(recipe | {"method": "by_importance", "parameters": {"weight": 1}}, tmp_path / "one")
    none = {"match": "layers", "weight": [0, 0], "importance": [[0] * HEADS] * 2}
    merge(recipe | {"method": "by_importance", "layers": [none]}, tmp_path / "two")
    expected = weights_of(tmp_path / "linear")
    for name in ("one", "two"):
        for key, tensor in weights_of(tmp_path / name).items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-7)


def test_without_any_importance_it_is_no_merge_by_importance(models: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="by weight and importance, which are missing"):
        merge([models / "a", models / "b"], tmp_path / "out", method="by_importance")
    with pytest.raises(UserError, match=r"merge\.method: by_importance"):
        MergeConfig(models=["champion"], method="by_importance").check()
    MergeConfig(models=["champion"], method="by_importance", weights=[2.0, 1.0]).check()


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        ([[1.0] * 3] * 3, "4 query heads"),
        ([[1.0] * 4] * 2, "not a list of 3 lists"),
        ([[1.0, -1.0, 0.0, 0.0]] * 3, "-1.0 is not between 0"),
        ([["x"] * 4] * 3, "is a number"),
    ],
)
def test_wrong_importances_are_named(models: Path, tmp_path: Path, importance: Any, message: str) -> None:
    recipe = {"method": "by_importance", "models": [str(models / name) for name in "abc"]}
    with pytest.raises(UserError, match=message):
        merge(recipe | {"layers": [{"match": "self_attn", "importance": importance}]}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
