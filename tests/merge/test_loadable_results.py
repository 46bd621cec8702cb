"""What a merge writes can be loaded: all tensors of the config's model, in each family, and no others."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.merge.api import merge
from posttrain.models import loading
from posttrain.models.loading import check_architecture, check_loadable
from posttrain.models.tiny import byte_tokenizer
from posttrain.models.weight_files import read_headers
from posttrain.store.errors import UserError

NORM = re.compile(r"norm|ln_1")

_SIZES: dict[str, Any] = {
    **{"vocab_size": 261, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None},
}
_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}

_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 16, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "smollm3": {},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "hidden_size": None, "num_hidden_layers": None},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [1]},
    "gpt_oss": _EXPERTS,
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 48},
}


def _write(folder: Path, family: str) -> Path:
    sizes = {key: value for key, value in (_SIZES | _FAMILIES[family]).items() if value is not None}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    copy = Path(shutil.copytree(folder, folder.with_name("changed")))
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize("family", _FAMILIES)
def test_slices_of_a_family_load_with_each_layer_as_it_was(family: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", family)
    slices = [{"sources": [{"model": str(folder), "layer_range": span}]} for span in ([0, 3], [1, 4])]
    merge({"slices": slices}, tmp_path / "out")
    check_loadable(tmp_path / "out")
    before, after = AutoConfig.from_pretrained(folder), AutoConfig.from_pretrained(tmp_path / "out")
    order = [0, 1, 2, 1, 2, 3]
    assert after.num_hidden_layers == len(order)
    for key in ("layer_types", "no_rope_layers"):
        if (values := getattr(before, key, None)) is not None:
            assert getattr(after, key) == [values[layer] for layer in order]
    if family == "qwen3_moe":
        assert after.mlp_only_layers == [1, 3]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_a_result_that_would_not_load_is_refused_before_any_work(family: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())

    def refuse(model: Path, message: str) -> None:
        with pytest.raises(UserError, match=f"the result: {message}"):
            merge([model, model], tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refuse(_changed(folder, lambda weights: weights.pop(next(filter(NORM.search, weights)))), "1 weights are missing")
    shutil.rmtree(tmp_path / "changed")
    refuse(_changed(folder, lambda weights: weights.update({"h.0.none.weight": torch.ones(3)})), "1 tensor has no")
    shutil.rmtree(tmp_path / "changed")
    if "moe" in family:
        expert = re.compile(r"experts\.1\.gate_proj")
        refuse(_changed(folder, lambda weights: weights.pop(next(filter(expert.search, weights)))), "")
        shutil.rmtree(tmp_path / "changed")
    deeper = _changed(folder, lambda weights: None)
    count = "n_layer" if family == "gpt2" else "num_hidden_layers"
    (deeper / "config.json").write_text(json.dumps({**config, count: 5, "layer_types": None}))
    refuse(deeper, r"\d+ weights are missing, the first is (model\.layers|transformer\.h)\.4\.")


def test_an_untied_model_without_its_head_is_refused(make_model: Any, tmp_path: Path) -> None:
    untied = {"tie_word_embeddings": False}
    headless = make_model("headless", 1, config=untied)
    with pytest.raises(UserError, match=r"the first is lm_head\.weight"):
        merge([headless, headless], tmp_path / "out")
    head = load_file(headless / "model.safetensors")["model.embed_tokens.weight"]
    whole = make_model("whole", 2, config=untied, change=lambda weights: weights.update({"lm_head.weight": head}))
    with pytest.raises(UserError, match=r"tensor lm_head\.weight is in .*whole. and not in .*headless"):
        merge([whole, headless], tmp_path / "out")


def test_an_architecture_that_has_passed_is_not_built_again(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_model("whole", 1)
    config = json.loads((folder / "config.json").read_text())
    shapes = {name: header.shape for name, header in read_headers(folder).items()}
    built: list[Any] = []
    original = loading._from_pretrained
    monkeypatch.setattr(loading, "_from_pretrained", lambda *a, **b: built.append(a) or original(*a, **b))
    first = next(iter(shapes))
    missing = {name: shape for name, shape in shapes.items() if name != first}
    for _ in range(2):
        check_architecture(config, shapes, "here")
        with pytest.raises(UserError, match=r"^here: .*missing"):
            check_architecture(config, missing, "here")
        with pytest.raises(UserError, match=r"^there: "):
            check_architecture({**config, "num_hidden_layers": 9, "layer_types": None}, shapes, "there")
    assert len(built) == 1 + 2 * 2, "only what has passed is kept"
