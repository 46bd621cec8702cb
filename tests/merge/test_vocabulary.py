"""Vocabularies that differ: rows are matched by the token's text."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.merge.api import merge
from posttrain.merge.sources import HEAD, ModelFolder
from posttrain.merge.vocabulary import match_vocabularies
from posttrain.merge.vocabulary_view import VocabularyView
from posttrain.store.errors import UserError

EMBEDDING = "model.embed_tokens.weight"

Read = Callable[[Path], dict[str, Tensor]]


def _add_tokens(folder: Path, tokens: Sequence[str], special: bool = False) -> dict[str, int]:
    """Adds tokens to a folder's tokenizer; returns the whole vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(tokens), special_tokens=special)
    tokenizer.save_pretrained(folder)
    return dict(tokenizer.get_vocab())


def _rows(count: int, first: float = 1000.0) -> Callable[[dict[str, Tensor]], None]:
    """Returns a change that adds rows of 1000, 1001, ... to the embedding."""

    def change(weights: dict[str, Tensor]) -> None:
        embedding = weights[EMBEDDING]
        new = torch.arange(count)[:, None] + torch.full((count, embedding.shape[1]), first)
        weights[EMBEDDING] = torch.cat([embedding, new.to(embedding.dtype)])

    return change


@pytest.fixture
def models(make_model: Any) -> Callable[..., list[Path]]:
    """Returns a function that writes models with the given added tokens, whose rows are 1000, 1001 ... and 2000 ..."""

    def make(*added: Sequence[str], padding: int = 0) -> list[Path]:
        folders = []
        for number, tokens in enumerate(added):
            count = len(tokens) + padding
            config = {"vocab_size": 261 + count}
            change = _rows(count, 1000.0 * (number + 1))
            folder = make_model(f"m{number}", number, dtype=torch.float32, change=change, config=config)
            if tokens:
                _add_tokens(folder, tokens)
            folders.append(folder)
        return folders

    return make


