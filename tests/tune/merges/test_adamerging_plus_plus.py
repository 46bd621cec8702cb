"""AdaMerging++: task vectors against the paper and TIES, its limit AdaMerging, and its recipe."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.merge.adamerging import AdaMergingConfig
from posttrain.merge.api import merge
from posttrain.merge.recipe import Recipe
from posttrain.models.tiny import write_tiny_model
from posttrain.tune.merges.search import adamerge, elected_models

Weights = dict[str, torch.Tensor]


def read(folder: Path) -> Weights:
    return {name: tensor.double() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``; ``a`` and ``b``, whose task vectors oppose each other in places; ``c`` and ``d``, whose never do."""
    root = tmp_path_factory.mktemp("models")
    base = read(write_tiny_model(root / "base"))
    generator = torch.Generator().manual_seed(0)
    noise = [{n: 0.08 * torch.randn(t.shape, generator=generator) for n, t in base.items()} for _ in range(4)]
    for name, vector in noise[2].items():
        noise[3][name] = noise[3][name].abs() * vector.sign()
    for folder, vectors in zip("abcd", noise, strict=True):
        (root / folder).mkdir()
        for file in (root / "base").iterdir():
            if file.suffix != ".safetensors":
                (root / folder / file.name).write_bytes(file.read_bytes())
        weights = {name: (tensor + vectors[name]).float() for name, tensor in base.items()}
        save_file(weights, root / folder / "model.safetensors", {"format": "pt"})
    (root / "prompts.jsonl").write_text("".join(f'{{"prompt": "text {number}"}}\n' for number in range(4)))
    return root


def elected_by_the_paper(root: Path, names: str, density: float) -> list[Weights]:
    """Trims each whole task vector to its largest elements, and drops those whose sign lost, in float64."""
    base = read(root / "base")
    vectors = [torch.cat([(read(root / name)[key] - base[key]).flatten() for key in base]) for name in names]
    kept = []
    for vector in vectors:
        count = int(density * len(vector))
        mask = torch.zeros(len(vector), dtype=torch.bool)
        mask[vector.abs().argsort(descending=True)[:count]] = True
        kept.append(vector * mask)
    sign = sum(kept).sign()
    sizes = [tensor.numel() for tensor in base.values()]
    agreeing = [torch.where(vector.sign() == sign, vector, 0.0).split(sizes) for vector in kept]
    return [{name: part.view(base[name].shape) for name, part in zip(base, vector, strict=True)} for vector in agreeing]


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_task_vectors_are_those_of_the_paper_and_of_ties(models: Path, tmp_path: Path, density: float) -> None:
    base, expected = read(models / "base"), elected_by_the_paper(models, "ab", density)
    folders = elected_models(models / "base", [models / "a", models / "b"], density, tmp_path)
    results = [read(folder) for folder in folders]
    other = 0
    for name, tensor in base.items():
        for result, vectors in zip(results, expected, strict=True):
            # Float32 numbers of the same size may stand in another order than their float64 sums.
            difference = (result[name] - tensor - vectors[name]).abs() > 1e-6
            other += int(difference.sum())
    assert other <= 2
    dropped = [sum(int((vectors[name] == 0).sum()) for name in base) for vectors in expected]
    assert min(dropped) > (0.75 if density < 1 else 0.2) * sum(tensor.numel() for tensor in base.values())
    values = {"method": "ties", "base": "base", "models": ["a", "b"], "dtype": "float32"}
    options = {"density": density, "trim": "model", "normalize": False}
    merge(Recipe.read({**values, "parameters": options}, "test"), tmp_path / "ties", root=models)
    for name, tensor in read(tmp_path / "ties").items():
        total = results[0][name] + results[1][name] - 2 * base[name]
        torch.testing.assert_close(tensor - base[name], total, rtol=0, atol=1e-6)


def test_without_conflicts_and_trimming_it_is_adamerging(models: Path, tmp_path: Path) -> None:
    recipe = Recipe.read({"method": "task_arithmetic", "base": "base", "models": ["c", "d"]}, "test")
    config = AdaMergingConfig(steps=4, batch_size=4, learning_rate=0.05)

    def coefficients(names: str, density: float | None) -> torch.Tensor:
        chosen = recipe.model_copy(update={"models": Recipe.read({"models": list(names)}, "test").models})
        own = config.model_copy(update={"density": density})
        return adamerge(chosen, models, tmp_path, ["prompts.jsonl"], own)[1].values

    plain = coefficients("cd", None)
    assert (plain - 0.3).abs().max() > 0.05
    torch.testing.assert_close(coefficients("cd", 1.0), plain, rtol=0, atol=1e-4)
    assert (coefficients("ab", 1.0) - coefficients("ab", None)).abs().max() > 1e-3, "conflicts make a difference"


def test_the_recipe_gives_the_model_that_was_learned(models: Path, tmp_path: Path) -> None:
    recipe = Recipe.read(
        {"method": "task_arithmetic", "base": "base", "models": ["a", "b"], "dtype": "float32"}, "test"
    )
    config = AdaMergingConfig(steps=3, batch_size=4, learning_rate=0.3, density=0.2)
    chosen, learned = adamerge(recipe, models, tmp_path, ["prompts.jsonl"], config)
    assert learned.values.min() < 0, "a negative coefficient takes an elected vector back"
    merge(chosen, tmp_path / "out", root=models)
    base, vectors = read(models / "base"), elected_by_the_paper(models, "ab", 0.2)
    wrong = 0
    for name, tensor in read(tmp_path / "out").items():
        group = next(number for number, group in enumerate(learned.groups) if group in name)
        sums = sum(float(learned.values[model, group]) * vectors[model][name] for model in range(2))
        wrong += int(((tensor - base[name] - sums).abs() > 1e-5).sum())
    assert wrong <= 2
