"""Pruned models against masked ones, and what is kept against scores that are computed one token at a time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models.chat import TokenizedExample
from posttrain.models.importance import ActivationImportance, importance_by_activation
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.pruning import FAMILIES, KeptParts, PrunedSize, check_pruning, choose_parts, prune_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError

LAYERS, HEADS, GROUPS, INNER = 4, 6, 3, 20
KEPT = KeptParts([0, 2, 3], [[0, 2], [1, 2], [0, 1]], [[0, 3, 7, 19], [1, 2, 3, 4], [5, 9, 11, 13]])
IDS = torch.tensor([[5, 6, 7, 8, 9, 50], [9, 8, 70, 6, 5, 4]])
EXAMPLES = [
    TokenizedExample([(7 * start + 3 * step) % 250 for step in range(length)], [True] * length)
    for start, length in enumerate((3, 9, 5, 2, 6))
]


def write_model(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Writes a model of a family with random weights, whose layers differ where the family has several kinds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    values = {
        **{"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": INNER, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": 8, "query_pre_attn_scalar": 8},
        **{"sliding_window": 3, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
        **({"tie_word_embeddings": True} if family.startswith("gemma") else {}),
        **({"use_sliding_window": True, "max_window_layers": 1} if family.startswith("qwen") else {}),
        **({"layer_types": ["full_attention", "sliding_attention"] * 2} if family == "ministral" else {}),
        **changes,
    }
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))  # biases and norms too
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> LanguageModel:
    return load_language_model(folder, TaskConfig(), "float32")


@contextmanager
def masked(model: Any, kept: KeptParts) -> Iterator[None]:
    """Skips layers, and zeroes the outputs of heads and channels."""

    def keep(rows: list[int]) -> Any:
        def hook(module: Any, args: Any) -> Any:
            mask = torch.zeros(args[0].shape[-1])
            mask[rows] = 1
            return (args[0] * mask,)

        return hook

    def skip(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]

    with ExitStack() as stack:
        for number, layer in enumerate(model.model.layers):
            if number not in kept.layers:
                stack.callback(layer.register_forward_hook(skip, with_kwargs=True).remove)
                continue
            at = kept.layers.index(number)
            width = 8 * HEADS // GROUPS
            rows = [group * width + row for group in kept.groups[at] for row in range(width)]
            stack.callback(layer.self_attn.o_proj.register_forward_pre_hook(keep(rows)).remove)
            stack.callback(layer.mlp.down_proj.register_forward_pre_hook(keep(kept.inner[at])).remove)
        yield


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_a_pruned_model_is_the_masked_one(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = load(write_model(tmp_path / "whole", family))
    before = whole.model(input_ids=IDS, use_cache=False).logits
    with masked(whole.model, KEPT):
        expected = whole.model(input_ids=IDS, use_cache=False).logits
    assert (expected - before).abs().max() > 0.1, "what is removed matters"
    prune_model(whole.model, KEPT)
    whole.model.save_pretrained(tmp_path / "pruned")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float32).eval()
    torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, atol=1e-4, rtol=1e-4)
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (3, 4, 2)
    assert (config.intermediate_size, config.head_dim) == (4, 8)
    assert config.to_dict().get("layer_types") is None or len(config.layer_types) == 3


def test_a_model_that_keeps_all_is_unchanged(tmp_path: Path) -> None:
    lm = load(write_model(tmp_path))
    before = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    config = lm.model.config.to_dict()
    importance = importance_by_activation(lm, EXAMPLES)
    prune_model(lm.model, choose_parts(importance, lm.model.config, PrunedSize(LAYERS, HEADS, INNER)))
    after = lm.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert lm.model.config.to_dict() == config


def reference(lm: LanguageModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scores of layers, heads and channels by their definitions: each sequence alone, in NumPy."""
    # Of layers, of projections of heads, and of projections of channels.
    inputs: list[list[np.ndarray]] = [[], [], []]

    def keep(at: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            inputs[at].append(args[0][0].double().numpy())

        return hook

    influence, heads, inner = np.zeros(LAYERS), np.zeros((LAYERS, HEADS)), np.zeros((LAYERS, INNER))
    tokens = 0
    for example in EXAMPLES:
        inputs[:] = [], [], []
        layers = lm.model.model.layers
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(keep(0)).remove)
                stack.callback(layer.self_attn.o_proj.register_forward_pre_hook(keep(1)).remove)
                stack.callback(layer.mlp.down_proj.register_forward_pre_hook(keep(2)).remove)
            stack.callback(lm.model.model.norm.register_forward_pre_hook(keep(0)).remove)
            with torch.no_grad():
                lm.model(input_ids=torch.tensor([example.ids]), use_cache=False)
        tokens += len(example.ids)
        for layer in range(LAYERS):
            for x, y in zip(inputs[0][layer], inputs[0][layer + 1], strict=True):
                influence[layer] += x @ y / np.sqrt((x @ x) * (y @ y))
            for head in range(HEADS):
                outputs = inputs[1][layer][:, 8 * head : 8 * head + 8]
                heads[layer, head] += np.mean([np.sqrt((row**2).sum()) for row in outputs]) ** 2
            inner[layer] += np.abs(inputs[2][layer]).mean(0) ** 2
    return 1 - influence / tokens, np.sqrt(heads), np.sqrt(inner)


