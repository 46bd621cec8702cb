"""Merges with statistics of data: what they give, when statistics are computed again, and mistakes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_family import family, merge_file, weights_of  # noqa: F401
from torch import Tensor, nn

from posttrain.merge import statistics_cache
from posttrain.merge.api import merge, opened_plan, write_merge
from posttrain.merge.recipe import Recipe
from posttrain.merge.statistics import Example, fisher_information, input_grams
from posttrain.models.language_model import load_language_model
from posttrain.models.task import TaskConfig
from posttrain.store.errors import UserError


def examples(name: str, count: int = 4) -> list[Example]:
    return [([{"role": "user", "content": f"{name} question {number}"}], f"{number * 37}") for number in range(count)]


DATA = {"a.jsonl": examples("a"), "b.jsonl": examples("b", 6)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrain" / statistics_cache.FOLDER


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names what is computed from now on."""
    names: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            names.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(statistics_cache, "fisher_information", counted("fisher", fisher_information))
    monkeypatch.setattr(statistics_cache, "input_grams", counted("gram", input_grams))
    return names


def recipe(family: Path, method: str, **more: Any) -> Recipe:  # noqa: F811
    models = [{"model": str(family / name), "data": f"{name}.jsonl"} for name in "ab"]
    return Recipe.read({"method": method, "models": models, **more}, "recipe")


@pytest.mark.slow
def test_fisher_weighs_each_model_by_its_own_data(family: Path, tmp_path: Path) -> None:  # noqa: F811
    merge(recipe(family, "fisher"), tmp_path / "out", data=DATA)
    models, fisher = [], []
    for name in "ab":
        lm = load_language_model(family / name, TaskConfig(), "float32")
        fisher.append(fisher_information(lm, DATA[f"{name}.jsonl"]).tensors)
        models.append(weights_of(family / name))
    for name, result in weights_of(tmp_path / "out").items():
        first, second = (part[name].double() for part in fisher)
        mean = (models[0][name] + models[1][name]) / 2
        weighted = (first * models[0][name] + second * models[1][name]) / (first + second)
        torch.testing.assert_close(result, torch.where(first + second > 0, weighted, mean), rtol=0, atol=1e-6)
    description = merge_file(tmp_path / "out")
    assert [(entry["data"], entry["examples"]) for entry in description["statistics"]] == [  # type: ignore[index,attr-defined]
        ("a.jsonl", 4),
        ("b.jsonl", 6),
    ]


@pytest.mark.parametrize(
    ("parameters", "warns"), [({"weight": [1, 1e6]}, True), ({}, False), ({"normalize": True}, False)]
)
def test_a_model_that_decides_alone_is_named(
    family: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    parameters: dict[str, Any],
    warns: bool,
) -> None:
    merge(recipe(family, "fisher", parameters=parameters), tmp_path / "out", data=DATA)
    warning = f"{family / 'b'} has "
    assert (warning in caplog.text and "times the Fisher information of the others" in caplog.text) == warns


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_statistics_are_those_of_prompts_as_each_model_was_trained(
    family: Path,  # noqa: F811
    tmp_path: Path,
    method: str,
) -> None:
    shutil.copytree(family / "a", tmp_path / "a")
    (tmp_path / "a" / "config.yaml").write_text("task: {system: Count., labels: null}\n")
    models = [{"model": str(tmp_path / "a"), "data": "a.jsonl"}, {"model": str(family / "b"), "data": "b.jsonl"}]
    merge(Recipe.read({"method": method, "models": models}, "recipe"), tmp_path / "trained", data=DATA)
    system = {"role": "system", "content": "Count."}
    shown = DATA | {"a.jsonl": [([system, *prompt], answer) for prompt, answer in DATA["a.jsonl"]]}
    merge(recipe(family, method), tmp_path / "shown", data=shown)
    merge(recipe(family, method), tmp_path / "plain", data=DATA)
    trained, same, plain = (weights_of(tmp_path / name) for name in ("trained", "shown", "plain"))
    assert all(torch.equal(trained[name], same[name]) for name in trained)
    assert any(not torch.equal(trained[name], plain[name]) for name in trained)


