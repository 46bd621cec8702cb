"""PCGrad against a float64 reference written from the paper, on flat vectors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from posttrain.train.optim import gradient_surgery
from posttrain.train.optim.config import OptimizerConfig
from posttrain.train.optim.gradient_surgery import (
    GradientSurgery,
    conflict_metrics,
    gram_matrix,
    pcgrad,
)
from posttrain.train.optim.master_weights import MasterWeights

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_replaced_by_the_combination(dtype: torch.dtype) -> None:
    """Over several steps, as buffers and sums of one must not leak into the next."""
    model = Model(dtype)
    masters = MasterWeights(model, OptimizerConfig())
    surgery = GradientSurgery(masters, 5, "abc")
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
        projected = pcgrad_reference(means, np.random.default_rng([5, step, 0, 0, 0, 0, 2]))
        expected = np.array(shares) @ projected if len(shares) > 1 else parts[0]
        np.testing.assert_allclose(flat_sums(masters), expected, atol=2e-2 if dtype == torch.bfloat16 else 3e-6)
        assert metrics == pytest.approx(conflict_metrics(means @ means.T), abs=1e-2)
        masters.step(1e-2)
    masters.close()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_summed(bad: float) -> None:
    """The loss scaler and the monitor see them in the norm."""
    model = Model(torch.float32)
    masters = MasterWeights(model, OptimizerConfig())
    surgery = GradientSurgery(masters, 0, "ab")
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
        surgery = GradientSurgery(masters, 0, "abc")
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