def test_the_parts_with_the_greatest_scores_are_kept(tmp_path: Path) -> None:
    lm = load(write_model(tmp_path))
    importance = importance_by_activation(lm, EXAMPLES)
    influence, heads, inner = reference(lm)
    np.testing.assert_allclose(importance.layers, influence, rtol=1e-5)
    np.testing.assert_allclose(importance.heads, heads, rtol=1e-5)
    np.testing.assert_allclose(importance.inner, inner, rtol=1e-5)
    kept = choose_parts(importance, lm.model.config, PrunedSize(2, 4, 7))
    assert kept.layers == sorted(sorted(range(LAYERS), key=lambda layer: -influence[layer])[:2])
    for layer, groups, channels in zip(kept.layers, kept.groups, kept.inner, strict=True):
        sums = [heads[layer, 2 * group] + heads[layer, 2 * group + 1] for group in range(GROUPS)]
        assert groups == sorted(sorted(range(GROUPS), key=lambda group: -sums[group])[:2])
        assert channels == sorted(sorted(range(INNER), key=lambda channel: -inner[layer, channel])[:7])


def test_of_equal_parts_the_first_are_kept() -> None:
    from transformers import LlamaConfig

    importance = ActivationImportance(np.ones(LAYERS), np.ones((LAYERS, HEADS)), np.ones((LAYERS, INNER)))
    config = LlamaConfig(hidden_size=48, num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    kept = choose_parts(importance, config, PrunedSize(2, 2, 3))
    assert kept == KeptParts([0, 1], [[0], [0]], [[0, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, PrunedSize(layers=5), "p.layers: 5 cannot be kept; the model has 4"),
        ({}, PrunedSize(layers=0), "p.layers: 0 cannot be kept"),
        ({}, PrunedSize(inner=21), "p.inner: 21 cannot be kept; the model has 20"),
        ({}, PrunedSize(heads=3), "p.heads: 3 of 6 heads cannot be kept; keep 2, 4, 6: whole groups"),
        ({}, PrunedSize(heads=8), "p.heads: 8 of 6 heads cannot be kept"),
        # Llama's config wants the hidden size to be a multiple of the heads, whatever the size of a head.
        ({"num_attention_heads": 12, "num_key_value_heads": 12}, PrunedSize(heads=5), "keep 1, 2, 3, 4, 6, 8, 12"),
        ({"num_key_value_heads": 1}, PrunedSize(heads=3), "keep 6: whole groups"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], size: PrunedSize, message: str) -> None:
    from transformers import LlamaConfig

    values = {"hidden_size": 48, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    config = LlamaConfig(**{**values, "num_key_value_heads": GROUPS, **changes})
    with pytest.raises(UserError, match=message):
        check_pruning(config, size, "p")


def test_other_families_are_refused() -> None:
    from transformers import AutoConfig

    with pytest.raises(UserError, match="models of type gpt2 cannot be pruned; take one of gemma, "):
        check_pruning(AutoConfig.for_model("gpt2"), PrunedSize(layers=1), "train.prune")