def test_regmean_fits_what_each_model_gives_on_its_own_data(family: Path, tmp_path: Path) -> None:  # noqa: F811
    merge(recipe(family, "regmean", parameters={"alpha": 1.0}, dtype="float32"), tmp_path / "out", data=DATA)
    names = [f"model.layers.{layer}.{part}" for layer in (0, 3) for part in ("self_attn.v_proj", "mlp.down_proj")]
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    models = []
    for model in "ab":
        lm = load_language_model(family / model, TaskConfig(), "float32")
        models.append(weights_of(family / model))
        read: dict[str, list[Tensor]] = {name: [] for name in names}
        for name in names:
            layer: nn.Module = lm.model.get_submodule(name)
            layer.register_forward_hook(lambda _m, x, _y, read=read, name=name: read[name].append(x[0][0].double()))
        with torch.no_grad():
            for prompt, answer in DATA[f"{model}.jsonl"]:
                lm.model(input_ids=torch.tensor([[*lm.prompt_ids(prompt), *lm.answer_ids(answer)][:-1]]))
        for name in names:
            rows[name].append(torch.cat(read[name]))
    merged = weights_of(tmp_path / "out")
    for name in names:
        weight = f"{name}.weight"

        def loss(layer: Tensor, name: str = name, weight: str = weight) -> float:
            parts = zip(rows[name], models, strict=True)
            return sum(float((x @ (layer - model[weight]).T).square().sum()) for x, model in parts)

        targets = np.concatenate([(x @ m[weight].T).numpy() for x, m in zip(rows[name], models, strict=True)])
        best = torch.from_numpy(np.linalg.lstsq(torch.cat(rows[name]).numpy(), targets, rcond=None)[0].T)
        mean = (models[0][weight] + models[1][weight]) / 2
        # No layer is better, and the mean is much worse.
        assert loss(merged[weight]) <= loss(best) + 1e-4 * loss(mean)
        assert loss(best) < 0.8 * loss(mean)
    norm = "model.norm.weight"
    torch.testing.assert_close(merged[norm], (models[0][norm] + models[1][norm]) / 2, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "limits"), [("fisher", (3, 1, 50_000)), ("regmean", (2, 1 << 18, 1))])
def test_workers_memory_and_files_change_no_bit(
    family: Path,  # noqa: F811
    tmp_path: Path,
    method: str,
    limits: tuple[int, int, int],
) -> None:
    reference: dict[str, Tensor] = {}
    for number, (workers, memory, shard_bytes) in enumerate(((1, 1 << 30, 1 << 30), limits)):
        out = tmp_path / f"out{number}"
        options = {"workers": workers, "memory": memory, "shard_bytes": shard_bytes}
        merge(recipe(family, method), out, data=DATA, **options)  # type: ignore[arg-type]
        result = weights_of(out)
        reference = reference or result
        assert result.keys() == reference.keys()
        assert all(torch.equal(value, reference[name]) for name, value in result.items()), options


@pytest.mark.slow
def test_a_second_merge_reads_the_cache(family: Path, tmp_path: Path, computed: list[str], cache: Path) -> None:  # noqa: F811
    merge(recipe(family, "fisher"), tmp_path / "one", data=DATA)
    assert computed == ["fisher", "fisher"]
    merge(recipe(family, "fisher", parameters={"floor": 1.0}), tmp_path / "floor", data=DATA)
    merge(recipe(family, "fisher"), tmp_path / "two", data=DATA)
    assert computed == ["fisher", "fisher"]
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    merge(recipe(family, "regmean"), tmp_path / "three", data=DATA)
    assert computed == ["fisher", "fisher", "gram", "gram"]
    assert len(list(cache.iterdir())) == 8


