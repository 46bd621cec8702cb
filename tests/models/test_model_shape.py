"""A model's shape from its config alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.language_model import LanguageModel
from posttrain.models.shape import ModelShape, meta_model, model_shape, read_chat, read_config, resized_config
from posttrain.models.sources import DEMO_MODEL, locate
from posttrain.store.errors import UserError


def sizes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def test_the_meta_model_has_the_models_weight_shapes(tiny: LanguageModel, tiny_model: Path) -> None:
    config = read_config(str(tiny_model))
    skeleton = meta_model(config)
    assert all(weight.is_meta for weight in skeleton.parameters())
    assert sizes(skeleton) == sizes(tiny.model)
    assert model_shape(skeleton) == model_shape(tiny.model)
    assert model_shape(meta_model(read_config("tiny"))) == model_shape(skeleton)


def test_the_tokenizer_loads_without_the_model(tiny: LanguageModel, tiny_model: Path) -> None:
    for source in ("tiny", str(tiny_model)):
        chat = read_chat(source, read_config(source))
        assert chat.answer_ids("yes") == tiny.answer_ids("yes")
        assert chat.stop_ids == tiny.chat.stop_ids


def test_the_shape_needs_only_the_config(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    result = model_shape(meta_model(read_config(str(tmp_path))))
    assert result == ModelShape(family="llama", hidden=96, layers=2, vocabulary=261, tied=True)


@pytest.mark.slow
def test_the_shape_of_a_gguf_model(tmp_path: Path) -> None:
    source = locate(DEMO_MODEL, tmp_path)
    model = meta_model(read_config(source))
    result = model_shape(model)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert (result.hidden, result.layers, result.vocabulary, result.tied) == (576, 30, 49152, True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3", {"head_dim": 48}),
        ("gemma2", {"head_dim": 32}),
        ("phi3", {}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_the_shape_from_the_config_is_that_of_the_model(
    family: Callable[..., LanguageModel], kind: str, settings: dict[str, Any]
) -> None:
    lm = family(kind, **settings)
    result = model_shape(meta_model(lm.model.config))
    assert result == model_shape(lm.model)
    assert (result.layers, result.hidden, result.tied) == (2, 64, bool(lm.model.config.tie_word_embeddings))


def test_a_classifier_has_no_vocabulary(tiny_model: Path) -> None:
    result = model_shape(meta_model(read_config(str(tiny_model)), classifier=True))
    assert (result.vocabulary, result.tied) == (0, False)


@pytest.mark.slow
def test_no_model_is_a_one_line_error(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-knows-it"}))
    for call in (
        lambda: read_config(str(tmp_path)),
        lambda: read_config("nobody/nothing-of-this-name"),
        lambda: meta_model(AutoConfig.for_model("vit")),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)


def small_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    values = {"vocab_size": 50, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 4}
    return AutoConfig.for_model(family, **{**values, "intermediate_size": 80, "pad_token_id": 0, **changes})


@pytest.mark.parametrize(
    ("family", "before", "changes", "expected"),
    [
        ("llama", {}, {"hidden": 64, "heads": 4}, (4, 64, 4, 4, 16, 80)),
        ("llama", {"num_key_value_heads": 2}, {"heads": 12, "inner": 30}, (4, 48, 12, 2, 4, 30)),
        ("llama", {"num_key_value_heads": 2}, {"heads": 4, "kv_heads": 4, "layers": 7}, (7, 48, 4, 4, 12, 80)),
        # A head size of its own stays.
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 10}, {"hidden": 50, "layers": 2}, (2, 50, 6, 2, 10, 80)),
        ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 16}, {"layers": 9}, (9, 48, 6, 2, 16, 80)),
        ("gpt2", {}, {"hidden": 60, "heads": 4, "layers": 1, "inner": 33}, (1, 60, 4, 4, 15, 33)),
    ],
)
def test_a_resized_config_is_that_of_a_model(
    family: str, before: dict[str, int], changes: dict[str, int], expected: tuple[int, ...], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = small_config(family, **before)
    resized_config(config, "shape", **changes).save_pretrained(tmp_path)
    resized = AutoConfig.from_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_config(resized).eval()
    hidden, heads = resized.hidden_size, resized.num_attention_heads
    groups = getattr(resized, "num_key_value_heads", None) or heads
    inner = resized.n_inner if hasattr(resized, "n_inner") else resized.intermediate_size
    size = getattr(resized, "head_dim", None) or hidden // heads
    assert (resized.num_hidden_layers, hidden, heads, groups, size, inner) == expected
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 50)
    if (types := getattr(resized, "layer_types", None)) is not None:
        assert types == small_config(family, **before, num_hidden_layers=expected[0]).layer_types
    assert resized_config(config, "shape").to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("family", "before", "changes", "message"),
    [
        (
            "llama",
            {},
            {"hidden": 50},
            "s.hidden: a hidden size of 50 cannot be divided among 6 heads; give a multiple of",
        ),
        (
            "llama",
            {},
            {"heads": 5},
            "s.heads: a hidden size of 48 cannot be divided among 5 heads; give a multiple of 10",
        ),
        ("llama", {}, {"heads": 16}, "s.heads: a hidden size of 48 cannot be divided among 16 heads"),
        ("llama", {}, {"kv_heads": 4}, "s.kv_heads: 6 heads cannot share 4 key and value heads"),
        ("llama", {"num_key_value_heads": 3}, {"heads": 4}, "s.heads: 4 heads cannot share 3 key and value heads"),
        # The family's own demand, whatever the size of its heads.
        (
            "gemma2",
            {"num_key_value_heads": 2, "head_dim": 16},
            {"hidden": 50},
            "s: models of type gemma2 cannot have this",
        ),
        ("gpt2", {}, {"kv_heads": 2}, "s.kv_heads: models of type gpt2 have no groups of heads"),
        ("mamba", {}, {"heads": 2}, "s: models of type mamba have no shape that is known here"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    family: str, before: dict[str, int], changes: dict[str, int], message: str
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba") if family == "mamba" else small_config(family, **before)
    with pytest.raises(UserError, match=message):
        resized_config(config, "s", **changes)
