"""What a merge kept: the numbers against sums by hand, the suites' files."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from model_family import weights_of, write_relative

from posttrain.evaluate.retention import merge_retention, retention_sentences, suite_retention
from posttrain.evaluate.suite import SuiteResult
from posttrain.merge.api import merge
from posttrain.merge.recipe import Recipe
from posttrain.models.tiny import write_tiny_model
from posttrain.store.errors import UserError
from posttrain.tune.merges.suites import check_merge_suites, local_models, local_recipe, read_merge_suites
from posttrain.tune.merges.validation import compare_results, model_names, validate_merge

GENERATOR = np.random.default_rng(0)


def result(scores: Any, first: int = 0) -> SuiteResult:
    ids = [f"r{first + row}" for row in range(len(scores))]
    return SuiteResult(
        "s", "exact_match", "accuracy", "accuracy", {}, {}, [], [], pa.table({"id": ids, "score": scores})
    )


def answers(rate: float, n: int = 200) -> list[float]:
    return (GENERATOR.random(n) < rate).astype(float).tolist()


def test_retention_is_relative_to_the_best_specialist_and_to_the_base_without_one() -> None:
    scores = {
        "base": {"math": answers(0.2), "chat": answers(0.5), "other": answers(0.6)},
        "a": {"math": answers(0.8), "chat": answers(0.4), "other": answers(0.5)},
        "b": {"math": answers(0.7), "chat": answers(0.9), "other": answers(0.5)},
        "merged": {"math": answers(0.7), "chat": answers(0.85), "other": answers(0.55)},
    }
    results = {model: {suite: result(values) for suite, values in row.items()} for model, row in scores.items()}
    validation = compare_results(results, {"math": ["a", "b"], "chat": ["b"], "other": []}, "float32")
    means = {model: {suite: np.mean(values) for suite, values in row.items()} for model, row in scores.items()}
    expected = {
        "math": means["merged"]["math"] / means["a"]["math"],
        "chat": means["merged"]["chat"] / means["b"]["chat"],
    }
    for name, ratio in expected.items():
        suite = validation.suites[name]
        assert suite.retention is not None
        assert suite.retention.ratio == pytest.approx(ratio)
        assert suite.retention.low < ratio < suite.retention.high
        assert suite.scores == {model: pytest.approx(means[model][name]) for model in scores}
    assert validation.suites["math"].retention_of == "a"
    assert validation.suites["other"].retention_of == "base"
    assert validation.average_retention is not None
    assert validation.average_retention.ratio == pytest.approx(sum(expected.values()) / 2)
    # The mean of two has a narrower interval than the wider of them.
    widths = [s.retention.high - s.retention.low for s in (validation.suites["math"], validation.suites["chat"])]  # type: ignore[union-attr]
    assert validation.average_retention.high - validation.average_retention.low < max(widths)
    assert validation.preservation is not None
    assert validation.preservation.ratio == pytest.approx(means["merged"]["other"] / means["base"]["other"])
    assert json.loads(json.dumps(validation.to_dict(), allow_nan=False))["suites"]["math"]["best"] == "a"


def test_a_merge_better_than_every_single_model_has_emerged() -> None:
    weak, strong = answers(0.3), answers(0.8)
    results = {name: {"both": result(weak)} for name in ("base", "a", "b")} | {"merged": {"both": result(strong)}}
    validation = compare_results(results, {"both": ["a", "b"]}, "float32")
    both = validation.suites["both"]
    assert both.emerged
    assert both.over_best.difference == pytest.approx(np.mean(strong) - np.mean(weak))
    assert "both: better than every single model" in validation.lines()
    same = compare_results(results | {"merged": {"both": result(weak)}}, {"both": []}, "float32")
    assert not same.suites["both"].emerged
    assert same.suites["both"].over_best.difference == 0


def test_a_ratio_that_means_nothing_is_left_out() -> None:
    zero, some, negative = result([0.0, 0.0]), result([1.0, 0.0]), result([-1.0, -2.0])
    assert suite_retention(some, zero, 0) is None
    assert suite_retention(negative, negative, 0) is None
    assert suite_retention(some, result([1.0], first=7), 0) is None, "no record in common"
    one = suite_retention(some, some, 0)
    assert one is not None
    assert one.low < one.ratio == 1 < one.high, "two records tell little"
    results = {name: {"s": zero} for name in ("a", "merged")}
    validation = compare_results(results, {"s": ["a"]}, "float32")
    assert validation.suites["s"].retention is None
    assert validation.average_retention is None
    # A resample without a right answer of the reference has no finite ratio, and JSON no infinity.
    (row,) = merge_retention({"s": result([1.0, 1, 1])}, {"m": {"s": result([1.0, 0, 0])}}, 0)
    assert row["high"] is None
    assert math.isclose(row["ratio"], 3)
    assert "300.0% of m's accuracy on s, interval 50.0% to infinite, n = 3" in retention_sentences([row])[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``, ``a`` and ``b``, where ``a`` has the config of a training; records, pairs and a file of suites."""
    root = tmp_path_factory.mktemp("validation")
    write_tiny_model(root / "base")
    for seed, name in enumerate("ab", 1):
        write_relative(root / name, root / "base", seed, scale=0.05)
    (root / "a" / "config.yaml").write_text("task: {system: Choose., labels: [card, cash, loan]}\n")
    words = ["card", "cash", "loan"]
    rows = [{"prompt": f"{number} of my {words[number % 3]}", "completion": words[number % 3]} for number in range(24)]
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "none"} for row in rows]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (root / "suites.yaml").write_text(
        "suites:\n"
        "  choice: {data: a.jsonl, specialist: a, sample: 6}\n"
        "  preferred: {data: pairs.jsonl, specialist: [a, b], sample: 6}\n"
    )
    return root


