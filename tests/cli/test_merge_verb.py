"""``posttrain merge``: recipes and options, the plan, conflicts, and mistakes that are named before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_family import weights_of, write_relative

from posttrain.cli.merge_call import read_bytes
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``a`` and ``b``, trained from it, as it were."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "base")
    for seed, name in enumerate("ab"):
        write_relative(root / name, root / "base", seed)
    return root


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with links to the models."""
    for name in ("base", "a", "b"):
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_options_and_a_recipe_give_the_same_model(posttrain: Call, here: Path) -> None:
    result = posttrain("merge", "a", "b", "--weights", "0.3,0.7", "--dtype", "float32", "--out", "one", "--json")
    assert result.code == 0, result
    assert result.json["tensors"] == len(weights_of(here / "one"))
    recipe = {"merge_method": "linear", "dtype": "float32"}
    recipe["models"] = [{"model": m, "parameters": {"weight": w}} for m, w in (("a", 0.3), ("b", 0.7))]
    (here / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = posttrain("merge", "recipe.yaml", "--out", "other")
    assert result.out.splitlines()[-1] == "model: other"
    one, other = ((here / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other
    assert sorted(path.name for path in here.iterdir()) == ["a", "b", "base", "one", "other", "recipe.yaml"]


def test_a_dry_run_prints_the_plan_and_writes_nothing(posttrain: Call, here: Path) -> None:
    before = sorted(here.iterdir())
    call = ("merge", "a", "b", "--base", "base", "--method", "ties", "--set", "density=0.5", "--dry-run")
    assert "ties: weight [1, 1], density [0.5, 0.5]" in posttrain(*call, "--out", "x/y").out
    plan = posttrain(*call, "--json").json
    assert plan["tensors"]["model.norm.weight"]["options"] == {"weight": [1, 1], "density": [0.5, 0.5]}
    assert plan["bytes"] * 5 == plan["bytes_read"], "the base is in bfloat16, the others in float32"
    assert sorted(here.iterdir()) == before


@pytest.fixture
def data(here: Path) -> Path:
    """The current folder with ``a.jsonl`` and ``b.csv``, and ``texts.jsonl`` without answers."""
    for name in ("a", "texts"):
        records = [{"prompt": f"{name} {number}", "completion": str(number)} for number in range(9)]
        lines = [json.dumps(record if name == "a" else {"prompt": record["prompt"]}) for record in records]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
    (here / "b.csv").write_text("prompt,completion\n" + "\n".join(f"b {number},{number}" for number in range(9)))
    return here


def test_methods_with_data_by_options_and_by_a_recipe(posttrain: Call, data: Path) -> None:
    options = ("--method", "fisher", "--data", "a.jsonl", "--data", "b.csv", "--examples", "5")
    result = posttrain("merge", "a", "b", *options, "--out", "one")
    assert result.code == 0, result
    statistics = json.loads((data / "one" / "merge.json").read_text())["statistics"]
    assert [(entry["data"], entry["examples"]) for entry in statistics] == [("a.jsonl", 5), ("b.csv", 5)]
    (data / "recipes").mkdir()
    models = [{"model": f"../{name}", "data": f"../{file}"} for name, file in (("a", "a.jsonl"), ("b", "b.csv"))]
    recipe = {"method": "fisher", "models": models, "statistics": {"examples": 5}}
    (data / "recipes" / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert posttrain("merge", "recipes/r.yaml", "--out", "two").code == 0
    # A path of the command is relative to the current folder, and the recipe's own number of examples stays.
    recipe["models"] = ["../a", "../b"]
    (data / "recipes" / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert posttrain("merge", "recipes/r.yaml", "--data", "a.jsonl", "--data", "b.csv", "--out", "three").code == 0
    one, two, three = ((data / name / "model.safetensors").read_bytes() for name in ("one", "two", "three"))
    assert one == two == three


def test_auto_weights_are_computed_and_written_down(posttrain: Call, data: Path) -> None:
    call = ("merge", "a", "b", "--weights", "auto", "--scores", "0.85,0.90", "--data", "a.jsonl")
    plan = posttrain(*call, "--dry-run")
    assert "weight auto" in plan.out
    assert "after the statistics of the models on their data" in plan.out
    result = posttrain(*call, "--out", "out")
    assert result.code == 0, result
    merged = json.loads((data / "out" / "merge.json").read_text())
    norms = [entry["norm"] for entry in merged["statistics"]]
    first = 0.85 * norms[0] / (0.85 * norms[0] + 0.90 * norms[1])
    assert merged["recipe"]["parameters"]["weight"] == pytest.approx([first, 1 - first])
    assert f"weight of a: {first:.4f}" in result.err


def test_mistakes_with_data_are_one_line_and_leave_nothing(posttrain: Call, data: Path) -> None:
    before = sorted(data.iterdir())
    call = ("merge", "a", "b", "--out", "x", "--method")
    for arguments, message in [
        (("fisher",), "data: fisher needs the Fisher information of `a`, and no data is given; name records of the"),
        (("fisher", "--data", "none.jsonl"), "none.jsonl"),
        (("fisher", "--data", "texts.jsonl"), "texts.jsonl:1: there are no answers: `prompt` is the only column"),
        (("fisher", *("--data", "a.jsonl") * 3), "data: 3 files for 2 models; give one, or one per model"),
        (("linear", "--scores", "1,2"), "scores are for `weight: auto`"),
        (("linear", "--weights", "auto", "--scores", "1,x", "--data", "a.jsonl"), "scores"),
        (("linear", "--weights", "auto"), "data: the weight auto needs the Fisher information of `a`"),
    ]:
        assert message in posttrain(*call, *arguments).mistake
    assert sorted(data.iterdir()) == before


def test_conflicts_are_a_page_with_a_recommendation(posttrain: Call, here: Path) -> None:
    result = posttrain("merge", "a", "b", "--base", "base", "--conflicts", "page.html")
    assert result.code == 0, result
    assert "recommended: resolve_conflicts" in result.out
    page = (here / "page.html").read_text()
    assert "Share of the weight whose signs oppose" in page
    assert len(page) < 2_000_000
    report = posttrain("merge", "a", "b", "--base", "base", "--conflicts", "page.html", "--json").json
    (pair,) = report["overall"]["pairs"]
    assert abs(pair["cosine"]) < 0.05
    assert json.dumps(report)


def test_a_workspaces_models_are_named_as_everywhere(posttrain: Call, finished_workspace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = posttrain("merge", "champion", "round 1", "-w", finished_workspace, "--out", out, "--json")
    assert result.code == 0, result
    champions = json.loads((out / "merge.json").read_text())["models"]
    assert len(champions) == 2
    assert all(Path(folder).parent.name == "artifacts" for folder in champions.values())


@pytest.mark.slow
def test_an_adapter_is_written_with_what_it_keeps(posttrain: Call, here: Path) -> None:
    call = ("merge", "a", "--base", "base", "--method", "extract_lora", "--set", "rank=4")
    plan = posttrain(*call, "--dry-run").out
    assert "rank 4, energy 1, others save" in plan
    assert "writes at most" in plan
    result = posttrain(*call, "--out", "adapter")
    assert result.out.splitlines()[-1] == "adapter: adapter"
    assert "q_proj" in result.out
    assert "6 saved whole, 0 dropped" in result.out
    # The adapter is an input of the next merge, and two of them a merge of their own.
    call = ("merge", "base+adapter", "a", "--base", "base", "--method", "task_arithmetic", "--as-adapter")
    result = posttrain(*call, "--set", "energy=0.5", "--set", "rank=96", "--out", "both", "--json")
    assert result.json["adapter"]["energy"] == pytest.approx(0.5, abs=0.1)
    assert result.json["bytes"] == (here / "both" / "adapter_model.safetensors").stat().st_size
    kept = json.loads((here / "both" / "merge.json").read_text())["adapter"]
    assert kept["matrices"] == result.json["adapter"]["matrices"]


@pytest.mark.slow
def test_a_mixture_of_experts_from_mergekits_recipe(posttrain: Call, here: Path) -> None:
    experts = [{"source_model": name, "positive_prompts": [f"about {name}"]} for name in "ab"]
    recipe = {"base_model": "base", "gate_mode": "hidden", "dtype": "float32", "experts": experts}
    (here / "moe.yaml").write_text(yaml.safe_dump(recipe))
    assert "mixture_of_experts: gate hidden, experts_per_token 2" in posttrain("merge", "moe.yaml", "--dry-run").out
    assert posttrain("merge", "moe.yaml", "--out", "moe").code == 0
    config = json.loads((here / "moe" / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"]) == ("mixtral", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "--out: say where to write the model"),
        (["a", "b", "--out", "a"], "a: exists and is not empty; remove it or name another folder"),
        (["a", "b", "--out", "x", "--weights", "1"], "--weights: 1 weights for 2 models; give one per model"),
        (["a", "b", "--out", "x", "--method", "tis"], "there is no merge method `tis`; did you mean `ties`?"),
        (["a", "b", "--out", "x", "--method", "ties"], "base: ties merges task vectors and needs the model that all"),
        (["a", "b", "--out", "x", "--set", "nomalize=1"], "linear has no option `nomalize`; did you mean `normalize`?"),
        (["a", "b", "--out", "x", "--set", "normalize=1"], "is true or false, not `1`"),
        (["a", "b", "--out", "x", "--set", "weight=[1,2,3]"], "has 3 values for 2 models; give one per model"),
        (["a", "b", "--out", "x", "--weights", "1,-1"], "the weights add up to zero"),
        (["a", "--base", "base", "--out", "x", "--method", "ties", "--set", "density=2"], "2 is not between 0 and 1"),
        (["a", "b", "--out", "x", "--memory", "lots"], "--memory: `lots` is not a size; write 2GiB or 500MB"),
        (["a", "b", "--out", "x", "--dtype", "int4"], "`dtype`"),
        (["a", "none", "--out", "x"], "`none` is not a model"),
        (["a", "b", "--conflicts", "page.html"], "--conflicts: compares task vectors of whole models; name the model"),
        (["none.yaml", "--out", "x"], "none.yaml"),
        (["none.yaml", "a", "--out", "x"], "a recipe names models, method, base and weights itself"),
        (["base", "--base", "base", "--out", "x", "--method", "ties"], "there is no model besides the base"),
        (["a", "--out", "x", "--as-adapter"], "as_adapter: an adapter holds a task vector, and linear merges whole"),
        (["a", "--base", "base", "--out", "x", "--method", "extract_lora", "--set", "energy=2"], "2 is not between"),
        (["a", "--base", "base", "--out", "x", "--method", "ties", "--set", "rank=4"], "ties has no option `rank`"),
        (["a", "b", "--base", "base", "--out", "x", "--method", "mixture_of_experts"], "positive_prompts: the gate"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    posttrain: Call, here: Path, arguments: list[str], message: str
) -> None:
    before = sorted(here.iterdir())
    assert message in posttrain("merge", *arguments).mistake
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1e9", 10**9), ("64 mib", 64 << 20), ("1KB", 1000)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert read_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.2.3", "nan", "GiB", "9" * 400])
def test_what_is_no_size_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        read_bytes(text, "--memory")


def test_layers_and_heads_are_merged_by_measured_importance(posttrain: Call, here: Path) -> None:
    write_records(here)
    call = ("merge", "a", "b", "--method", "by_importance", "--data", "data.jsonl", "--examples", "3")
    plan = posttrain(*call, "--dry-run", "--json").json
    assert [model["records"] for model in plan["importance"]] == [3, 3]
    assert "importance in a" in posttrain(*call, "--dry-run").out
    assert posttrain(*call, "--set", "heads=choose", "--set", "layer_boundary=0.5", "--out", "out").code == 0
    options = json.loads((here / "out" / "merge.json").read_text())["tensors"]["model.layers.1.mlp.up_proj.weight"]
    assert options["options"]["weight"] == plan["tensors"]["model.layers.1.mlp.up_proj.weight"]["options"]["weight"]
    first, second, merged = (weights_of(here / name) for name in ("a", "b", "out"))
    kept = {name for name in merged if any((merged[name] == own[name]).all() for own in (first, second))}
    assert {name for name in merged if ".layers.1." in name} <= kept
    assert "model.layers.0.mlp.up_proj.weight" not in kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "by_importance"], "with --data FILE"),
        (["--base", "a", "--conflicts", "page.html", "--data", "data.jsonl"], "linear needs none"),
        (["--data", "data.jsonl"], "linear needs none"),
        (["--method", "by_importance", "--data", "data.jsonl", "--align", "weights"], "of whole models as they are"),
        (["--method", "by_importance", "--data", "data.jsonl"] + ["--data", "data.jsonl"] * 2, "3 files for 2 models"),
        (["--method", "by_importance", "--data", "none.jsonl"], "none.jsonl: there is no such file"),
        (["--align", "activations"], "`align`"),
    ],
)
def test_mistakes_with_records_are_named_before_any_work(
    posttrain: Call, here: Path, options: list[str], message: str
) -> None:
    write_records(here)
    result = posttrain("merge", "a", "b", *options, "--out", "out")
    assert result.code == 2
    assert message in result.err
    assert not (here / "out").exists()


def test_unrelated_models_are_aligned(posttrain: Call, here: Path) -> None:
    write_tiny_model(here / "other", seed=5)
    result = posttrain("merge", "base", "other", "--align", "weights", "--out", "out")
    assert result.code == 0, result
    (numbers,) = json.loads((here / "out" / "merge.json").read_text())["alignment"].values()
    assert numbers["after"] < numbers["before"]


def write_records(folder: Path) -> None:
    records = [{"prompt": f"say {number}", "completion": f"it is {number}"} for number in range(4)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
