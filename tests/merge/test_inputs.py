"""Where the models of a merge come from, and what they may differ in."""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.merge import inputs
from posttrain.merge.api import MERGE_FILE, merge
from posttrain.merge.sources import ModelFolder
from posttrain.merge.vocabulary_view import VocabularyView
from posttrain.models.sources import DEMO_MODEL
from posttrain.store.errors import UserError, WorkError

Read = Callable[[Path], dict[str, Tensor]]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _mean(read: Read, *folders: Path) -> dict[str, Tensor]:
    models = [read(folder) for folder in folders]
    return {name: sum(model[name].float() for model in models) / len(models) for name in models[0]}  # type: ignore[misc]


@pytest.fixture
def s3_model(s3_server: str, make_model: Any) -> tuple[str, Path]:
    """A model's folder in a bucket, and the same on the disk."""
    import boto3

    folder = make_model("remote", 2, shards=2)
    prefix = f"{uuid.uuid4().hex}/folder"
    (folder / "training.bin").write_bytes(b"a pickle")
    for file in folder.iterdir():
        boto3.client("s3").upload_file(str(file), "posttrain", f"{prefix}/{file.name}")
    return f"s3://posttrain/{prefix}", folder


def test_a_model_in_an_object_store(
    s3_model: tuple[str, Path], make_model: Any, read_weights: Read, tmp_path: Path
) -> None:
    url, folder = s3_model
    other = make_model("other", 3)
    merge([url, other], tmp_path / "out", seed=1)
    merge([folder, other], tmp_path / "expected", seed=1)
    result, expected = read_weights(tmp_path / "out"), read_weights(tmp_path / "expected")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "out" / MERGE_FILE).read_text())["models"][url] == url
    assert not (tmp_path / "out" / "training.bin").exists()
    assert not list(tmp_path.glob(".posttrain*"))