def recipe(**values: Any) -> Recipe:
    return Recipe.read({"method": "task_arithmetic", "base": "base", "models": ["a", "b"], **values}, "test")


def test_a_suite_of_a_models_name_has_its_task(models: Path) -> None:
    folders = {(name, None): models / name for name in ("base", "a", "b")}
    suite, pairs = read_merge_suites(["a.jsonl", "prefer=pairs.jsonl"], models, folders)
    assert (suite.name, suite.specialists) == ("a", (("a", None),))
    assert suite.task.labels == ["card", "cash", "loan"]
    assert (pairs.name, pairs.specialists, pairs.config.scorer) == ("prefer", (), "preference")
    assert pairs.task.labels is None
    suites = read_merge_suites(["suites.yaml"], models, folders)
    assert [suite.records.num_rows for suite in suites] == [6, 6]
    assert suites[1].specialists == (("a", None), ("b", None))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["none.jsonl"], "no such file: none.jsonl"),
        (["a.jsonl", "a=pairs.jsonl"], "there are two suites `a`"),
        (["x=suites.yaml"], "names its suites itself"),
        (["bad.yaml"], "`c` is not one of the models"),
        (["empty.yaml"], "at least one suite is needed"),
        (["timed.yaml"], "latency"),
        (["missing.yaml"], "no such file: x.jsonl"),
    ],
)
def test_a_wrong_suite_is_named(models: Path, files: list[str], message: str) -> None:
    (models / "bad.yaml").write_text("suites: {s: {data: a.jsonl, specialist: c}}\n")
    (models / "empty.yaml").write_text("suites: {}\n")
    (models / "timed.yaml").write_text("suites: {s: {data: a.jsonl}}\nlatency: {prompts: 8}\n")
    (models / "missing.yaml").write_text("suites: {s: {data: x.jsonl}}\n")
    with pytest.raises(UserError, match=message):
        check_merge_suites(files, recipe(), models)


def test_names_in_tables_are_short_where_they_are_clear() -> None:
    two = Recipe.read({"base": "x/m", "models": ["x/m", "y/m", "z/m", "z/n", "q+r/lora"]}, "test")
    assert model_names(two) == {
        ("x/m", None): "base",
        ("y/m", None): "y/m",
        ("z/m", None): "z/m",
        ("z/n", None): "n",
        ("q", "r/lora"): "lora",
    }


@pytest.mark.slow
def test_validation_measures_all_models_and_is_written_beside_the_weights(models: Path, tmp_path: Path) -> None:
    merge(recipe(), tmp_path / "out", root=models)
    validation = validate_merge(recipe(), models, tmp_path / "out", ["suites.yaml"])
    assert list(validation.suites["choice"].scores) == ["base", "a", "b", "merged"]
    assert json.loads((tmp_path / "out" / "validation.json").read_text()) == validation.to_dict()
    columns, rows = validation.table()
    assert columns == ["suite", "base", "a", "b", "merged", "kept", "of", "over the best"]
    assert [row[0] for row in rows] == ["choice", "preferred"]
    # One model at weight 1 is that model, so it keeps everything.
    alone = recipe(models=["a"], dtype="float32")
    merge(alone, tmp_path / "same", root=models)
    kept = validate_merge(alone, models, tmp_path / "same", ["a.jsonl"]).suites["a"]
    assert kept.scores["merged"] == kept.scores["a"]
    assert kept.over_best.difference <= 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "same"], "nothing temporary is left"


@pytest.mark.slow
def test_trials_merge_an_adapter_as_the_recipe_does(models: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    lora = get_peft_model(
        AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float32),
        LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False),
    )
    lora.save_pretrained(tmp_path / "lora")
    one = recipe(models=[f"base+{tmp_path / 'lora'}", "tiny", "a"], parameters={"weight": 0.7}, dtype="float32")
    folders = local_models(one, models, tmp_path)
    assert folders["a", None] == models / "a"
    assert {folder.parent for key, folder in folders.items() if key[0] == "tiny" or key[1]} == {tmp_path}
    assert local_models(one, models, tmp_path) == folders, "written once for all trials"
    merge(one, tmp_path / "own", root=models)
    merge(local_recipe(one, folders), tmp_path / "local")
    own, local = weights_of(tmp_path / "own"), weights_of(tmp_path / "local")
    assert own.keys() == local.keys()
    for name in own:
        assert torch.allclose(own[name], local[name], rtol=0, atol=1e-7), name
    base = weights_of(models / "base")
    assert any(not torch.equal(own[name], base[name]) for name in own if "q_proj" in name)
