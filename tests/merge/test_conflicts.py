"""Conflicts between models against float64 sums over all their weights."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_family import Weights, weights_of, write_relative
from safetensors.torch import save_file

from posttrain.merge.api import merge
from posttrain.merge.conflicts import RESOLUTIONS, ConflictReport, recipe_conflicts
from posttrain.merge.recipe import Recipe
from posttrain.merge.recommendation import CLEAR_GAIN, METHODS_OF, describe_conflicts, recommend, warnings_of
from posttrain.models.tiny import write_tiny_model


def report_of(root: Path, *models: str, memory: int = 1 << 24, threads: int = 2) -> ConflictReport:
    recipe = Recipe.read({"method": "task_arithmetic", "base": "base", "models": list(models)}, "test")
    return recipe_conflicts(recipe, root, memory, threads)


def task_vector(root: Path, name: str) -> torch.Tensor:
    base, model = weights_of(root / "base"), weights_of(root / name)
    return torch.cat([(model[key] - base[key]).flatten() for key in sorted(base)])


def test_sums_equal_those_of_whole_vectors(family: Path) -> None:
    report = report_of(family, "a", "b", "c")
    vectors = torch.stack([task_vector(family, name) for name in "abc"])
    base = torch.cat([tensor.flatten() for tensor in weights_of(family / "base").values()])
    overall = report.overall
    assert overall.elements == vectors.shape[1]
    assert math.isclose(overall.interference, 1 - float(vectors.sum(0).abs().sum() / vectors.abs().sum()), rel_tol=1e-4)
    for first, second in report.pairs:
        a, b = vectors[first], vectors[second]
        assert math.isclose(overall.cosine(first, second), float(a @ b / (a.norm() * b.norm())), abs_tol=1e-5)
        assert math.isclose(overall.opposed_share(first, second), float(((a * b) < 0).double().mean()), abs_tol=1e-4)
        root = (a * b).abs().sqrt()
        weighted = float(root[(a * b) < 0].sum() / root.sum())
        assert math.isclose(overall.opposed_weight_share(first, second), weighted, abs_tol=1e-4)
    matrices = {key: tensor for key, tensor in weights_of(family / "base").items() if tensor.dim() > 1}
    flat = torch.cat([tensor.flatten() for tensor in matrices.values()])
    for model in range(3):
        own = weights_of(family / "abc"[model])
        weights = torch.cat([own[key].flatten() for key in matrices])
        cosine = float(weights @ flat / (weights.norm() * flat.norm()))
        assert math.isclose(overall.weight_cosine(model), cosine, rel_tol=1e-5)
        assert math.isclose(overall.norm_ratio(model), float(vectors[model].norm() / base.norm()), rel_tol=1e-5)
        agree = (vectors.sign().amax(0) - vectors.sign().amin(0)) < 2
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))[0]
        resolved = {
            "average": vectors.mean(0),
            "zero": vectors.mean(0) * agree,
            "magnitude": torch.where(agree, vectors.mean(0), largest),
        }
        for name, merged in resolved.items():
            share = float(vectors[model] @ merged / vectors[model].square().sum())
            assert math.isclose(overall.kept_share(name, model), share, abs_tol=1e-4), name


def test_layers_add_up_to_the_whole(family: Path) -> None:
    report = report_of(family, "a", "b")
    assert list(report.layers) == ["embed_tokens", *(f"layer {number}" for number in range(4)), "norm"]
    assert sum(layer.elements for layer in report.layers.values()) == report.overall.elements
    total = sum(layer.gram for layer in report.layers.values())
    np.testing.assert_allclose(total, report.overall.gram, rtol=1e-12)


def test_the_report_is_the_same_whatever_the_memory(family: Path) -> None:
    assert report_of(family, "a", "b", memory=1, threads=1).to_dict() == report_of(family, "a", "b").to_dict()


def relative(root: Path, name: str, change: Weights, scale: float) -> None:
    """Writes the base plus a scaled change."""
    write_relative(root / name, root / "base", 0)
    base = weights_of(root / "base")
    tensors = {key: (base[key] + scale * change[key]).float() for key in base}
    save_file(tensors, root / name / "model.safetensors", {"format": "pt"})


@pytest.fixture
def change(family: Path, tmp_path: Path) -> Weights:
    """A copy of the base in ``tmp_path``, and a change of its weights."""
    write_relative(tmp_path / "base", family / "base", 0, scale=0.0)
    base = weights_of(tmp_path / "base")
    generator = torch.Generator().manual_seed(5)
    return {name: 0.01 * torch.randn(t.shape, generator=generator).double() for name, t in base.items()}


def test_opposite_models_are_flagged(change: Weights, tmp_path: Path) -> None:
    relative(tmp_path, "forth", change, 1.0)
    relative(tmp_path, "back", change, -0.5)
    report = report_of(tmp_path, "forth", "back")
    assert report.overall.cosine(0, 1) == pytest.approx(-1, abs=1e-4)
    assert report.overall.opposed_weight_share(0, 1) == pytest.approx(1, abs=1e-3)
    assert ["opposite directions" in line for line in warnings_of(report)] == [True]
    assert recommend(report)[0] == "ensemble"


@pytest.mark.parametrize(("shared", "expected"), [(0.0, "resolve_conflicts"), (2.0, "task_arithmetic")])
def test_the_recommendation_keeps_most_by_the_reports_own_table(
    shared: float, expected: str, change: Weights, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(6)
    for name in ("first", "second", "third"):
        own = {key: 0.01 * torch.randn(t.shape, generator=generator).double() for key, t in sorted(change.items())}
        relative(tmp_path, name, {key: shared * change[key] + own[key] for key in change}, 1.0)
    report = report_of(tmp_path, "first", "second")
    kept = {name: min(report.overall.kept_share(name, model) for model in (0, 1)) for name in RESOLUTIONS}
    method, reason = recommend(report)
    assert method == expected
    clear = max(kept.values()) - kept["average"] >= CLEAR_GAIN
    best = max(kept, key=lambda name: kept[name]) if clear else "average"
    assert METHODS_OF[best] == method
    assert f"{kept[best]:.0%}" in reason
    assert recommend(report_of(tmp_path, "first", "second", "third"))[0] != "resolve_conflicts"  # of pairs


@pytest.mark.parametrize("base", [True, False])
def test_a_merge_warns_of_another_initialisation_as_the_report_does(
    base: bool, family: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path / "other", seed=7, layers=4)
    options: dict[str, Any] = {"base": family / "a", "method": "ties"} if base else {}
    merge([tmp_path / "other"] if base else [family / "a", tmp_path / "other"], tmp_path / "out", **options)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "have other initialisations (cosine " in line
    assert "--align weights" in line
    caplog.clear()
    merge([family / "a", family / "b"], tmp_path / "near")
    assert not caplog.records


def test_alike_models_need_no_election(change: Weights, tmp_path: Path) -> None:
    relative(tmp_path, "one", change, 1.0)
    relative(tmp_path, "more", change, 2.0)
    report = report_of(tmp_path, "one", "more")
    assert report.overall.opposed_share(0, 1) < 0.01
    assert report.overall.interference == pytest.approx(0, abs=1e-3)
    assert recommend(report)[0] == "task_arithmetic"
    assert warnings_of(report) == []


def test_a_foreign_base_is_named(change: Weights, tmp_path: Path) -> None:
    relative(tmp_path, "near", change, 1.0)
    relative(tmp_path, "far", weights_of(tmp_path / "base"), 1.5)
    report = report_of(tmp_path, "near", "far")
    assert recommend(report)[0] == "ensemble"
    (line,) = warnings_of(report)
    assert line.startswith(f"far is {report.overall.norm_ratio(1):.1f} times the base's length")


def test_one_model_has_nothing_to_conflict_with(family: Path) -> None:
    report = report_of(family, "a")
    assert report.pairs == []
    assert recommend(report)[0] == "task_arithmetic"
    assert report.overall.interference == pytest.approx(0, abs=1e-6)


def test_another_initialisation_is_named_with_its_remedy(change: Weights, tmp_path: Path) -> None:
    relative(tmp_path, "near", change, 1.0)
    write_tiny_model(tmp_path / "other", seed=7, layers=4)
    report = report_of(tmp_path, "near", "other")
    assert abs(report.overall.weight_cosine(1)) < 0.05
    assert report.overall.weight_cosine(0) > 0.95
    assert recommend(report)[0] == "ensemble"
    (line,) = warnings_of(report)
    assert line.startswith("The weights of other and base have other initialisations")
    assert "--align weights" in line
    aligned = replace(report, aligned=True)
    assert ["still unlike" in line and "--align" not in line for line in warnings_of(aligned)] == [True]
    assert recommend(aligned)[0] == "ensemble"


def test_the_report_is_json_with_its_advice(family: Path) -> None:
    report = report_of(family, "a", "b")
    numbers = describe_conflicts(report)
    assert numbers["recommendation"]["method"] == recommend(report)[0]
    assert numbers["overall"]["pairs"][0]["cosine"] == report.overall.cosine(0, 1)