@pytest.mark.slow
def test_other_data_weights_settings_and_templates_are_computed_anew(
    family: Path,  # noqa: F811
    tmp_path: Path,
    computed: list[str],
) -> None:
    models = tmp_path / "models"
    for name in "ab":
        shutil.copytree(family / name, models / name)
    merge(recipe(models, "fisher"), tmp_path / "0", data=DATA)
    assert len(computed) == 2
    merge(recipe(models, "fisher"), tmp_path / "1", data=DATA | {"b.jsonl": DATA["b.jsonl"][:-1]})
    assert len(computed) == 3
    file = models / "a" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # one bit of one weight
    file.write_bytes(content)
    merge(recipe(models, "fisher"), tmp_path / "2", data=DATA)
    assert len(computed) == 4
    template = models / "b" / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    merge(recipe(models, "fisher"), tmp_path / "3", data=DATA)
    assert len(computed) == 5
    merge(recipe(models, "fisher", statistics={"answers": "sampled"}), tmp_path / "4", data=DATA)
    assert len(computed) == 7
    merge(recipe(models, "fisher", statistics={"answers": "sampled"}, seed=1), tmp_path / "5", data=DATA)
    assert len(computed) == 9
    # Records of a training or a merge decide on nothing.
    (models / "a" / "merge.json").write_text("{}")
    merge(recipe(models, "fisher", seed=1), tmp_path / "6", data=DATA)
    assert len(computed) == 9


