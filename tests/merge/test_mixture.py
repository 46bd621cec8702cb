"""Dense models as a mixture of experts: what transformers computes with it, and where its gates come from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.merge.api import merge, planned_merge
from posttrain.merge.recipe import Recipe
from posttrain.models.tiny import byte_tokenizer
from posttrain.store.errors import UserError

pytestmark = pytest.mark.slow  # transformers is loaded

Read = Callable[[Path], dict[str, Tensor]]

IDS = torch.tensor([[5, 80, 33, 33, 7, 120, 64, 2, 9]])


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def _mixture(base: Path, experts: list[Path], out: Path, **parameters: Any) -> Path:
    recipe = {
        "method": "mixture_of_experts",
        "base": str(base),
        "models": [str(expert) for expert in experts],
        "dtype": "float32",
        "parameters": {"gate": "random", **parameters},
    }
    merge(recipe, out)
    return out


@pytest.fixture
def make_family(tmp_path: Path) -> Callable[[str], tuple[Path, list[Path]]]:
    """Returns a function that writes a base of a family of models and two models whose MLPs differ from its."""

    def make(kind: str) -> tuple[Path, list[Path]]:
        import transformers

        tokenizer = byte_tokenizer()
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            initializer_range=0.2,
            tie_word_embeddings=kind == "Qwen3",
        )
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        folders = [tmp_path / f"{kind}-{name}" for name in ("base", "a", "b")]
        for folder in folders:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if ".mlp." in name:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        return folders[0], folders[1:]

    return make


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("Llama", "MixtralForCausalLM"),
        ("Mistral", "MixtralForCausalLM"),
        ("Qwen2", "Qwen2MoeForCausalLM"),
        ("Qwen3", "Qwen3MoeForCausalLM"),
    ],
)
def test_every_family_loads_and_computes_what_its_experts_do(
    kind: str, architecture: str, make_family: Any, tmp_path: Path
) -> None:
    base, experts = make_family(kind)
    same = _mixture(base, [experts[0]] * 3, tmp_path / "same")
    assert json.loads((same / "config.json").read_text())["architectures"] == [architecture]
    # Only MLPs differ, so that with one expert chosen, or equal ones, the mixture is that model.
    dense = [_logits(_load(expert)) for expert in experts]
    assert (dense[0] - dense[1]).abs().max() > 0.1
    assert (_logits(_load(same)) - dense[0]).abs().max() <= 1e-5
    mixture = _load(_mixture(base, experts, tmp_path / "mixture", experts_per_token=1))
    routers = [module for module in mixture.modules() if type(module).__name__.endswith("Router")]
    assert len(routers) == 2
    for chosen in range(2):
        hooks = [router.register_forward_hook(_one_hot(chosen)) for router in routers]
        assert (_logits(mixture) - dense[chosen]).abs().max() <= 1e-5
        for hook in hooks:
            hook.remove()
    assert mixture.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, IDS.shape[1] + 3)


def _one_hot(expert: int) -> Callable[..., Any]:
    """Returns a hook by which a router chooses one expert for every token."""

    def choose(module: Any, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, indices = output
        return logits, torch.ones_like(scores), torch.full_like(indices, expert)

    return choose


@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_the_experts_of_the_highest_logits_answer_by_their_softmax(
    chosen: int, make_family: Any, tmp_path: Path, read_weights: Read
) -> None:
    base, experts = make_family("Llama")
    folders = [*experts, base]
    out = _mixture(base, folders, tmp_path / "out", experts_per_token=chosen)
    weights = {name: value.double() for name, value in read_weights(out).items()}
    mlps = [{name: value.double() for name, value in read_weights(folder).items()} for folder in folders]
    model = _load(base)
    for number, layer in enumerate(model.model.layers):
        gate = 20 * weights[f"model.layers.{number}.block_sparse_moe.gate.weight"]
        layer.mlp.forward = _reference(gate, [_mlp(mlp, f"model.layers.{number}.mlp") for mlp in mlps], chosen)
    stored = load_file(out / "model.safetensors")
    # Wider gates than the random ones, so that the softmax is far from even.
    save_file({n: 20 * v if n.endswith("gate.weight") else v for n, v in stored.items()}, out / "model.safetensors")
    assert (_logits(_load(out)) - _logits(model)).abs().max() <= 1e-5


def _mlp(weights: dict[str, Tensor], prefix: str) -> Callable[[Tensor], Tensor]:
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return lambda x: (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _reference(gate: Tensor, mlps: list[Callable[[Tensor], Tensor]], chosen: int) -> Callable[[Tensor], Tensor]:
    """Returns a mixture's MLP in float64: the chosen experts, weighted by the softmax over their logits."""

    def forward(x: Tensor) -> Tensor:
        wide = x.double()
        logits = wide @ gate.T
        top = logits.topk(chosen, dim=-1)
        weights = torch.zeros_like(logits).scatter(-1, top.indices, top.values.softmax(-1))
        return sum(weights[..., [e]] * mlp(wide) for e, mlp in enumerate(mlps)).to(x.dtype)  # type: ignore[union-attr]

    return forward