def test_a_download_that_is_cut_off_is_not_merged(
    s3_model: tuple[str, Path], make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = inputs.open_file_system

    def open_cut_off(*arguments: Any) -> Any:
        files = original(*arguments)
        whole = files.get_file

        def get_file(path: str, target: str) -> None:
            whole(path, target)
            if target.endswith(".safetensors"):
                os.truncate(target, Path(target).stat().st_size - 1)

        monkeypatch.setattr(files, "get_file", get_file)
        return files

    monkeypatch.setattr(inputs, "open_file_system", open_cut_off)
    with pytest.raises(UserError, match=r"model.*\.safetensors was changed while it was downloaded"):
        merge([s3_model[0], make_model("other", 3)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_in_the_object_store(
    s3_server: str, make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_model("other", 3)
    for url, text in (
        ("s3://posttrain/nowhere", "holds no model"),
        ("s3://no-such-bucket/model", "no-such-bucket/model: "),
        ("other://bucket/model", "`other://` is not known"),
    ):
        with pytest.raises(UserError, match=text):
            merge([url, other], tmp_path / "out")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(WorkError, match="cannot be reached"):
        merge(["s3://posttrain/nowhere", other], tmp_path / "out")
    s3fs.S3FileSystem.clear_instance_cache()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_model_in_the_hubs_cache(
    make_model: Any, read_weights: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--somebody--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    model, other = make_model("model", 1), make_model("other", 2)
    model.rename(repository / "snapshots" / commit)
    merge(["somebody/model", other], tmp_path / "out")
    expected = _mean(read_weights, repository / "snapshots" / commit, other)
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in read_weights(tmp_path / "out").items())
    assert commit in json.loads((tmp_path / "out" / MERGE_FILE).read_text())["models"]["somebody/model"]
    with pytest.raises(UserError, match="`nobody/model` is not a folder, and the Hub does not give it"):
        merge(["nobody/model", other], tmp_path / "none")


@pytest.mark.slow
def test_a_gguf_file(smollm2: Path, read_weights: Read, tmp_path: Path) -> None:
    """The packaged file, merged alone: the model itself."""
    merge([DEMO_MODEL], tmp_path / "out")
    result, expected = read_weights(tmp_path / "out"), read_weights(smollm2)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    files = json.loads((tmp_path / "out" / MERGE_FILE).read_text())["models"]
    assert files[DEMO_MODEL] == DEMO_MODEL
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_a_file_that_is_no_gguf(make_model: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGML and more")
    with pytest.raises(UserError, match="is not a GGUF file"):
        merge([tmp_path / "model.gguf", make_model("other")], tmp_path / "out")


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_models_of_different_dtypes(first: torch.dtype, make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    second = torch.bfloat16 if first == torch.float32 else torch.float32
    models = [make_model("a", 1, dtype=first), make_model("b", 2, dtype=second)]
    merge(models, tmp_path / "out")
    expected = _mean(read_weights, *models)
    result = read_weights(tmp_path / "out")
    assert all(torch.equal(value, expected[name].to(first)) for name, value in result.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(first).removeprefix("torch.")
    # Of the base for methods on task vectors, whatever the models have; and as the recipe says.
    base = make_model("base", 3, dtype=torch.float16)
    merge(models, tmp_path / "vectors", method="task_arithmetic", base=base)
    assert {value.dtype for value in read_weights(tmp_path / "vectors").values()} == {torch.float16}
    merge({"models": [str(model) for model in models], "dtype": "float32"}, tmp_path / "wide")
    assert {value.dtype for value in read_weights(tmp_path / "wide").values()} == {torch.float32}


def test_a_tied_embedding_and_a_head_of_its_own(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    def with_head(weights: dict[str, Tensor]) -> None:
        weights[HEAD] = weights[EMBEDDING] * 3

    tied = make_model("tied", 1)
    own = make_model("own", 2, change=with_head, config={"tie_word_embeddings": False})
    for number, models in enumerate(([tied, own], [own, tied])):
        merge(models, tmp_path / f"out{number}")
        result = read_weights(tmp_path / f"out{number}")
        head = (read_weights(tied)[EMBEDDING].float() + read_weights(own)[HEAD].float()) / 2
        assert torch.equal(result[HEAD], head.bfloat16())
        assert json.loads((tmp_path / f"out{number}" / "config.json").read_text())["tie_word_embeddings"] is False
    # The task vector of a head begins at the embedding that the tied base has for one.
    merge([own], tmp_path / "vectors", method="task_arithmetic", base=tied)
    assert torch.equal(read_weights(tmp_path / "vectors")[HEAD], read_weights(own)[HEAD])
    merge([tied, tied], tmp_path / "both")
    assert HEAD not in read_weights(tmp_path / "both")
    assert json.loads((tmp_path / "both" / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("row", [None, 0, -1])
def test_a_stored_head_of_a_tied_model_is_dropped_only_if_it_equals_the_embedding(
    row: int | None, make_model: Any, read_weights: Read, tmp_path: Path
) -> None:
    def with_head(weights: dict[str, Tensor]) -> None:
        weights[HEAD] = weights[EMBEDDING].clone()
        if row is not None:
            weights[HEAD][row] += 1

    stored, ids = make_model("stored", 1, change=with_head), torch.arange(5, 25)[None]
    merge([stored], tmp_path / "out")
    assert (HEAD in read_weights(tmp_path / "out")) == (row is not None)
    expected, result = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        for folder in (stored, tmp_path / "out")
    )
    assert torch.equal(result, expected)


def test_slices_whose_last_models_have_a_head(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    def with_head(weights: dict[str, Tensor]) -> None:
        weights[HEAD] = weights[EMBEDDING] * 3

    tied = make_model("tied", 1)
    own = make_model("own", 2, change=with_head, config={"tie_word_embeddings": False})
    slices = [{"sources": [{"model": str(model), "layer_range": [0, 2]}]} for model in (tied, own)]
    merge({"slices": slices}, tmp_path / "out")
    result = read_weights(tmp_path / "out")
    assert torch.equal(result[HEAD], read_weights(own)[HEAD])
    assert torch.equal(result[EMBEDDING], read_weights(tied)[EMBEDDING])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (4, False)


def test_a_folder_with_a_plus_sign(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    model = make_model("model+v2", 1)
    merge([model], tmp_path / "out")
    assert torch.equal(read_weights(tmp_path / "out")[EMBEDDING], read_weights(model)[EMBEDDING])


def test_only_what_belongs_to_the_model_is_copied(make_model: Any, tmp_path: Path) -> None:
    model = make_model("model", 1)
    for name in ("optimizer.pt", "pytorch_model.bin", "trainer_state.json", "README.md", ".hidden", "LICENSE"):
        (model / name).write_bytes(b"{}")
    (model / "checkpoint-100").mkdir()
    (model / "checkpoint-100" / "config.json").write_text("{}")
    merge([model], tmp_path / "out")
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "LICENSE", MERGE_FILE),
    }


def test_the_shapes_of_a_model_are_built_once(make_model: Any) -> None:
    # Each tensor asks for them: built at each call, they take the square of the number of tensors.
    model = ModelFolder("model", make_model("model"))
    view = VocabularyView(model, np.arange(8), [])
    assert model.shapes() is model.shapes()
    assert view.shapes() is view.shapes()
    model.close()
