"""``posttrain merge``: recipes and options, the plan, conflicts, and mistakes that are named before any work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_family import weights_of, write_relative

from posttrain.cli.merge import read_bytes
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


def test_conflicts_are_a_page_with_a_recommendation(posttrain: Call, here: Path) -> None:
    result = posttrain("merge", "a", "b", "--base", "base", "--conflicts", "page.html")
    assert result.code == 0, result
    assert "recommended: ties" in result.out
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "--out: say where the model is to be written"),
        (["a", "b", "--out", "a"], "a: exists and is not empty; remove it or name another folder"),
        (["a", "b", "--out", "x", "--weights", "1"], "--weights: 1 weights for 2 models; give one a model"),
        (["a", "b", "--out", "x", "--method", "tis"], "there is no merge method `tis`; did you mean `ties`?"),
        (["a", "b", "--out", "x", "--method", "ties"], "base: ties merges task vectors and needs the model that all"),
        (["a", "b", "--out", "x", "--set", "nomalize=1"], "linear has no option `nomalize`; did you mean `normalize`?"),
        (["a", "b", "--out", "x", "--set", "normalize=1"], "is true or false, not `1`"),
        (["a", "b", "--out", "x", "--set", "weight=[1,2,3]"], "has 3 values for 2 models; give one a model"),
        (["a", "b", "--out", "x", "--weights", "1,-1"], "the weights add up to zero"),
        (["a", "--base", "base", "--out", "x", "--method", "ties", "--set", "density=2"], "2 is not between 0 and 1"),
        (["a", "b", "--out", "x", "--memory", "lots"], "--memory: `lots` is no size; write 2GiB or 500MB"),
        (["a", "b", "--out", "x", "--dtype", "int4"], "`dtype`"),
        (["a", "none", "--out", "x"], "`none` is no model"),
        (["a", "b", "--conflicts", "page.html"], "--conflicts: compares task vectors of whole models; name the model"),
        (["none.yaml", "--out", "x"], "none.yaml"),
        (["none.yaml", "a", "--out", "x"], "a recipe names models, method, base and weights itself"),
        (["base", "--base", "base", "--out", "x", "--method", "ties"], "there is no model beside the base"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    posttrain: Call, here: Path, arguments: list[str], message: str
) -> None:
    before = sorted(here.iterdir())
    assert message in posttrain("merge", *arguments).mistake
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1e9", 10**9), ("64 mib", 64 << 20), ("1k", 1000)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert read_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.2.3", "nan", "GiB", "9" * 400])
def test_what_is_no_size_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        read_bytes(text, "--memory")


def test_losses_and_importances_of_records_are_on_the_page(posttrain: Call, here: Path) -> None:
    write_records(here)
    call = ("merge", "a", "b", "--base", "base", "--conflicts", "page.html", "--data", "data.jsonl")
    report = posttrain(*call, "--json").json
    (barrier,) = report["barriers"]
    assert [share for share, _ in barrier["points"]] == [0, 0.25, 0.5, 0.75, 1]
    assert barrier["records"] == 4
    assert [model["model"] for model in report["importance"]] == ["a", "b"]
    page = (here / "page.html").read_text()
    assert "Loss between the models" in page
    assert "Importance of the layers" in page
    assert sorted(path.name for path in here.iterdir()) == ["a", "b", "base", "data.jsonl", "page.html"]


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
        (["--data", "data.jsonl"], "linear needs none"),
        (["--measure", "ablation"], "nothing is measured"),
        (["--method", "by_importance", "--data", "data.jsonl", "--measure", "guess"], "is no `guess`"),
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