def _loads(folder: Path, text: str) -> tuple[list[str], torch.Size]:
    """Loads the model and its tokenizer; returns the tokens of a text, and the shape of the logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    ids = tokenizer(text)["input_ids"]
    return tokenizer.convert_ids_to_tokens(ids), model(torch.tensor([ids])).logits.shape


@pytest.mark.slow
def test_a_union_holds_every_models_tokens(models: Any, read_weights: Read, tmp_path: Path) -> None:
    first, second, third = models(["<a>", "<b>"], ["<b>", "<c>"], [])
    recipe = {"models": [str(path) for path in (first, second, third)], "tokenizer": "union"}
    merge(recipe, tmp_path / "out")
    result = read_weights(tmp_path / "out")[EMBEDDING]
    assert result.shape == (264, 96)
    # <a>: the first model's, as the others lack it; <b>: the third lacks it and has the first one's; <c>: all have the
    # second one's, the only one that there is.
    expected = [1000.0, (1001 + 2000 + 1001) / 3, 2001.0]
    assert result[261:].mean(1).tolist() == pytest.approx(expected)
    old = [read_weights(path)[EMBEDDING][:261] for path in (first, second, third)]
    assert torch.allclose(result[:261], sum(old) / 3, atol=1e-7)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (264, 257)
    tokens, logits = _loads(tmp_path / "out", "x<a><c>y<b>")
    assert tokens == ["x", "<a>", "<c>", "y", "<b>"]
    assert logits == (1, 5, 264)


@pytest.mark.slow
def test_a_token_that_only_others_have_has_their_average(models: Any, read_weights: Read, tmp_path: Path) -> None:
    base, second, third = models([], ["<b>"], ["<x>", "<b>"])
    recipe = {"base": str(base), "models": [str(second), str(third)], "method": "task_arithmetic", "tokenizer": "union"}
    merge(recipe | {"parameters": {"weight": [0.5, 0.25]}}, tmp_path / "out")
    result = read_weights(tmp_path / "out")[EMBEDDING]
    # <b>: 2000 and 3001, whose mean is the base's; <x>: only the third one's, so that no task vector is left.
    mean = (2000 + 3001) / 2
    assert result[261:].mean(1).tolist() == pytest.approx([mean + 0.5 * (2000 - mean) + 0.25 * (3001 - mean), 3000.0])
    assert _loads(tmp_path / "out", "<x><b>")[0] == ["<x>", "<b>"]


@pytest.mark.slow
def test_the_bases_tokenizer_is_the_default(
    models: Any, read_weights: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = models(["<a>", "<b>"], ["<b>", "<c>"])
    with caplog.at_level(logging.WARNING):
        merge([first, second], tmp_path / "out")
    assert "1 of its tokens are not in the result's tokenizer, the first is '<c>'" in caplog.text
    assert "lacks 1 row of tokens" in caplog.text
    result = read_weights(tmp_path / "out")[EMBEDDING]
    assert result[261:].mean(1).tolist() == [1000.0, (1001 + 2000) / 2]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (first / file).read_bytes()


@pytest.mark.slow
def test_the_tokenizer_of_a_named_model(
    models: Any, read_weights: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = models(["<a>", "<b>"], ["<b>", "<c>"])
    for file in ("config.json", "generation_config.json"):
        content = json.loads((second / file).read_text())
        (second / file).write_text(json.dumps(content | {"eos_token_id": 262}))
    recipe = {"models": [str(first), str(second)], "tokenizer": str(second)}
    merge(recipe, tmp_path / "out")
    result = read_weights(tmp_path / "out")[EMBEDDING]
    assert result[261:].mean(1).tolist() == [(1001 + 2000) / 2, 2001.0]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / file).read_text())["eos_token_id"] == 262
    with pytest.raises(UserError, match="`m3` is not one of the models"):
        merge(recipe | {"tokenizer": "m3"}, tmp_path / "none")


@pytest.mark.slow
def test_padded_rows_are_matched_by_number(models: Any, read_weights: Read, tmp_path: Path) -> None:
    """An embedding that is padded to a multiple of 64, say, and one that is not."""
    first, second = models([], [], padding=3)
    short = read_weights(second)
    short[EMBEDDING] = short[EMBEDDING][:262]
    from safetensors.torch import save_file

    save_file(short, second / "model.safetensors")
    merge([first, second], tmp_path / "padded")
    assert read_weights(tmp_path / "padded")[EMBEDDING][261:].mean(1).tolist() == [1500.0, 1001.0, 1002.0]
    merge([second, first], tmp_path / "short")
    assert read_weights(tmp_path / "short")[EMBEDDING][261:].mean(1).tolist() == [1500.0]
    # In a union a new token takes the first padded row.
    _add_tokens(second, ["<new>"])
    merge({"models": [str(first), str(second)], "tokenizer": "union"}, tmp_path / "union")
    result = read_weights(tmp_path / "union")[EMBEDDING]
    assert result[261:].mean(1).tolist() == [2000.0, 1001.0, 1002.0]
    assert _loads(tmp_path / "union", "<new>") == (["<new>"], (1, 1, 264))


@pytest.mark.slow
def test_tokens_in_another_order(models: Any, read_weights: Read, tmp_path: Path) -> None:
    """A model whose tokens have other numbers is the same model."""
    (model,) = models([])
    twin = tmp_path / "twin"
    merge([model], twin)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tokenizer = json.loads((twin / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: int(order[number]) for token, number in vocabulary.items()}
    (twin / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = read_weights(twin)
    weights[EMBEDDING][order] = read_weights(model)[EMBEDDING][:256]
    weights[HEAD] = weights[EMBEDDING] * 2
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    from safetensors.torch import save_file

    save_file(weights, twin / "model.safetensors")
    merge([model, twin], tmp_path / "out")
    result, expected = read_weights(tmp_path / "out"), read_weights(model)
    assert torch.equal(result[EMBEDDING], expected[EMBEDDING])
    assert torch.allclose(result[HEAD], expected[EMBEDDING] * 1.5)
    with pytest.raises(UserError, match=r"the tokenizers of .* differ beyond added tokens, and one tokenizer cannot"):
        merge({"models": [str(model), str(twin)], "tokenizer": "union"}, tmp_path / "none")


def _edit_tokenizer(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    edit(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_unions_that_are_refused(make_model: Any, tmp_path: Path) -> None:
    first, second = make_model("first", 1), make_model("second", 2)

    def refused(text: str) -> None:
        with pytest.raises(UserError, match=text):
            merge({"models": [str(first), str(second)], "tokenizer": "union"}, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    original = (second / "tokenizer.json").read_text()
    new = {"id": 261, "content": "<new>"}
    _edit_tokenizer(second, lambda t: (t["added_tokens"].append(new), t["model"].update(merges=["a b"])))
    refused("the tokenizers of `.*second` and `.*first` differ beyond added tokens")
    (second / "tokenizer.json").write_text(original)
    _edit_tokenizer(second, lambda t: (t["added_tokens"].append(new), t["model"].update(type="Unigram")))
    refused("differ beyond added tokens")


def test_models_of_different_vocabularies_do_not_merge(make_model: Any, tmp_path: Path) -> None:
    first, second = make_model("first", 1), make_model("second", 2)
    _edit_tokenizer(
        second, lambda t: t["model"].update(vocab={f"w{n}": number for n, number in t["model"]["vocab"].items()})
    )
    with pytest.raises(UserError, match="has only 5 of the 261 tokens of the result"):
        merge([first, second], tmp_path / "out")


def test_other_rows_without_a_tokenizer(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    first, second = make_model("first", 1, change=_rows(2)), make_model("second", 2)
    (second / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match=r"`.*second` has 261 rows of tokens, `.*first` has 263, and `.*second` holds no"
    ):
        merge([first, second], tmp_path / "out")
    # With as many rows, the numbers are taken to mean the same.
    same = make_model("same", 3)
    merge([same, second], tmp_path / "same-out")
    mean = (read_weights(same)[EMBEDDING].float() + read_weights(second)[EMBEDDING].float()) / 2
    assert torch.equal(read_weights(tmp_path / "same-out")[EMBEDDING], mean.bfloat16())


def test_the_same_vocabulary_costs_nothing(make_model: Any) -> None:
    sources = {(name, None): ModelFolder(name, make_model(name)) for name in ("first", "second")}
    _edit_tokenizer(sources["second", None].folder, lambda t: None)  # other bytes
    matched = match_vocabularies(sources, ("first", None))
    assert matched.sources == sources
    for source in sources.values():
        source.close()


class _Rows(ModelFolder):
    """A source of one embedding whose rows are numbers."""

    def __init__(self, values: Sequence[float], columns: int) -> None:
        self.name, self.folder, self.tokenizer_folder, self.location, self.config = "rows", Path(), Path(), "", {}
        self._values = torch.tensor(values)[:, None].expand(len(values), columns).contiguous()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {EMBEDDING: tuple(self._values.shape)}

    def dtype(self, tensor: str) -> torch.dtype:
        return torch.float32

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        out.copy_(self._values.reshape(-1)[start : start + len(out)])


@given(data=st.data(), columns=st.sampled_from([1, 7, 40_000]), count=st.integers(1, 12))
@settings(max_examples=25)
def test_any_order_of_rows_is_read_in_any_parts(data: Any, columns: int, count: int) -> None:
    """Against rows that are looked up one by one; the blocks of 40,000 columns hold one row, those of 1 all of them."""
    maps = []
    for _ in range(3):
        maps.append(torch.tensor(data.draw(st.lists(st.integers(-1, 5), min_size=count, max_size=count))).numpy())
    values = [[100.0 * model + row for row in range(6)] for model in range(3)]
    donors = [(_Rows(own, columns), rows) for own, rows in zip(values, maps, strict=True)]
    view = VocabularyView(donors[2][0], maps[2], donors)
    expected = []
    for row in range(count):
        held = [values[model][maps[model][row]] if maps[model][row] >= 0 else None for model in range(3)]
        others = [value for value in held[1:] if value is not None]
        fallback = held[0] if held[0] is not None else sum(others) / max(len(others), 1)
        expected.append(held[2] if held[2] is not None else fallback)
    cut = data.draw(st.integers(0, count))
    parts = [torch.full(((end - begin) * columns,), -1.0) for begin, end in ((0, cut), (cut, count))]
    for start, part in zip((0, cut), parts, strict=True):
        view.read(EMBEDDING, start * columns, part)
    known = [any(rows[row] >= 0 for rows in maps) for row in range(count)]
    result = torch.cat(parts).view(count, columns)
    for row in range(count):
        if known[row]:  # a row that no model has is refused before
            assert (result[row] == expected[row]).all()
