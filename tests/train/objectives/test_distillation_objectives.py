"""Distillation against the papers' formulas, written out in NumPy and SciPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.store.errors import UserError
from posttrain.train.objectives.config import DistillationConfig
from posttrain.train.objectives.distillation import TopTokens, distill, top_tokens
from posttrain.train.objectives.loss import mean_metrics

pytestmark = pytest.mark.slow

Array = np.ndarray
logit_pairs = st.tuples(st.integers(1, 4), st.integers(2, 9)).flatmap(
    lambda shape: arrays(np.float64, (2, *shape), elements=st.floats(-15, 15))
)
DIVERGENCES = ("forward", "reverse", "jensen_shannon")
each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def loss_sum(student: Array, teacher: Array, config: DistillationConfig) -> float:
    return distill(torch.from_numpy(student), torch.from_numpy(teacher), config).sum.item()


def divergence_formula(student: Array, teacher: Array, divergence: str, beta: float) -> Array:
    """Divergences of probabilities [N, C]."""
    from scipy.special import rel_entr

    if divergence == "forward":
        return rel_entr(teacher, student).sum(1)
    if divergence == "reverse":
        return rel_entr(student, teacher).sum(1)
    mixture = beta * teacher + (1 - beta) * student
    return beta * rel_entr(teacher, mixture).sum(1) + (1 - beta) * rel_entr(student, mixture).sum(1)


@each_divergence
@given(logit_pairs, st.floats(0.02, 0.98), st.floats(0.5, 4))
def test_distillation_matches_the_papers_formula(
    divergence: str, logits: Array, beta: float, temperature: float
) -> None:
    from scipy.special import softmax

    config = DistillationConfig(divergence=divergence, beta=beta, temperature=temperature)
    probabilities = softmax(logits / temperature, axis=-1)
    expected = divergence_formula(*probabilities, divergence, beta).sum()
    assert loss_sum(*logits, config) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(logit_pairs)
def test_the_even_mixture_is_scipys_jensen_shannon(logits: Array) -> None:
    from scipy.spatial.distance import jensenshannon
    from scipy.special import softmax

    distance = jensenshannon(*softmax(logits, axis=-1), axis=1)
    expected = (np.nan_to_num(distance) ** 2).sum()  # SciPy's root of -1e-17 is NaN
    assert loss_sum(*logits, DistillationConfig()) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(logit_pairs, st.floats(0.02, 0.98))
def test_jensen_shannon_lies_between_0_and_the_entropy_of_its_mixture(logits: Array, beta: float) -> None:
    from scipy.stats import entropy

    for student, teacher in zip(*logits, strict=True):
        result = loss_sum(student[None], teacher[None], DistillationConfig(beta=beta))
        assert -1e-12 <= result <= entropy([beta, 1 - beta]) + 1e-12


@given(logit_pairs)
def test_jensen_shannon_tends_to_either_direction(logits: Array) -> None:
    logits = logits / 8  # so that the limit is reached
    student, teacher = logits
    low, high = (loss_sum(student, teacher, DistillationConfig(beta=beta)) for beta in (1e-6, 1 - 1e-6))
    forward, reverse = (loss_sum(student, teacher, DistillationConfig(divergence=name)) for name in DIVERGENCES[:2])
    assert low / 1e-6 == pytest.approx(forward, rel=1e-3, abs=1e-6)
    assert high / 1e-6 == pytest.approx(reverse, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("divergence", "top_k"), [("forward", None), ("reverse", 1), ("jensen_shannon", 3)])
@given(logit_pairs)
def test_self_distillation_has_no_loss_and_no_gradient(divergence: str, top_k: int | None, logits: Array) -> None:
    student = torch.from_numpy(logits[0].copy()).requires_grad_()
    config = DistillationConfig(divergence=divergence, top_k=top_k, temperature=1.5)
    result = distill(student, torch.from_numpy(logits[0]), config)
    result.sum.backward()
    assert result.sum.item() == pytest.approx(0, abs=1e-9)
    assert student.grad is not None
    assert student.grad.abs().max().item() == pytest.approx(0, abs=1e-9)
    assert top_k or mean_metrics(result.metrics)["agreement"] == 1  # among equally probable tokens any may be chosen


@given(logit_pairs, st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_soft_and_hard_targets(logits: Array, weight: float, seed: int) -> None:
    from scipy.special import log_softmax, rel_entr, softmax

    student, teacher = logits
    rows, vocabulary = student.shape
    targets = np.random.default_rng(seed).integers(0, vocabulary, rows)
    config = DistillationConfig(divergence="forward", temperature=2, hard_weight=weight)
    result = distill(*map(torch.from_numpy, (student, teacher)), config, targets=torch.from_numpy(targets))
    soft = rel_entr(softmax(teacher / 2, axis=1), softmax(student / 2, axis=1)).sum()
    hard = -log_softmax(student, axis=1)[np.arange(rows), targets].sum()
    assert result.sum.item() == pytest.approx((1 - weight) * soft + weight * hard, rel=1e-6, abs=1e-9)
    assert mean_metrics(result.metrics)["divergence"] == pytest.approx(soft / rows, rel=1e-6, abs=1e-9)


@each_divergence
@given(logit_pairs, st.integers(1, 10))
def test_a_truncated_teacher_matches_the_formula(divergence: str, logits: Array, k: int) -> None:
    from scipy.special import softmax

    student, teacher = logits
    config = DistillationConfig(divergence=divergence, beta=0.3, temperature=1.5)
    top = top_tokens(torch.from_numpy(teacher), k, temperature=1.5)
    actual = distill(torch.from_numpy(student), top, config).sum.item()
    truncated = loss_sum(student, teacher, config.model_copy(update={"top_k": k}))
    assert actual == truncated
    # By hand: the k best tokens, and all others as one event.
    expected = 0.0
    for row, ids in enumerate(top.ids.numpy()):
        events = []
        for logits_of in (student, teacher):
            probabilities = softmax(logits_of[row] / 1.5)
            remainder = np.delete(probabilities, ids).sum()
            events.append(np.append(probabilities[ids], remainder)[None])
        expected += divergence_formula(*events, divergence, 0.3).sum()
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    full = loss_sum(student, teacher, config)
    assert actual <= full + 1e-6
    if k >= student.shape[1] - 1:  # the remainder is one token or none
        assert actual == pytest.approx(full, rel=1e-4, abs=1e-6)


def test_top_tokens_are_the_most_probable() -> None:
    top = top_tokens(torch.tensor([[0.0, math.log(6), math.log(3)]]), 2)
    assert top.ids.tolist() == [[1, 2]]
    torch.testing.assert_close(top.log_probabilities, torch.tensor([[0.6, 0.3]]).log())


def test_distillation_of_an_example() -> None:
    teacher, student = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, 0.0]])
    forward = distill(student, teacher, DistillationConfig(divergence="forward"))
    assert forward.sum.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    reverse = distill(student, teacher, DistillationConfig(divergence="reverse"))
    assert reverse.sum.item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


@each_divergence
@pytest.mark.parametrize("top_k", [None, 1, 2])
def test_impossible_tokens_stay_finite(divergence: str, top_k: int | None) -> None:
    teacher = torch.tensor([[1.0, 0.0, -torch.inf]])
    student = teacher.clone().requires_grad_()
    result = distill(student, teacher, DistillationConfig(divergence=divergence, top_k=top_k))
    result.sum.backward()
    assert result.sum.item() == pytest.approx(0, abs=1e-6)
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="vocabulary has 5 tokens, the student's 4"):
        distill(torch.zeros(2, 4), torch.zeros(2, 5), DistillationConfig(top_k=2))


def test_hard_targets_are_required() -> None:
    with pytest.raises(ValueError, match="needs targets"):
        distill(torch.zeros(2, 4), torch.zeros(2, 4), DistillationConfig(hard_weight=0.5))


@each_divergence
def test_a_remainder_below_float32_has_no_gradient(divergence: str) -> None:
    # Both leave 2e-9 to the other tokens, which 1 minus the top tokens' mass cannot show.
    logits = torch.tensor([[20.0, 19.0, -1.0, -1.0]], requires_grad=True)
    config = DistillationConfig(divergence=divergence)
    result = distill(logits, top_tokens(logits, 2), config)
    result.sum.backward()
    assert result.sum.item() == pytest.approx(0, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.abs().max().item() == pytest.approx(0, abs=1e-6)


def test_top_tokens_may_be_in_any_order() -> None:
    top = TopTokens(torch.tensor([[0, 2]]), torch.tensor([[0.2, 0.7]]).log())
    result = distill(torch.tensor([[0.0, 0.0, 1.0]]), top, DistillationConfig())
    assert mean_metrics(result.metrics)["agreement"] == 1
