"""RegMean of GPT-2's matrices and of fused experts against least squares on the inputs of each module."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_family import weights_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.merge.api import merge
from posttrain.merge.gram_matrices import GramMatrices, experts_apart
from posttrain.merge.statistics import Example
from posttrain.models.language_model import LanguageModel, load_language_model
from posttrain.models.task import TaskConfig
from posttrain.models.tiny import byte_tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 1, "bos_token_id": 1},
    "mixtral": {**SIZES, **HEADS, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **{**SIZES, **HEADS, "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
        **{"head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
}


def examples(name: str, count: int) -> list[Example]:
    return [([{"role": "user", "content": f"{name} {number**4} {name}"}], f"{number * 37}") for number in range(count)]


DATA = {"a.jsonl": examples("a", 12), "b.jsonl": examples("another", 9)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Returns a function that writes ``a`` and ``b`` of a family."""

    def write(kind: str, **options: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        tokenizer = byte_tokenizer()
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **FAMILIES[kind], **options)
        for seed, name in enumerate("ab"):
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(config).float()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        return tmp_path

    return write


def merged(root: Path, method: str = "regmean", **options: Any) -> dict[str, Tensor]:
    models = [{"model": str(root / name), "data": f"{name}.jsonl"} for name in "ab"]
    values = {"method": method, "models": models, "dtype": "float32", "parameters": options}
    merge(values, root / f"out-{method}", data=DATA)
    return weights_of(root / f"out-{method}")


def loaded(root: Path) -> list[LanguageModel]:
    return [load_language_model(root / name, TaskConfig(), "float32") for name in "ab"]


@torch.no_grad()
def module_inputs(lm: LanguageModel, module: str, data: str) -> list[tuple[Any, ...]]:
    """Returns the arguments of each call of a module on a file of records."""
    calls: list[tuple[Any, ...]] = []
    hook = lm.model.get_submodule(module).register_forward_pre_hook(lambda _module, inputs: calls.append(inputs))
    for prompt, answer in DATA[data]:
        lm.model(input_ids=torch.tensor([[*lm.prompt_ids(prompt), *lm.answer_ids(answer)][:-1]]))
    hook.remove()
    return calls


def least_squares(layers: list[Tensor], inputs: list[Tensor], alpha: float) -> np.ndarray:
    """Returns the layer [outputs, inputs] that solves the normal equations, in float64."""
    grams = [(rows.double().T @ rows.double()).numpy() for rows in inputs]
    shrunk = [alpha * gram + (1 - alpha) * np.diag(np.diag(gram)) for gram in grams]
    products = sum(gram @ layer.double().numpy().T for gram, layer in zip(shrunk, layers, strict=True))
    return np.asarray(np.linalg.solve(sum(shrunk), products).T)


def assert_close(result: Tensor, expected: np.ndarray, mean: Tensor) -> None:
    size = np.abs(expected).max()
    assert np.abs(result.numpy() - expected).max() <= 2e-4 * size
    assert np.abs(mean.numpy() - expected).max() > 0.02 * size, "and the mean is not"


@pytest.mark.parametrize(("prefix", "block"), [("transformer.", 1 << 16), ("", 100)])
def test_the_matrices_of_gpt2(make: Any, monkeypatch: pytest.MonkeyPatch, prefix: str, block: int) -> None:
    monkeypatch.setattr("posttrain.merge.sources.BLOCK", block)
    root = make("gpt2")
    models = loaded(root)
    if not prefix:  # as the files of the Hub
        for name in "ab":
            file = root / name / "model.safetensors"
            weights = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
            save_file(weights, file, {"format": "pt"})
    result = merged(root, alpha=0.9)
    # c_proj is square, so that its shape does not show which dimension is that of the inputs.
    for module in ("h.0.attn.c_attn", "h.1.attn.c_proj", "h.1.mlp.c_fc", "h.0.mlp.c_proj"):
        inputs = [
            torch.cat([call[0][0] for call in module_inputs(lm, f"transformer.{module}", f"{name}.jsonl")])
            for lm, name in zip(models, "ab", strict=True)
        ]
        layers = [lm.model.get_submodule(f"transformer.{module}").weight.detach().T for lm in models]
        expected = least_squares(layers, inputs, 0.9)
        name = f"{prefix}{module}.weight"
        assert_close(result[name].T, expected, (layers[0] + layers[1]).double() / 2)
    for word in ("wpe", "h.1.ln_1"):
        parts = [lm.model.state_dict()[f"transformer.{word}.weight"].double() for lm in models]
        torch.testing.assert_close(result[f"{prefix}{word}.weight"], (parts[0] + parts[1]) / 2, rtol=0, atol=1e-6)


def routed(calls: list[tuple[Any, ...]], expert: int) -> Tensor:
    """Returns the tokens that calls of a module of experts send to one of them."""
    return torch.cat([states[(index == expert).any(-1)] for states, index, _ in calls])


@pytest.mark.parametrize(
    ("kind", "block", "names"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_the_experts_of_a_mixture(
    make: Any, caplog: pytest.LogCaptureFixture, kind: str, block: str, names: tuple[str, str, str]
) -> None:
    root = make(kind)
    result = merged(root, alpha=0.9)
    models = loaded(root)
    stored = [weights_of(root / name) for name in "ab"]
    calls = [module_inputs(lm, "model.layers.1.mlp.experts", f"{n}.jsonl") for lm, n in zip(models, "ab", strict=True)]
    for expert in range(3):
        prefix = f"model.layers.1.{block}.experts.{expert}"
        inputs = [routed(part, expert).double() for part in calls]
        assert all(map(len, inputs))
        gates, ups, downs = ([own[f"{prefix}.{name}.weight"] for own in stored] for name in names)
        inner = [
            torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
            for rows, gate, up in zip(inputs, gates, ups, strict=True)
        ]
        for name, layers, rows in zip(names, (gates, ups, downs), (inputs, inputs, inner), strict=True):
            mean = (layers[0] + layers[1]) / 2
            assert_close(result[f"{prefix}.{name}.weight"], least_squares(layers, rows, 0.9), mean)
    router = [torch.cat([call[0] for call in part]) for part in calls]
    gates = [own[f"model.layers.1.{block}.gate.weight"] for own in stored]
    mean = (gates[0] + gates[1]) / 2
    assert_close(result[f"model.layers.1.{block}.gate.weight"], least_squares(gates, router, 0.9), mean)
    assert "plain mean" not in caplog.text
    for lm in models:
        assert lm.model.get_experts_implementation()[""] != "eager"
        with experts_apart(lm.model):
            assert lm.model.get_experts_implementation()[""] == "eager"
        assert lm.model.get_experts_implementation()[""] != "eager"


def test_products_with_other_tensors_and_parts_do_not_count() -> None:
    weight = torch.randn(4, 4)
    grams = GramMatrices({"weight": weight})
    inputs = torch.randn(7, 4)
    with grams:
        torch.nn.functional.linear(inputs, weight[:2])
        torch.nn.functional.linear(inputs, weight.T)
        torch.nn.functional.linear(inputs, torch.randn(4, 4))
    assert not grams.tensors()
    with grams:
        torch.nn.functional.linear(input=inputs, weight=weight)
    torch.testing.assert_close(grams.tensors()["weight"], inputs.T @ inputs)
    assert not grams.inputs_first
    with grams:
        torch.addmm(torch.zeros(4), inputs, weight)
    assert grams.inputs_first == {"weight"}
    torch.testing.assert_close(grams.tensors()["weight"], 2 * inputs.T @ inputs)
