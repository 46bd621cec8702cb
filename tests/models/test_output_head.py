from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.models.language_model import LanguageModel, load_language_model, save_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {"head_dim": 32, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {"head_dim": 32, "final_logit_softcapping": None}),
    ("cohere", {"logit_scale": 0.0625}),
    ("cohere2", {"logit_scale": 0.25}),
    ("granite", {"logits_scaling": 8.0}),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 2}),
    ("phi", {}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
]


@pytest.mark.parametrize(("kind", "settings"), FAMILIES)
@torch.no_grad()
def test_logits_are_the_models_own(family: Callable[..., LanguageModel], kind: str, settings: dict[str, Any]) -> None:
    lm = family(kind, **settings)
    ids = torch.randint(0, 256, (3, 11), generator=torch.Generator().manual_seed(0))
    expected = lm.model(input_ids=ids).logits
    hidden = lm.decoder(input_ids=ids).last_hidden_state
    result = lm.logits(hidden)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lm.logits(hidden[:, 4:6]), expected[:, 4:6], atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.05


@pytest.mark.parametrize(("kind", "settings"), [("gemma2", {"head_dim": 32}), ("granite", {"logits_scaling": 8.0})])
def test_supported_heads_load(
    family: Callable[..., LanguageModel], tmp_path: Any, kind: str, settings: dict[str, Any]
) -> None:
    lm = family(kind, **settings)
    save_language_model(lm, tmp_path, "float32")
    loaded = load_language_model(tmp_path, TaskConfig(), "float32")
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded.model(ids).logits, lm.model(ids).logits)


def test_an_unknown_head_is_refused(family: Callable[..., LanguageModel], tmp_path: Any) -> None:
    """HyperCLOVA X multiplies by what Granite divides by, under one name."""
    save_language_model(family("hyperclovax", logits_scaling=8.0), tmp_path, "float32")
    with pytest.raises(UserError, match="models of type hyperclovax are not supported"):
        load_language_model(tmp_path, TaskConfig(), "float32")
