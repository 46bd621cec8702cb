"""Weight matching: permuted copies are recovered, and no alignment moves a model away."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_family import Weights, merge_file, weights_of
from safetensors.torch import save_file

from posttrain.merge.alignment import match_weights
from posttrain.merge.api import merge
from posttrain.merge.decoder_axes import AttentionHeads
from posttrain.merge.permuted_model import AttentionOrder, PermutedModel, UnitOrder
from posttrain.merge.sources import ModelFolder
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

# Two groups of two heads: whole groups, heads inside them and channels of values can all move.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 261,
}


def write_model(folder: Path, seed: int, kind: str = "llama", tied: bool = True) -> Path:
    """Writes a decoder with random weights, norms and biases too, in float32."""
    import transformers

    configs: dict[str, Any] = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    write_tiny_model(folder, seed)
    config = configs[kind](**SIZES, tie_word_embeddings=tied, eos_token_id=257, pad_token_id=256, bos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.3 if parameter.dim() > 1 else 0.5
        mean = 0.0 if parameter.dim() > 1 else 1.0
        parameter.data = mean + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def random_order(seed: int) -> UnitOrder:
    generator = np.random.default_rng(seed)
    groups, shared, size, layers = 2, 2, 8, SIZES["num_hidden_layers"]
    attention = []
    for _ in range(layers):
        order = generator.permutation(groups)
        heads = np.concatenate([group * shared + generator.permutation(shared) for group in order])
        channels = np.stack([generator.permutation(size) for _ in range(groups)])
        attention.append(AttentionOrder(order, heads, channels))
    inner = [generator.permutation(SIZES["intermediate_size"]) for _ in range(layers)]
    return UnitOrder(generator.permutation(SIZES["hidden_size"]), inner, attention)


def permuted_copy(folder: Path, source: Path, seed: int, noise: float = 0.0) -> Path:
    """Writes a model with its units in random order."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model = PermutedModel(ModelFolder("m", source), random_order(seed))
    tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for name, shape in model.shapes().items():
        tensors[name] = torch.empty(shape, dtype=model.dtype(name))
        model.read(name, 0, tensors[name].view(-1))
        tensors[name] += noise * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 40)[None]).logits


