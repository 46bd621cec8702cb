"""Merges whose result is a LoRA adapter: extraction, concatenation and compression, against peft."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_family import merge_file
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.merge.api import merge
from posttrain.merge.config import MergeConfig
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow  # peft and transformers are loaded

Read = Callable[[Path], dict[str, Tensor]]


def _applied(base: Path, adapter: Path) -> dict[str, Tensor]:
    """Returns the weights that peft makes of a model and an adapter, float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    return {name: value.detach() for name, value in model.merge_and_unload().state_dict().items()}


def _assert_near(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, value in expected.items():
        difference = (result[name].double() - value.double()).abs().max()
        assert difference <= tolerance, f"{name}: {difference:.2g}"


def _with_bias(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if "self_attn" in name]:
        weights[name.replace(".weight", ".bias")] = torch.full((len(weights[name]),), 0.25)


def test_full_rank_gives_the_model_back(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    base = make_model("base", dtype=torch.float32)
    model = make_model("model", 1, 0.02, torch.float32)
    result = merge([model], tmp_path / "out", method="extract_lora", base=base, rank=10_000)
    assert result.adapter is not None
    assert result.adapter["energy"] == pytest.approx(1, abs=1e-9)
    applied, expected = _applied(base, tmp_path / "out"), read_weights(model)
    _assert_near(applied, expected)
    # The head is the embedding's, in the adapted model too.
    assert torch.equal(applied["lm_head.weight"], applied["model.embed_tokens.weight"])
    # Our own reading of the adapter gives the same.
    merge([f"{base}+{tmp_path / 'out'}"], tmp_path / "whole")
    _assert_near(read_weights(tmp_path / "whole"), expected)


def test_a_trained_adapter_is_recovered_at_its_rank(
    make_model: Any, make_adapter: Any, read_weights: Read, tmp_path: Path
) -> None:
    base = make_model("base", dtype=torch.float32)
    make_adapter(base, "adapter", r=4, lora_alpha=8, rank_pattern={"v_proj": 2}, target_modules=["q_proj", "v_proj"])
    model = tmp_path / "adapter-merged"
    merge([model], tmp_path / "out", method="extract_lora", base=base, energy=0.99999)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert config["target_modules"] == ["q_proj", "v_proj"]
    ranks = {f"{layer}.{name}": rank for layer in layers for name, rank in (("q_proj", 4), ("v_proj", 2))}
    assert {name: config["rank_pattern"].get(name, config["r"]) for name in ranks} == ranks
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert config["r"] == config["lora_alpha"]
    assert config["modules_to_save"] is None
    expected = read_weights(model)
    _assert_near(_applied(base, tmp_path / "out"), expected)
    kept = merge_file(tmp_path / "out")["adapter"]
    assert isinstance(kept, dict)
    assert kept["relative_error"] < 1e-4
    assert kept["unchanged"] == len(expected) - len(ranks)
    assert kept["saved_whole"] == []
    assert {name: matrix["rank"] for name, matrix in kept["matrices"].items()} == ranks


def test_energy_is_that_of_the_singular_values(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    base, model = make_model("base", dtype=torch.float32), make_model("model", 1, 0.02, torch.float32)
    merge([model], tmp_path / "out", method="extract_lora", base=base, energy=0.6, rank=1000)
    before, after = read_weights(base), read_weights(model)
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    summary = merge_file(tmp_path / "out")["adapter"]
    assert isinstance(summary, dict)
    total = missed = 0.0
    for module, matrix in summary["matrices"].items():
        change = after[f"{module}.weight"].double() - before[f"{module}.weight"].double()
        squares = torch.linalg.svdvals(change).square()
        shares = squares.cumsum(0) / squares.sum()
        assert matrix["rank"] == 1 + int((shares < 0.6).sum())
        factors = [weights[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "BA"]
        error = float((change - factors[0] @ factors[1]).square().sum())
        assert matrix["energy"] == pytest.approx(float(shares[matrix["rank"] - 1]), abs=1e-5)
        assert matrix["relative_error"] == pytest.approx((error / float(squares.sum())) ** 0.5, rel=1e-4)
        total, missed = total + float(squares.sum()), missed + error
    assert summary["energy"] == pytest.approx(1 - missed / total, abs=1e-6)
    assert summary["relative_error"] == pytest.approx((missed / total) ** 0.5, rel=1e-4)


def test_other_tensors_are_saved_or_dropped_and_named(
    make_model: Any, read_weights: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"tie_word_embeddings": False, "attention_bias": True}

    def change(weights: dict[str, Tensor]) -> None:
        _with_bias(weights)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    def changed(weights: dict[str, Tensor]) -> None:
        change(weights)
        weights["model.layers.0.self_attn.q_proj.bias"] += 0.5
        weights["model.layers.1.self_attn.k_proj.bias"] += 0.5
        weights["model.layers.0.self_attn.q_proj.weight"] += 0.125
        weights["lm_head.weight"][3] += 0.25
        weights["model.layers.1.input_layernorm.weight"] += 0.5

    base = make_model("base", dtype=torch.float32, change=change, config=config)
    model = make_model("model", dtype=torch.float32, change=changed, config=config)
    with caplog.at_level(logging.WARNING, "posttrain"):
        merge([model], tmp_path / "out", method="extract_lora", base=base)
    assert "3 changed tensors are saved whole" in caplog.text
    adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert adapter["bias"] == "lora_only"
    assert adapter["target_modules"] == ["lm_head", "model.layers.0.self_attn.q_proj"]
    assert set(adapter["modules_to_save"]) == {"model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm"}
    _assert_near(_applied(base, tmp_path / "out"), read_weights(model))
    with caplog.at_level(logging.WARNING, "posttrain"):
        merge([model], tmp_path / "dropped", method="extract_lora", base=base, others="drop")
    assert "3 changed tensors are dropped" in caplog.text
    summary: Any = merge_file(tmp_path / "dropped")["adapter"]
    assert summary["dropped"] == {
        "model.layers.0.self_attn.q_proj.bias": pytest.approx(0.5 * 96**0.5),
        "model.layers.1.self_attn.k_proj.bias": pytest.approx(0.5 * 32**0.5),
        "model.layers.1.input_layernorm.weight": pytest.approx(0.5 * 96**0.5),
    }
    assert all("lora" in name for name in load_file(tmp_path / "dropped" / "adapter_model.safetensors"))


def test_a_head_of_its_own_is_saved_where_the_base_has_none(
    make_model: Any, read_weights: Read, tmp_path: Path
) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.5
        weights["model.layers.0.self_attn.q_proj.weight"] += 0.125

    base = make_model("base", dtype=torch.float32)
    model = make_model("model", dtype=torch.float32, change=change, config={"tie_word_embeddings": False})
    merge([model], tmp_path / "out", method="extract_lora", base=base)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]
    _assert_near(_applied(base, tmp_path / "out"), read_weights(model))


@pytest.fixture
def two_adapters(make_model: Any, make_adapter: Any) -> tuple[Path, list[Path]]:
    """A base and two adapters of ranks 3 and 5, which share some layers."""
    base = make_model("base", dtype=torch.float32)
    first = make_adapter(base, "first", 1, r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    second = make_adapter(base, "second", 2, r=5, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    return base, [first, second]


def _combined(base: Path, adapters: list[Path], weights: list[float], kind: str, **options: Any) -> dict[str, Tensor]:
    """Returns the change of each weight that peft's combination of adapters makes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapters[0])
    model.load_adapter(adapters[1], "second")
    model.add_weighted_adapter(["default", "second"], weights, "sum", combination_type=kind, **options)
    model.set_adapter("sum")
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("sum").detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and "sum" in module.lora_A
    }


def _products(adapter: Path) -> dict[str, Tensor]:
    weights = load_file(adapter / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): weights[
            name.replace("lora_A", "lora_B")
        ].float()
        @ value.float()
        for name, value in weights.items()
        if "lora_A" in name
    }


def test_adapters_of_different_ranks_are_concatenated_as_by_peft(
    two_adapters: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    base, adapters = two_adapters
    merge(adapters, tmp_path / "out", method="concatenate_lora", base=base, weights=[0.7, -0.4])
    expected = _combined(base, adapters, [0.7, -0.4], "cat")
    result = _products(tmp_path / "out")
    assert result.keys() == expected.keys()
    _assert_near(result, expected)
    summary: Any = merge_file(tmp_path / "out")["adapter"]
    ranks = {name.rpartition(".")[2]: matrix["rank"] for name, matrix in summary["matrices"].items()}
    assert ranks == {"q_proj": 8, "v_proj": 3, "down_proj": 5}
    assert summary["energy"] == 1


@pytest.mark.parametrize(
    ("kind", "options", "method", "ours"),
    [
        ("svd", {"svd_rank": 4}, "task_arithmetic", {}),
        # At density 1 the trims agree; election and mean are compared.
        ("ties_svd", {"svd_rank": 4, "density": 1.0}, "ties", {"density": 1.0}),
    ],
)
def test_adapters_are_compressed_as_by_peft(
    kind: str,
    options: dict[str, Any],
    method: str,
    ours: dict[str, Any],
    two_adapters: tuple[Path, list[Path]],
    tmp_path: Path,
) -> None:
    base, adapters = two_adapters
    values = {"method": method, "base": str(base), "models": [str(path) for path in adapters], "as_adapter": True}
    merge({**values, "parameters": {"rank": 4, **ours}}, tmp_path / "out")
    # peft merges in each layer only the adapters that it has there, which is another TIES where one is missing.
    shared = "q_proj"
    expected = {n: v for n, v in _combined(base, adapters, [1.0, 1.0], kind, **options).items() if shared in n}
    assert expected
    _assert_near(_products(tmp_path / "out"), expected, 1e-5)


def test_an_adapter_can_go_on_being_trained_and_merged(
    two_adapters: tuple[Path, list[Path]], read_weights: Read, tmp_path: Path
) -> None:
    base, adapters = two_adapters
    models = [f"{base}+{path}" for path in adapters]
    merge(models, tmp_path / "cat", method="concatenate_lora", base=base)
    merge([f"{base}+{tmp_path / 'cat'}"], tmp_path / "one")
    merge(models, tmp_path / "two", method="task_arithmetic", base=base)
    _assert_near(read_weights(tmp_path / "one"), read_weights(tmp_path / "two"))


def test_threads_and_memory_do_not_change_a_bit(make_model: Any, tmp_path: Path) -> None:
    base, model = make_model("base"), make_model("model", 1)
    for name, workers, memory in (("one", 1, 1 << 30), ("two", 3, 1 << 16)):
        merge([model], tmp_path / name, method="extract_lora", base=base, rank=4, workers=workers, memory=memory)
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_factors_have_the_dtype_that_is_asked_for(make_model: Any, tmp_path: Path) -> None:
    base, model = make_model("base"), make_model("model", 1)
    recipe = {"method": "extract_lora", "base": str(base), "models": [str(model)]}
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        out = tmp_path / f"out-{dtype}"
        merge(recipe | ({"dtype": dtype} if dtype else {}), out)
        weights = load_file(out / "adapter_model.safetensors")
        assert {value.dtype for name, value in weights.items() if "lora_" in name} == {expected}


def test_ranks_by_rule(make_model: Any, tmp_path: Path) -> None:
    base, model = make_model("base"), make_model("model", 1)
    rules = [{"match": "mlp", "rank": 2}, {"match": "self_attn", "rank": 3}]
    merge(
        {
            "method": "extract_lora",
            "base": str(base),
            "models": [str(model)],
            "layers": rules,
            "parameters": {"rank": 9},
        },
        tmp_path / "out",
    )
    summary: Any = merge_file(tmp_path / "out")["adapter"]
    assert {("mlp" in name, matrix["rank"]) for name, matrix in summary["matrices"].items()} == {(True, 2), (False, 3)}


def test_bad_input(make_model: Any, make_adapter: Any, tmp_path: Path) -> None:
    base, model = make_model("base"), make_model("model", 1)
    copy = make_model("copy")

    def refused(text: str, models: list[Any], **options: Any) -> None:
        with pytest.raises(UserError, match=text):
            merge(models, tmp_path / "out", **{"method": "extract_lora", "base": base, **options})
        assert not (tmp_path / "out").exists()

    refused("equals the base: there is nothing to extract", [copy])
    refused("1.5 is not between", [model], energy=1.5)
    refused("0 is not between", [model], energy=0)
    refused("0 is not between", [model], rank=0)
    refused("is an integer, not `2.5`", [model], rank=2.5)
    refused("needs the model that all were trained from", [model], base=None)
    refused("is not an adapter, and only adapters are concatenated", [model], method="concatenate_lora")
    adapter = make_adapter(base, "adapter")
    refused("the base of an adapter is an adapter itself", [model], base=f"{base}+{adapter}")
    refused(f"is an adapter on {base}, and the base is {copy}", [adapter], method="concatenate_lora", base=copy)
    norms = make_model("norms", change=lambda weights: weights["model.norm.weight"].add_(1))
    refused("changes no matrix of a linear layer", [norms])
    narrow = make_model("narrow", config={"hidden_size": 64})
    refused("has the hidden_size 96", [narrow])
    shapes = make_model("shapes", change=lambda weights: weights.update({"model.norm.weight": torch.ones(5)}))
    refused("the shape", [shapes])
    with pytest.raises(UserError, match="an adapter holds a task vector, and slerp merges whole weights"):
        merge({"method": "slerp", "models": [str(base), str(model)], "as_adapter": True}, tmp_path / "out")
    rules = [{"match": "mlp", "method": "extract_lora"}]
    with pytest.raises(UserError, match="extract_lora makes a whole result"):
        merge({"method": "ties", "base": str(base), "models": [str(model)], "layers": rules}, tmp_path / "out")
    config = MergeConfig.read({"models": ["champion"], "method": "extract_lora"}, "merge")
    with pytest.raises(UserError, match="extract_lora makes no model like the candidate"):
        config.check()
    damaged = make_model("damaged", 1)
    weights = load_file(damaged / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    refused("up_proj.weight holds NaN", [damaged])


def test_a_full_disk_leaves_nothing(make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, model = make_model("base"), make_model("model", 1)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match="space"):
        merge([model], tmp_path / "out", method="extract_lora", base=base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "model"]
