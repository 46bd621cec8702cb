"""Model Stock against the paper's formula in float64."""

from itertools import combinations

import numpy as np
import pytest
import torch

from posttrain.merge.methods.model_stock import interpolation_ratio
from posttrain.testing.merge_methods import merge_tensor, merge_tensors, random_models


def ratio(vectors: list[np.ndarray], clamp: bool = True) -> float:
    """Returns t of task vectors."""
    models = len(vectors)
    pairs = [
        np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b)) if a.any() and b.any() else 0.0
        for a, b in combinations(vectors, 2)
    ]
    cosine = np.mean(pairs)
    t = models * cosine / (1 + (models - 1) * cosine)
    return float(max(t, 0.0) if clamp else t)


def reference(models: list[np.ndarray], base: np.ndarray, clamp: bool = True) -> np.ndarray:
    vectors = [model - base for model in models]
    t = ratio(vectors, clamp)
    return t * np.mean(models, axis=0) + (1 - t) * base


def tuned(models: int, shared: float, shape: tuple[int, ...] = (140, 500)) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draws a base and models whose changes have a part in common, which is negative for opposed ones."""
    generator = torch.Generator().manual_seed(0)
    base, common = torch.randn(2, *shape, generator=generator)
    own = [torch.randn(shape, generator=generator) for _ in range(models)]
    return [
        base + 0.1 * (shared * (-1) ** (number * (shared < 0)) * common + own[number]) for number in range(models)
    ], base


@pytest.mark.parametrize("models", [2, 3, 5])
@pytest.mark.parametrize("shared", [0.5, 2.0, -0.4])
@pytest.mark.parametrize("clamp", [True, False])
def test_tensor(models: int, shared: float, clamp: bool) -> None:
    given, base = tuned(models, shared)
    expected = reference([model.double().numpy() for model in given], base.double().numpy(), clamp)
    result = merge_tensor("model_stock", given, base, clamp=clamp).double().numpy()
    assert np.abs(result - expected).max() <= 2e-6


@pytest.mark.parametrize("options", [{"scope": "row"}, {"filter_wise": True}])
def test_row(options: dict[str, object]) -> None:
    given, base = tuned(3, 1.0)
    rows = zip(*(model.double().numpy() for model in given), base.double().numpy(), strict=True)
    expected = np.stack([reference(list(row[:-1]), row[-1]) for row in rows])
    result = merge_tensor("model_stock", given, base, **options).double().numpy()
    assert np.abs(result - expected).max() <= 2e-6


def test_model() -> None:
    given, base = random_models(3)
    given = [{name: tensor + 0.1 for name, tensor in model.items()} for model in given]
    vectors = [
        np.concatenate([(model[name] - base[name]).double().numpy().ravel() for name in base]) for model in given
    ]
    t = ratio(vectors)
    assert 0.1 < t < 0.9
    merged = merge_tensors("model_stock", given, base, scope="model")
    for name, tensor in base.items():
        average = torch.stack([model[name] for model in given]).double().mean(0)
        torch.testing.assert_close(merged[name].double(), t * average + (1 - t) * tensor, rtol=0, atol=2e-6)


@pytest.mark.parametrize("models", [2, 3, 7])
def test_ratio_of_aligned_orthogonal_and_cancelling_vectors(models: int) -> None:
    assert interpolation_ratio(np.ones((models, models))) == pytest.approx(1)
    assert interpolation_ratio(np.eye(models)) == 0
    cancelling = np.eye(models) * models / (models - 1) - 1 / (models - 1)
    for clamp in (True, False):
        assert interpolation_ratio(cancelling, clamp) == 0


def test_unchanged_models_count_as_orthogonal() -> None:
    given, base = tuned(2, 3.0, (4, 6))
    expected = reference([*(model.double().numpy() for model in given), base.double().numpy()], base.double().numpy())
    result = merge_tensor("model_stock", [*given, base], base)
    assert np.abs(result.double().numpy() - expected).max() <= 2e-6