def distance(first: Weights, second: Weights) -> float:
    return float(torch.stack([(first[name] - second[name]).square().sum() for name in first]).sum().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_a_permuted_copy_computes_the_same_and_is_recovered(tmp_path: Path, kind: str, tied: bool) -> None:
    original = write_model(tmp_path / "original", 1, kind, tied)
    permuted = permuted_copy(tmp_path / "permuted", original, 2)
    expected = logits(original)
    assert distance(weights_of(original), weights_of(permuted)) > 1, "it moves no unit"
    torch.testing.assert_close(logits(permuted), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    merge([original, permuted], tmp_path / "plain")
    merge([original, permuted], tmp_path / "aligned", align="weights")
    own, aligned = weights_of(original), weights_of(tmp_path / "aligned")
    for name, tensor in own.items():
        assert torch.equal(aligned[name], tensor), f"{name} is not recovered"
    assert float((logits(tmp_path / "plain") - expected).abs().max()) > 0.1, "it is recovered without alignment"
    (numbers,) = merge_file(tmp_path / "aligned")["alignment"].values()  # type: ignore[attr-defined]
    assert numbers["after"] == 0
    assert numbers["before"] == pytest.approx(distance(own, weights_of(permuted)), rel=1e-4)


def test_a_permuted_copy_is_recovered_from_noise(tmp_path: Path) -> None:
    original = write_model(tmp_path / "original", 1)
    permuted = permuted_copy(tmp_path / "permuted", original, 2, noise=0.03)
    alignment = match_weights(ModelFolder("o", original), ModelFolder("p", permuted))
    found, planted = alignment.order, random_order(2)
    assert np.array_equal(planted.residual[found.residual], np.arange(SIZES["hidden_size"]))
    for own, other in zip(found.inner, planted.inner, strict=True):
        assert np.array_equal(other[own], np.arange(SIZES["intermediate_size"]))
    for own, other in zip(found.attention, planted.attention, strict=True):
        assert np.array_equal(other.heads[own.heads], np.arange(4))
        assert np.array_equal(other.groups[own.groups], np.arange(2))


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_alignment_never_moves_a_model_away(tmp_path: Path, seed: int) -> None:
    first, second = write_model(tmp_path / "first", 1), write_model(tmp_path / "second", seed)
    reference, model = ModelFolder("first", first), ModelFolder("second", second)
    alignment = match_weights(reference, model)
    assert alignment.before == pytest.approx(distance(weights_of(first), weights_of(second)), rel=1e-4)
    assert alignment.after < alignment.before
    for threads in (1, 3):
        again = match_weights(reference, model, threads)
        assert again.after == alignment.after
        for axis, layer in (("residual", None), *((axis, 1) for axis in ("inner", "queries", "keys", "values"))):
            assert np.array_equal(again.order.index(axis, layer), alignment.order.index(axis, layer))


def test_related_models_stay_as_they_are(family: Path) -> None:
    alignment = match_weights(ModelFolder("a", family / "a"), ModelFolder("b", family / "b"))
    assert alignment.after == alignment.before
    assert np.array_equal(alignment.order.residual, np.arange(96))
    same = match_weights(ModelFolder("a", family / "a"), ModelFolder("a", family / "a"))
    assert (same.before, same.after) == (0, 0)


def test_each_step_takes_the_best_order_of_its_units(tmp_path: Path) -> None:
    """The last order of each feed-forward block is the best of all swaps of two units, as is the residual stream's."""
    first, second = write_model(tmp_path / "first", 1), write_model(tmp_path / "second", 2)
    order = match_weights(ModelFolder("f", first), ModelFolder("s", second)).order
    own, source = weights_of(first), ModelFolder("s", second)

    def of(candidate: UnitOrder) -> float:
        model = PermutedModel(source, candidate)
        total = 0.0
        for name, tensor in own.items():
            read = torch.empty(tensor.shape)
            model.read(name, 0, read.view(-1))
            total += float((tensor - read).square().sum())
        return total

    best = of(order)
    generator = np.random.default_rng(0)
    for _ in range(10):
        i, j = generator.choice(32, 2, replace=False)
        residual, inner = order.residual.copy(), order.inner[1].copy()
        residual[[i, j]] = residual[[j, i]]
        inner[[i, j]] = inner[[j, i]]
        assert of(UnitOrder(residual, order.inner, order.attention)) > best
        assert of(UnitOrder(order.residual, [order.inner[0], inner, order.inner[2]], order.attention)) > best


def test_a_family_of_unknown_units_is_refused(tmp_path: Path, make_model: Callable[..., Path]) -> None:
    def rename(weights: Weights) -> None:
        weights["model.layers.0.mlp.experts.weight"] = weights.pop("model.layers.0.mlp.gate_proj.weight")

    models = [str(make_model(name, 1, change=rename)) for name in ("a", "b")]
    with pytest.raises(UserError, match=r"experts\.weight are not known"):
        merge({"models": models, "align": "weights"}, tmp_path / "out")
    config = json.loads((Path(models[0]) / "config.json").read_text())
    sources = [{"sources": [{"model": models[0], "layer_range": [0, config["num_hidden_layers"]]}]}]
    with pytest.raises(UserError, match="cannot be aligned"):
        merge({"slices": sources, "align": "weights"}, tmp_path / "out")


def test_the_order_that_changes_nothing_changes_nothing() -> None:
    order = AttentionOrder.unchanged(AttentionHeads(4, 2, 8))
    unchanged = UnitOrder(np.arange(5), [], [order])
    for axis in ("queries", "keys", "values", "attended"):
        index = unchanged.index(axis, 0)
        assert index is not None
        assert np.array_equal(index, np.arange(len(index)))
