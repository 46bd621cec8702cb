"""RegMean++ against a merge in float64 that follows the paper layer by layer, its cache, and families run by layers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_family import family, merge_file, weights_of, write_relative  # noqa: F401
from torch import Tensor, nn

from posttrain.merge import statistics_cache
from posttrain.merge.api import merge
from posttrain.merge.layerwise_model import LayerwiseModel
from posttrain.merge.recipe import Recipe
from posttrain.merge.statistics import Example, TokenSequence
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer, write_tiny_model
from posttrain.store.errors import UserError


def examples(name: str, count: int = 4) -> list[Example]:
    return [([{"role": "user", "content": f"{name} question {number}"}], f"{number * 37}") for number in range(count)]


DATA = {"a.jsonl": examples("a"), "b.jsonl": examples("another", 6)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrain" / statistics_cache.FOLDER


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers the layers that are run from now on."""
    numbers: list[int] = []
    run = LayerwiseModel.run

    def counted(self: Any, sequence: Any, layer: int, states: Any) -> Any:
        numbers.append(layer)
        return run(self, sequence, layer, states)

    monkeypatch.setattr(LayerwiseModel, "run", counted)
    return numbers


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` with an output head of its own, and ``a`` and ``b`` far from it."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("untied")
    write_tiny_model(root / "tied", layers=3)
    model: Any = AutoModelForCausalLM.from_pretrained(root / "tied", dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
    shutil.copytree(root / "tied", root / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(root / "base")
    for seed, name in enumerate("ab", 1):
        write_relative(root / name, root / "base", seed, scale=0.05)
    return root


def recipe(root: Path, **more: Any) -> Recipe:
    models = [{"model": str(root / name), "data": f"{name}.jsonl"} for name in "ab"]
    values = {"method": "regmean_plus_plus", "models": models, "dtype": "float32", **more}
    return Recipe.read(values, "recipe")


def least_squares(layers: list[Tensor], inputs: list[Tensor], weight: list[float], alpha: float) -> Tensor:
    grams = [factor * (rows.T @ rows) for rows, factor in zip(inputs, weight, strict=True)]
    shrunk = [alpha * gram + (1 - alpha) * gram.diag().diag() for gram in grams]
    products = sum(gram @ layer.T for gram, layer in zip(shrunk, layers, strict=True))
    return torch.linalg.solve(sum(shrunk), products).T


@torch.no_grad()
def merge_by_the_paper(root: Path, weight: list[float], alpha: float) -> dict[str, Tensor]:
    """Merges ``a`` and ``b``, in float64, with the layers of transformers called one by one."""
    lms = [load_language_model(root / name, TaskConfig(), "float32") for name in "ab"]
    models: list[Any] = [lm.model.double() for lm in lms]
    merged: Any = load_language_model(root / "a", TaskConfig(), "float32").model.double()
    shares = [factor / sum(weight) for factor in weight]
    parameters = [dict(model.named_parameters()) for model in models]
    for name, parameter in merged.named_parameters():
        parameter.copy_(sum(share * own[name] for share, own in zip(shares, parameters, strict=True)))
    rows = []
    for lm, name in zip(lms, "ab", strict=True):
        ids = [[*lm.prompt_ids(prompt), *lm.answer_ids(answer)][:-1] for prompt, answer in DATA[f"{name}.jsonl"]]
        rows.append([merged.model.embed_tokens(torch.tensor([part])) for part in ids])

    def run(model: Any, layer: int, states: Tensor) -> Tensor:
        angles = model.model.rotary_emb(states, torch.arange(states.shape[1])[None])
        return model.model.layers[layer](states, position_embeddings=angles)  # type: ignore[no-any-return]

    for layer in range(len(merged.model.layers)):
        linears = [n for n, module in merged.model.layers[layer].named_modules() if isinstance(module, nn.Linear)]
        read: list[dict[str, list[Tensor]]] = [{name: [] for name in linears} for _ in models]
        for model, states, own in zip(models, rows, read, strict=True):
            hooks = [
                model.model.layers[layer]
                .get_submodule(name)
                .register_forward_hook(lambda _m, x, _y, own=own, name=name: own[name].append(x[0][0]))
                for name in linears
            ]
            for state in states:
                run(model, layer, state)
            for hook in hooks:
                hook.remove()
        for name in linears:
            parts = [model.model.layers[layer].get_submodule(name).weight for model in models]
            inputs = [torch.cat(own[name]) for own in read]
            solution = least_squares(parts, inputs, weight, alpha)
            merged.model.layers[layer].get_submodule(name).weight.copy_(solution)
        rows = [[run(merged, layer, state) for state in states] for states in rows]
    if not merged.config.tie_word_embeddings:
        inputs = [torch.cat([merged.model.norm(state)[0] for state in states]) for states in rows]
        heads = [model.lm_head.weight for model in models]
        merged.lm_head.weight.copy_(least_squares(heads, inputs, weight, alpha))
    return {name: parameter.detach() for name, parameter in merged.named_parameters()}


def test_it_is_the_merge_of_the_paper(untied: Path, tmp_path: Path) -> None:
    weight, alpha = [1.0, 3.0], 0.5
    expected = merge_by_the_paper(untied, weight, alpha)
    options = {"parameters": {"weight": weight, "alpha": alpha}}
    merge(recipe(untied, **options), tmp_path / "plus", data=DATA)
    merge(recipe(untied, method="regmean", **options), tmp_path / "plain", data=DATA)
    plus, plain = weights_of(tmp_path / "plus"), weights_of(tmp_path / "plain")
    assert plus.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (plus[name] - tensor).abs().max() <= 2e-4 * tensor.abs().max(), name
    # The first layer reads the merged embedding in place of the model's own, and later ones the merged layers.
    last = "model.layers.2.mlp.down_proj.weight"
    assert (plain[last] - expected[last]).abs().max() > 0.01 * expected[last].abs().max()
    statistics: Any = merge_file(tmp_path / "plus")["statistics"]
    assert [(entry["statistic"], entry["data"], entry["examples"]) for entry in statistics] == [
        ("merged_gram", "a.jsonl", 4),
        ("merged_gram", "b.jsonl", 6),
    ]
    assert all(entry["tokens"] > entry["examples"] for entry in statistics)


def test_identical_models_give_themselves(family: Path, tmp_path: Path) -> None:  # noqa: F811
    models = [str(family / "a")] * 2
    merge({"models": models, "method": "regmean_plus_plus", "data": "a.jsonl"}, tmp_path / "out", data=DATA)
    merged, model = weights_of(tmp_path / "out"), weights_of(family / "a")
    assert all(torch.equal(merged[name], model[name]) for name in model)


def test_finished_layers_are_read_from_the_cache(
    family: Path,  # noqa: F811
    tmp_path: Path,
    runs: list[int],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = sum(len(part) for part in DATA.values())
    write = statistics_cache.write_statistics

    def killed_at_the_third(file: Path, statistics: Any) -> None:
        if len(list(cache.glob("*.json"))) == 2:
            raise KeyboardInterrupt
        write(file, statistics)

    with monkeypatch.context() as patch:
        patch.setattr("posttrain.merge.merged_grams.write_statistics", killed_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            merge(recipe(family), tmp_path / "one", data=DATA)
    assert not (tmp_path / "one").exists()
    # Two passes a layer: the models' own, and the merged one.
    assert runs == [*[0] * 2 * count, *[1] * 2 * count, *[2] * count]
    runs.clear()
    merge(recipe(family), tmp_path / "one", data=DATA)
    assert runs == [*[0] * count, *[1] * count, *[2] * 2 * count, *[3] * count], "no pass for known matrices"
    runs.clear()
    shutil.copytree(family, tmp_path / "moved")
    merge(recipe(tmp_path / "moved"), tmp_path / "two", data=DATA)
    assert runs == []
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    # An option changes the merged layers, and so the inputs of later ones.
    merge(recipe(family, parameters={"alpha": 0.5}), tmp_path / "three", data=DATA)
    assert len(runs) == 7 * count
    assert len(list(cache.glob("*.safetensors"))) == 8


def test_rules_choose_other_methods_for_layers(
    family: Path,  # noqa: F811
    tmp_path: Path,
    runs: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = [{"match": r"layers\.[23]\.", "method": "linear"}, {"match": r"layers\.1\.mlp", "method": "regmean"}]
    merge(recipe(family, layers=rules), tmp_path / "out", data=DATA)
    assert max(runs) == 1, "layers behind the last one that needs inputs are not run"
    models = [weights_of(family / name) for name in "ab"]
    merged = weights_of(tmp_path / "out")
    for name, tensor in merged.items():
        mean = (models[0][name] + models[1][name]) / 2
        solved = "layers.0." in name or "layers.1." in name
        if "proj" in name and solved:
            assert (tensor - mean).abs().max() > 1e-4, name
        else:
            torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)
    assert "plain mean" not in caplog.text


def test_a_stack_of_one_model_gives_its_layers(family: Path, tmp_path: Path) -> None:  # noqa: F811
    model = str(family / "a")
    slices = [
        {"sources": [{"model": model, "layer_range": [0, 3]}]},
        {"sources": [{"model": model, "layer_range": [first, first + 2]} for first in (1, 2)]},
    ]
    values = {"method": "regmean_plus_plus", "slices": slices, "data": "a.jsonl", "dtype": "float32"}
    merge(values, tmp_path / "out", data=DATA)
    merged, own = weights_of(tmp_path / "out"), weights_of(family / "a")
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        assert torch.equal(merged[f"model.layers.2.{part}.weight"], own[f"model.layers.2.{part}.weight"])
        mean = (own[f"model.layers.2.{part}.weight"] + own[f"model.layers.3.{part}.weight"]) / 2
        assert (merged[f"model.layers.4.{part}.weight"] - mean).abs().max() > 1e-4


def test_files_with_other_names_are_refused(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "eos_token_id": 1}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    values = {"method": "regmean_plus_plus", "models": [str(tmp_path / "a")], "data": "a.jsonl"}
    with pytest.raises(UserError, match=r"no tensor of the name of the parameter model\.layers\.0\.mlp.*; use regmean"):
        merge(values, tmp_path / "out", data=DATA)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4, "layer_types": None},
    "olmo2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_layers_one_by_one_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    options: Any = sizes | {"num_attention_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = AutoConfig.for_model(kind, **{k: v for k, v in (options | FAMILIES[kind]).items() if v is not None})
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = model.state_dict()
    layerwise = LayerwiseModel(tmp_path)
    layerwise.load(None, weights.get)
    sequence, states = TokenSequence(list(range(5, 25)), 1), None
    for layer, names in enumerate(layerwise.layers):
        assert names
        layerwise.load(layer, weights.get)
        states = layerwise.run(sequence, layer, states)
        layerwise.unload(layer)
        assert all(parameter.is_meta for parameter in layerwise.parameters(layer).values())
    result = layerwise.last_states(sequence, states)
    ids = torch.tensor([sequence.ids[:-1]])
    with torch.no_grad():
        expected = model.base_model(input_ids=ids).last_hidden_state[0]
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=0, atol=1e-5)
    assert layerwise.outside
