"""PCGrad, CAGrad and MGDA against float64 references written from the papers, on flat vectors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from posttrain.train.optim import gradient_surgery
from posttrain.train.optim.config import OptimizerConfig, SurgeryConfig
from posttrain.train.optim.gradient_surgery import (
    GradientSurgery,
    cagrad,
    conflict_metrics,
    gram_matrix,
    min_norm_weights,
    pcgrad,
)
from posttrain.train.optim.master_weights import MasterWeights
from posttrain.train.optim.offload import Offload

seeds = given(st.integers(0, 2**32 - 1))
some = settings(max_examples=40, deadline=None)


def draw(seed: int, decades: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """float64 [T, N], gradients of 2 to 6 tasks of different lengths; and [T], weights that sum to 1."""
    generator = np.random.default_rng(seed)
    tasks = int(generator.integers(2, 7))
    lengths = 10 ** generator.uniform(-decades, decades, (tasks, 1))
    gradients = generator.normal(size=(tasks, int(generator.integers(tasks, 12)))) * lengths
    return gradients, generator.dirichlet(np.ones(tasks))


def pcgrad_reference(gradients: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """float64 [T, N], g_i^PC: arXiv:2001.06782, algorithm 1, lines 3 to 10."""
    projected = gradients.copy()
    for i in range(len(gradients)):
        for j in generator.permutation(len(gradients)):
            if j != i and projected[i] @ gradients[j] < 0:
                projected[i] -= (projected[i] @ gradients[j]) / (gradients[j] @ gradients[j]) * gradients[j]
    return projected


def worst_gain(gradients: np.ndarray, mean: np.ndarray, c: float) -> float:
    """max_d min_i d.g_i within c |g_0| of g_0 (arXiv:2110.14048, equation 2), by SLSQP from several starts."""
    from scipy.optimize import minimize

    radius, units = c * np.linalg.norm(mean), np.linalg.norm(gradients, axis=1).max()
    scaled, best = gradients / units, -np.inf
    for seed in range(3):
        start = np.append(np.random.default_rng(seed).normal(size=len(mean)) * 0.1, -10.0)
        result = minimize(
            lambda x: -x[-1],
            start,
            jac=lambda x: np.append(np.zeros(len(mean)), -1.0),
            constraints=[
                {
                    "type": "ineq",
                    "fun": lambda x: scaled @ (mean / radius + x[:-1]) - x[-1],
                    "jac": lambda x: np.hstack([scaled, -np.ones((len(scaled), 1))]),
                },
                {
                    "type": "ineq",
                    "fun": lambda x: 1 - x[:-1] @ x[:-1],
                    "jac": lambda x: np.append(-2 * x[:-1], 0.0),
                },
            ],
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-14},
        )
        inside = result.x[:-1] / max(1.0, float(np.linalg.norm(result.x[:-1])))
        best = max(best, float((gradients @ (mean + radius * inside)).min()))
    return best


@some
@seeds
def test_pcgrad_is_algorithm_1(seed: int) -> None:
    gradients, weights = draw(seed)
    expected = weights @ pcgrad_reference(gradients, np.random.default_rng(seed))
    result = pcgrad(gradients @ gradients.T, weights, np.random.default_rng(seed)) @ gradients
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-9 * np.abs(gradients).max())


def test_pcgrad_of_two_tasks_has_no_conflict_left() -> None:
    gradients = np.array([[2.0, 1.0], [-1.0, 1.0]])
    result = pcgrad(gradients @ gradients.T, np.array([0.5, 0.5]), np.random.default_rng(0)) @ gradients
    # g_1 + 1/2 g_2 = (1.5, 1.5) and g_2 + 1/5 g_1 = (-0.6, 1.2), each orthogonal to the other task's gradient.
    np.testing.assert_allclose(result, [0.45, 1.35], rtol=1e-14)
    assert (gradients @ result > 0).all()


@some
@seeds
def test_without_a_conflict_pcgrad_is_the_plain_sum(seed: int) -> None:
    gradients, weights = draw(seed)
    gram = np.abs(gradients) @ np.abs(gradients).T
    assert (pcgrad(gram, weights, np.random.default_rng(seed)) == weights).all()


def test_pcgrad_draws_another_order_for_each_task_and_seed() -> None:
    gradients = np.random.default_rng(3).normal(size=(6, 6))
    gram, weights = gradients @ gradients.T, np.full(6, 1 / 6)
    results = {tuple(pcgrad(gram, weights, np.random.default_rng(seed))) for seed in (0, 0, 1, 2)}
    assert len(results) == 3


@some
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.2, 0.5, 0.9, 0.99]))
def test_cagrad_gains_most_for_the_task_that_gains_least(seed: int, c: float) -> None:
    gradients, weights = draw(seed)
    coefficients = cagrad(gradients @ gradients.T, weights, c)
    mean, direction = weights @ gradients, coefficients @ gradients
    radius, unit = c * np.linalg.norm(mean), np.linalg.norm(mean) * np.linalg.norm(gradients, axis=1).max()
    assert np.linalg.norm(direction - mean) <= radius * (1 + 1e-9)
    gain = (gradients @ direction).min()
    assert gain >= worst_gain(gradients, mean, c) - 1e-7 * unit
    # By duality no direction gains more than the paper's minimum over the simplex, here at our own weights.
    simplex = (coefficients - weights) / (coefficients - weights).sum()
    assert simplex.min() >= -1e-12
    upper = simplex @ gradients @ mean + radius * np.linalg.norm(simplex @ gradients)
    assert gain == pytest.approx(upper, abs=1e-10 * unit)


def test_cagrad_of_two_tasks_is_the_best_of_a_grid() -> None:
    gradients, weights, c = np.array([[3.0, 0.5], [-1.0, 1.0]]), np.array([0.5, 0.5]), 0.4
    mean = weights @ gradients
    radius = c * np.linalg.norm(mean)
    shares = np.linspace(0, 1, 1_000_001)
    combined = shares[:, None] * gradients[0] + (1 - shares[:, None]) * gradients[1]
    values = combined @ mean + radius * np.linalg.norm(combined, axis=1)
    best = combined[values.argmin()]
    expected = mean + radius * best / np.linalg.norm(best)
    np.testing.assert_allclose(cagrad(gradients @ gradients.T, weights, c) @ gradients, expected, rtol=1e-5)


@some
@seeds
def test_cagrad_without_a_radius_is_the_mean(seed: int) -> None:
    gradients, weights = draw(seed)
    assert (cagrad(gradients @ gradients.T, weights, 0.0) == weights).all()


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([[1, 0], [-1, 0]], [0, 0]),  # the mean is 0, and so is the radius
        ([[1, 0], [-1, 0], [0, 3]], [0, 1]),  # no direction helps the first two: the mean hurts neither
        ([[2, 1], [-2, 1], [0, 0]], [0, 2 / 3]),
        ([[0, 0], [0, 0]], [0, 0]),
        ([[1, 2], [1, 2]], [1.5, 3]),  # identical: the mean and c of it
        ([[0, 0], [2, 0]], [1, 0]),  # one without a gradient gains nothing anywhere
    ],
)
def test_cagrad_at_its_limits(gradients: list[list[float]], expected: list[float]) -> None:
    vectors = np.array(gradients, np.float64)
    coefficients = cagrad(vectors @ vectors.T, np.full(len(vectors), 1 / len(vectors)), 0.5)
    assert np.isfinite(coefficients).all()
    np.testing.assert_allclose(coefficients @ vectors, expected, atol=1e-9)


@some
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 3.0]))
def test_mgda_is_the_shortest_convex_combination(seed: int, decades: float) -> None:
    from scipy.optimize import minimize

    gradients, _ = draw(seed, decades)
    weights = min_norm_weights(gradients @ gradients.T)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    direction = weights @ gradients
    # The Gram matrix has the rounding of its largest element, however short d is.
    rounding = 1e-14 * (gradients * gradients).sum(1).max()
    # Necessary and sufficient: d.g_i >= |d|^2 for every task, so that no task's loss rises along d.
    assert (gradients @ direction).min() >= direction @ direction - rounding
    result = minimize(
        lambda w: float((w @ gradients) @ (w @ gradients)),
        np.full(len(gradients), 1 / len(gradients)),
        jac=lambda w: 2 * gradients @ (w @ gradients),
        bounds=[(0, 1)] * len(gradients),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(len(w))},
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-15},
    )
    assert direction @ direction <= result.fun * (1 + 1e-9) + rounding


@some
@seeds
def test_mgda_of_two_tasks_is_the_closed_form(seed: int) -> None:
    first, second = draw(seed)[0][:2]
    # arXiv:1810.04650, equation 4: the share of the first.
    share = float(np.clip((second - first) @ second / ((first - second) @ (first - second)), 0, 1))
    gradients = np.stack([first, second])
    np.testing.assert_allclose(min_norm_weights(gradients @ gradients.T), [share, 1 - share], atol=1e-9)


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([[1, 0], [-1, 0]], [0, 0]),
        ([[0, 0], [0, 0]], [0, 0]),
        ([[0, 0], [5, 1]], [0, 0]),
        ([[3, 4], [3, 4], [3, 4]], [3, 4]),
        ([[1e-6, 0], [0, 1e6]], [1e-6, 1e-18]),
        ([[1, 0], [-2, 0], [0, 1e-3]], [0, 0]),
    ],
)
def test_mgda_at_its_limits(gradients: list[list[float]], expected: list[float]) -> None:
    vectors = np.array(gradients, np.float64)
    np.testing.assert_allclose(min_norm_weights(vectors @ vectors.T) @ vectors, expected, atol=1e-12)


def test_the_gram_matrix_is_that_of_flat_vectors_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_surgery, "_BLOCK", 7)
    torch.manual_seed(0)
    shapes = [(5, 3), (1,), (4, 2, 2), (14,)]
    gradients = [[torch.randn(shape) * 1e15 for shape in shapes] for _ in range(3)]
    gradients[1][0] = torch.randn(3, 5).T * 1e15  # not contiguous
    flat = np.stack([np.concatenate([part.flatten().double().numpy() for part in parts]) for parts in gradients])
    np.testing.assert_allclose(gram_matrix(gradients), flat @ flat.T, rtol=1e-13)


def test_conflict_metrics_count_pairs_that_have_a_cosine() -> None:
    vectors = np.array([[1.0, 0], [-2, 0], [0, 3], [0, 0]])
    assert conflict_metrics(vectors @ vectors.T) == {
        "gradient_conflicts": pytest.approx(1 / 3),
        "gradient_cosine": pytest.approx(-1 / 3),
    }
    assert conflict_metrics(np.diag([1.0, 0.0])) == {}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(6, 4, dtype=dtype)
        self.linear = nn.Linear(4, 5, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)


def backward(model: Model, task: int, scale: float = 1.0) -> None:
    ids = torch.randint(0, 6, (3,), generator=torch.Generator().manual_seed(task % 97))
    targets = torch.randn(3, 5, generator=torch.Generator().manual_seed(100 + task))
    ((model.linear(model.embedding(ids)).float() * targets).sum() * scale).backward()


def flat_sums(masters: MasterWeights) -> np.ndarray:
    return np.concatenate([total.double().flatten().numpy() for total in masters.finished_sums()])


@pytest.mark.parametrize(
    ("dtype", "offload"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("method", ["pcgrad", "cagrad", "mgda"])
def test_sums_are_replaced_by_the_combination(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, offload: bool, method: str
) -> None:
    """Over several steps, as buffers and sums of one must not leak into the next."""
    model = Model(dtype)
    monkeypatch.setattr(Offload, "from_accelerator", Offload)  # from a CPU to itself
    masters = MasterWeights(model, OptimizerConfig(offload=offload))
    config = SurgeryConfig.read({"method": method}, "train.surgery")
    surgery = GradientSurgery(masters, config, 5, "abc")
    formulas: dict[str, Callable[..., np.ndarray]] = {
        "pcgrad": lambda g, w: w @ pcgrad_reference(g, np.random.default_rng([5, step, 0, 0, 0, 0, 2])),
        "cagrad": lambda g, w: cagrad(g @ g.T, w, 0.5) @ g,
        "mgda": lambda g, w: min_norm_weights(g @ g.T) @ g,
    }
    for step, shares in enumerate([(0.5, 0.3, 0.2), (0.25, 0.75), (1.0,), (0.1, 0.2, 0.7)]):
        parts = []
        for task in range(len(shares)):
            backward(model, task + 10 * step, shares[task])
            parts.append(flat_sums(masters))
            masters.zero_grad()
        for task in range(len(shares)):
            if task:
                surgery.set_aside(task - 1)
            backward(model, task + 10 * step, shares[task] / 2)
            backward(model, task + 10 * step, shares[task] / 2)
        metrics = surgery.combine(step, shares)
        means = np.stack(parts) / np.array(shares)[:, None]
        expected = formulas[method](means, np.array(shares)) if len(shares) > 1 else parts[0]
        np.testing.assert_allclose(flat_sums(masters), expected, atol=2e-2 if dtype == torch.bfloat16 else 3e-6)
        assert metrics == pytest.approx(conflict_metrics(means @ means.T), abs=1e-2)
        masters.step(1e-2)
    masters.close()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_summed(bad: float) -> None:
    """The loss scaler and the monitor see them in the norm."""
    model = Model(torch.float32)
    masters = MasterWeights(model, OptimizerConfig())
    surgery = GradientSurgery(masters, SurgeryConfig(method="pcgrad"), 0, "ab")
    backward(model, 0)
    masters.finished_sums()[1][0, 0] = bad
    surgery.set_aside(0)
    backward(model, 1)
    assert surgery.combine(0, [0.5, 0.5]) == {}
    assert not np.isfinite(list(masters.gradient_norms().values())).all()
    masters.close()


@pytest.mark.parametrize("others", [1, 2])
def test_a_task_without_anything_that_counts_changes_nothing(others: int) -> None:
    """As where all tokens of its answers were cut off; the others' gradients are combined without it."""
    masters = MasterWeights(model := Model(torch.float32), OptimizerConfig())
    results = []
    for scales in ([0.5, 0.5][:others], [0.0, 0.5, 0.5][: others + 1]):
        surgery = GradientSurgery(masters, SurgeryConfig(method="mgda"), 0, "abc")
        for task, scale in enumerate(scales):
            if task:
                surgery.set_aside(task - 1)
            backward(model, task - len(scales), scale)
        metrics = surgery.combine(0, scales)
        assert len(metrics) == (2 if others == 2 else 0)
        results.append(flat_sums(masters))
        masters.zero_grad()
    assert (results[0] == results[1]).all()
    masters.close()