def test_a_killed_merge_keeps_what_is_finished_and_a_damaged_file_is_computed_anew(
    family: Path,  # noqa: F811
    tmp_path: Path,
    computed: list[str],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = statistics_cache.fisher_information

    def killed_at_the_second(*arguments: Any, **options: Any) -> Any:
        if computed:
            raise KeyboardInterrupt
        return counted(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(statistics_cache, "fisher_information", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            merge(recipe(family, "fisher"), tmp_path / "out", data=DATA)
    assert not (tmp_path / "out").exists()
    merge(recipe(family, "fisher"), tmp_path / "out", data=DATA)
    assert computed == ["fisher", "fisher"]
    file = min(cache.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    merge(recipe(family, "fisher"), tmp_path / "again", data=DATA)
    assert computed == ["fisher"] * 3
    assert f"{file} is damaged" in caplog.text
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert one == two


def test_adapters_are_models_too(make_model: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = make_model("base", dtype=torch.float32)
    torch.manual_seed(0)
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(target_modules=["q_proj"], r=4)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    merged = tmp_path / "merged"
    shutil.copytree(base, merged)
    model.merge_and_unload().save_pretrained(merged)
    other = make_model("other", seed=1, dtype=torch.float32)
    for name, first in (("one", f"{base}+{tmp_path / 'adapter'}"), ("two", str(merged))):
        merge([first, other], tmp_path / name, method="fisher", data=examples("a"))
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name in two:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-4)
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert (one[changed] - weights_of(base)[changed]).abs().max() > 0.05


def test_auto_weights_follow_scores_and_fisher_norms(family: Path, tmp_path: Path) -> None:  # noqa: F811
    models = [family / "a", family / "b"]
    merge(recipe(family, "linear", parameters={"weight": "auto"}, scores=[0.85, 0.90]), tmp_path / "one", data=DATA)
    norms, likelihoods = [], []
    for name in "ab":
        lm = load_language_model(family / name, TaskConfig(), "float32")
        statistics = fisher_information(lm, DATA[f"{name}.jsonl"])
        norms.append(statistics.norm)
        likelihoods.append(np.exp(statistics.log_likelihood / statistics.tokens))
    first = 0.85 * norms[0] / (0.85 * norms[0] + 0.90 * norms[1])
    description: Any = merge_file(tmp_path / "one")
    assert description["recipe"]["parameters"]["weight"] == pytest.approx([first, 1 - first], rel=1e-6)
    a, b = (weights_of(model) for model in models)
    for name, tensor in weights_of(tmp_path / "one").items():
        torch.testing.assert_close(tensor, first * a[name] + (1 - first) * b[name], rtol=0, atol=1e-6)
    # Without scores, each model's likelihood of a token of its data, with a method that has a base.
    tuned = recipe(family, "task_arithmetic", base=str(family / "base"), parameters={"weight": "auto"})
    merge(tuned, tmp_path / "two", data=DATA)
    products = [score * norm for score, norm in zip(likelihoods, norms, strict=True)]
    weights = json.loads((tmp_path / "two" / "merge.json").read_text())["recipe"]["parameters"]["weight"]
    assert weights == pytest.approx([product / sum(products) for product in products], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fisher"}, r"data: fisher needs the Fisher information of `.*a`, and no data is given"),
        ({"method": "regmean"}, r"data: regmean needs the Gram matrices of `.*a`"),
        ({"method": "linear", "parameters": {"weight": "auto"}}, "data: the weight auto needs the Fisher information"),
        ({"method": "linear", "layers": [{"match": "mlp", "method": "regmean"}]}, "regmean needs the Gram matrices"),
        ({"method": "linear", "scores": [1, 2]}, "scores are for `weight: auto`"),
        ({"parameters": {"weight": "auto"}, "data": "a.jsonl", "scores": [1]}, "1 scores for 2 models"),
        ({"parameters": {"weight": "auto"}, "data": "a.jsonl", "scores": [1, -1]}, "scores"),
        ({"method": "slerp", "parameters": {"weight": "auto"}, "data": "a.jsonl"}, "slerp has no option `weight`"),
        ({"method": "fisher", "data": "elsewhere.jsonl"}, "the records of `elsewhere.jsonl` are not given"),
        ({"method": "fisher", "statistics": {"examples": 0}}, "statistics.examples"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named_before_any_work(
    family: Path,  # noqa: F811
    tmp_path: Path,
    computed: list[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        merge({"models": [str(family / "a"), str(family / "b")], **changes}, tmp_path / "out", data=DATA)
    assert not computed
    assert not (tmp_path / "out").exists()


def test_rows_of_another_vocabulary_are_refused_and_a_rule_helps(make_model: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    def with_a_row(weights: dict[str, Tensor]) -> None:
        name = "model.embed_tokens.weight"
        weights[name] = torch.cat([weights[name], weights[name][:1]])

    models = []
    for number, token in enumerate(("<x>", "<y>")):
        folder = make_model(f"m{number}", number, change=with_a_row, config={"vocab_size": 262})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([token])
        tokenizer.save_pretrained(folder)
        models.append(str(folder))
    values = {"models": models, "method": "fisher", "data": "a.jsonl", "tokenizer": "union"}
    with pytest.raises(UserError, match="order of another vocabulary; give it another method by a rule"):
        merge(values, tmp_path / "out", data=DATA)
    merge(values | {"layers": [{"match": "embed|lm_head", "method": "linear"}]}, tmp_path / "out", data=DATA)
    methods = {entry["method"] for entry in merge_file(tmp_path / "out")["tensors"].values()}  # type: ignore[attr-defined]
    assert methods == {"fisher", "linear"}


def test_data_that_no_method_needs_is_named(
    family: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    merge(recipe(family, "linear"), tmp_path / "out", data=DATA)
    assert "no method here needs statistics" in caplog.text


def test_a_plan_without_statistics_is_not_run(family: Path, tmp_path: Path) -> None:  # noqa: F811
    plan_only = recipe(family, "fisher")
    folders = {(str(family / name), None): family / name for name in "ab"}
    with opened_plan(plan_only, folders) as plan, pytest.raises(UserError, match="statistics of the models were not"):  # type: ignore[arg-type]
        write_merge(plan, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
