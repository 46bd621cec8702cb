"""TIES against its three steps in float64, written from the paper."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.testing.merge_methods import merge_tensor


def trimmed(vector: np.ndarray, density: float) -> np.ndarray:
    """Keeps the elements that are at least as large as the k-th largest."""
    count = int(density * vector.size)
    if density <= 0 or not vector.size:
        return np.zeros_like(vector)
    threshold = np.sort(np.abs(vector).ravel())[vector.size - max(1, count)]
    return np.where(np.abs(vector) >= threshold, vector, 0.0)


def elected(vectors: list[np.ndarray], weight: list[float], election: str, normalize: bool) -> np.ndarray:
    """Elects signs and merges the elements that have them."""
    weighted = [factor * vector for factor, vector in zip(weight, vectors, strict=True)]
    ballots = weighted if election == "weighted" else [np.sign(vector) for vector in weighted]
    sign = np.where(sum(ballots) >= 0, 1.0, -1.0)
    agree = [np.sign(vector) == sign for vector in weighted]
    total = sum(np.where(mask, vector, 0.0) for mask, vector in zip(agree, weighted, strict=True))
    return averaged(np.asarray(total), agree, weight) if normalize else np.asarray(total)


def averaged(total: np.ndarray, agree: list[np.ndarray], weight: list[float]) -> np.ndarray:
    """Divides by the weights of the models that agree, where they do not cancel."""
    divisor = np.asarray(sum(factor * mask for factor, mask in zip(weight, agree, strict=True)))
    return np.divide(total, divisor, out=np.array(total), where=np.abs(divisor) > 1e-8)


def double(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.double().numpy())


@given(
    seed=st.integers(0, 2**32 - 1),
    density=st.lists(st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.77, 1.0]), min_size=1, max_size=4),
    weights=st.sampled_from([[1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.25, 1.5], [1.0, -0.5, 0.75, -2.0]]),
    election=st.sampled_from(["weighted", "count"]),
    normalize=st.booleans(),
    rounded=st.booleans(),
)
@settings(max_examples=40)
def test_tensor(
    seed: int, density: list[float], weights: list[float], election: str, normalize: bool, rounded: bool
) -> None:
    models, weight = len(density), weights[: len(density)]
    # Numbers of few bits, so that float32 sums are exact and every draw of an election is one; rounded, with many ties.
    generator = np.random.default_rng(seed)
    vectors = generator.integers(-50, 51, (models, 6, 9)) / 64
    if rounded:
        vectors = vectors.round(0)
    base = generator.integers(-50, 51, (6, 9)) / 64
    kept = [trimmed(vector, share) for vector, share in zip(vectors, density, strict=True)]
    expected = base + 0.5 * elected(kept, weight, election, normalize)
    result = merge_tensor(
        "ties",
        [torch.tensor(base + vector, dtype=torch.float32) for vector in vectors],
        torch.tensor(base, dtype=torch.float32),
        weight=weight,
        density=density,
        election=election,
        normalize=normalize,
        scale=0.5,
    )
    np.testing.assert_allclose(double(result), expected, atol=1e-5, rtol=1e-5)


def test_paper_figure_of_conflicting_signs() -> None:
    # Where two models agree and one does not, the average is that of the two.
    base = torch.zeros(4)
    models = [torch.tensor(values) for values in ([2.0, 1.0, -1.0, 0.0], [4.0, -3.0, -2.0, 0.0], [-1.0, 1.0, 4.0, 0.0])]
    assert merge_tensor("ties", models, base, density=1.0).tolist() == [3.0, -3.0, 4.0, 0.0]
    by_count = merge_tensor("ties", models, base, density=1.0, election="count")
    assert by_count.tolist() == [3.0, 1.0, -1.5, 0.0]


def test_density_zero_gives_the_base_and_one_model_at_density_one_itself() -> None:
    base, model = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert torch.equal(merge_tensor("ties", [model], base, density=0.0), base)
    torch.testing.assert_close(merge_tensor("ties", [model], base, density=1.0), model)


@pytest.mark.parametrize("elements", [1, 3, 99])
def test_tensors_of_few_elements_keep_at_least_one(elements: int) -> None:
    base = torch.zeros(elements)
    model = torch.arange(1.0, elements + 1)
    result = merge_tensor("ties", [model], base, density=0.001)
    assert result.tolist() == [*[0.0] * (elements - 1), float(elements)]


def test_small_weights_are_normalised_as_large_ones_are() -> None:
    base, *models = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    expected = merge_tensor("ties", models, base, density=0.5, weight=[1.0, 3.0])
    torch.testing.assert_close(merge_tensor("ties", models, base, density=0.5, weight=[1e-10, 3e-10]), expected)


def test_weights_that_cancel_divide_nothing() -> None:
    # 0.1 + 0.2 - 0.3 is not 0 in floating point, and a division by it would be noise.
    models = [torch.tensor([value]) for value in (1.0, 1.0, -1.0)]
    result = merge_tensor("ties", models, torch.zeros(1), density=1.0, weight=[0.1, 0.2, -0.3])
    assert result.tolist() == pytest.approx([0.6])


def test_a_draw_is_positive() -> None:
    models = [torch.tensor([1.0, -3.0]), torch.tensor([-1.0, 3.0])]
    assert merge_tensor("ties", models, torch.zeros(2), density=1.0).tolist() == [1.0, 3.0]