def test_shared_tensors_are_the_bases(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    base = make_model("base", dtype=torch.float32)
    experts = [make_model(name, seed, 0.1, torch.float32) for seed, name in enumerate("ab", 1)]
    stored = [read_weights(folder) for folder in (base, *experts)]
    shared = read_weights(_mixture(base, experts, tmp_path / "out"))
    for name, value in stored[0].items():
        if ".mlp." not in name:
            assert torch.equal(shared[name], value)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for expert in range(2):
        for layer in range(2):
            for dense, sparse in names.items():
                own = shared[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{sparse}.weight"]
                assert torch.equal(own, stored[1 + expert][f"model.layers.{layer}.mlp.{dense}.weight"])
    assert len(shared) == len(stored[0]) - 6 + 2 * 6 + 2


PROMPTS = [
    {"positive_prompts": ["What is 3 + 4?", "integrate x"], "negative_prompts": ["a poem"]},
    {"positive_prompts": ["Write a poem about the sea."]},
]


def _recipe(base: Path, experts: list[Path], gate: str) -> dict[str, Any]:
    """Returns a recipe as mergekit-moe has it."""
    entries = [{"source_model": str(path), **prompts} for path, prompts in zip(experts, PROMPTS, strict=True)]
    return {"base_model": str(base), "gate_mode": gate, "dtype": "float32", "experts": entries}


def test_gates_are_the_mean_directions_of_the_prompts(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    # Its config's dtype is the one that the base is run in.
    base = make_model("base", dtype=torch.float32, config={"dtype": "float32"})
    experts = [make_model(name, seed, 0.1, torch.float32) for seed, name in enumerate("ab", 1)]
    (tmp_path / "moe.yaml").write_text(json.dumps(_recipe(base, experts, "hidden")))
    merge(tmp_path / "moe.yaml", tmp_path / "out")
    result = read_weights(tmp_path / "out")

    model, tokenizer = _load(base).double(), byte_tokenizer()

    def vectors(text: str) -> Tensor:
        ids = tokenizer(text, return_tensors="pt").input_ids
        inputs = []
        with torch.no_grad():
            # What the MLP reads: the residual stream behind the layer's attention, normalised.
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
            for layer, state in zip(model.model.layers, states, strict=False):
                places = torch.arange(ids.shape[1])[None]
                attended, _ = layer.self_attn(
                    layer.input_layernorm(state), model.model.rotary_emb(state, places), attention_mask=None
                )
                inputs.append(layer.post_attention_layernorm(state + attended)[0])
        return torch.stack([(x / x.norm(dim=-1, keepdim=True)).mean(0) for x in inputs])

    for number, prompts in enumerate(PROMPTS):
        expected = torch.stack([vectors(text) for text in prompts["positive_prompts"]]).mean(0)
        for text in prompts.get("negative_prompts", []):
            expected = expected - vectors(text)
        for layer in range(2):
            row = result[f"model.layers.{layer}.block_sparse_moe.gate.weight"][number]
            assert torch.allclose(row.double(), expected[layer] / expected[layer].norm(), atol=1e-5)


def test_random_gates_follow_the_seed(make_model: Any, read_weights: Read, tmp_path: Path) -> None:
    base = make_model("base")
    recipe = {"method": "mixture_of_experts", "base": str(base), "models": [str(base)] * 4}
    gates = {}
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        merge({**recipe, "seed": seed, "parameters": {"gate": "random"}}, tmp_path / name)
        weights = read_weights(tmp_path / name)
        gates[name] = torch.stack([weights[f"model.layers.{n}.block_sparse_moe.gate.weight"].float() for n in range(2)])
    assert torch.equal(gates["one"], gates["same"])
    assert not torch.equal(gates["one"], gates["other"])
    assert not torch.equal(gates["one"][0], gates["one"][1])
    assert float(gates["one"].std()) == pytest.approx(0.05, rel=0.1)


def test_a_prompt_that_is_positive_and_negative_gives_no_direction(
    make_model: Any, read_weights: Read, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_model("base")
    recipe = _recipe(base, [base, base], "hidden")
    recipe["experts"][1]["negative_prompts"] = recipe["experts"][1]["positive_prompts"]
    merge(recipe, tmp_path / "out")
    assert "the gate of expert 2 is zero" in caplog.text
    gate = read_weights(tmp_path / "out")["model.layers.0.block_sparse_moe.gate.weight"].float()
    assert gate[0].norm() == pytest.approx(1, rel=1e-2)
    assert not gate[1].any()


def test_a_plan_does_not_run_the_base(make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_model("base")
    monkeypatch.setattr("posttrain.merge.gates.load_transformers", lambda folder: pytest.fail("the base was loaded"))
    recipe = Recipe.read(_recipe(base, [base, base], "hidden"), "recipe")
    with planned_merge(recipe, tmp_path, tmp_path) as (plan, _):
        assert sum(tensor.name.endswith("gate.weight") for tensor in plan.tensors) == 2


def test_bad_input(make_model: Any, tmp_path: Path) -> None:
    base, expert = make_model("base"), make_model("expert", 1)

    def refused(text: str, **changes: Any) -> None:
        recipe = {"method": "mixture_of_experts", "base": str(base), "models": [str(expert), str(base)]} | changes
        with pytest.raises(UserError, match=text):
            merge(recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    random = {"gate": "random"}
    refused("the gate `hidden` is made of prompts, and `.*expert` has none")
    half = _recipe(base, [expert, base], "hidden")["experts"]
    refused("has none", models=[half[0], {"model": str(base), "negative_prompts": ["a"]}])
    refused("has prompts, which the gate `random` does not use", models=half, parameters=random)
    refused("3 experts per token of 2", parameters=random | {"experts_per_token": 3})
    refused("0 is not between 1", parameters=random | {"experts_per_token": 0})
    refused("`best` is not a choice", parameters={"gate": "best"})
    refused("no option `density`", parameters=random | {"density": 0.5})
    refused("no option `noise_scale`", models=[{"model": str(expert), "noise_scale": 0.1}], parameters=random)
    refused("takes its attention and norms from a model", base=None, parameters=random)
    refused("has no `layers`", parameters=random, layers=[{"match": "mlp", "method": "linear"}])
    for text, tokens in (("a" * 2000, 2000), ("", 0)):
        entry = {"model": str(expert), "positive_prompts": [text]}
        refused(f"has {tokens} tokens, and the base takes 1 to 1024", models=[entry, entry])
    refused("prompts are those of the experts", method="linear", models=half)
    wider = make_model("wider", config={"intermediate_size": 500})
    refused("has the intermediate_size", models=[str(wider), str(base)], parameters=random)
    other = make_model("other", config={"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]})
    refused("has the model_type", models=[str(other), str(base)], parameters=random)
    refused("is of type gpt_neox, which has no mixture", base=str(other), models=[str(other)] * 2, parameters=random)
    biased = make_model("biased", config={"mlp_bias": True})
    refused("has `mlp_bias`", base=str(biased), models=[str(biased)] * 2, parameters=random)
