import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.models.chat import TokenizedExample
from posttrain.train.config import TrainConfig
from posttrain.train.objectives.base import ObjectiveInputs
from posttrain.train.objectives.config import KtoConfig
from posttrain.train.objectives.kto import KtoObjective, kl_estimate, kto
from posttrain.train.objectives.loss import SequenceLogProbs, mean_metrics

Array = np.ndarray


def sequences(sums: Array | list[float]) -> SequenceLogProbs:
    values = torch.as_tensor(sums)
    return SequenceLogProbs(values, torch.ones(len(values), dtype=torch.long))


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.tuples(
            arrays(np.float64, (2, n), elements=st.floats(-100, 0)), arrays(np.bool_, n, elements=st.booleans())
        )
    ),
    st.floats(-5, 5),
    st.floats(0.01, 2),
    st.floats(0, 3),
    st.floats(0, 3),
)
def test_kto_matches_the_papers_formula(
    batch: tuple[Array, Array], kl: float, beta: float, desirable: float, undesirable: float
) -> None:
    from scipy.special import expit

    (policy, reference), desirable_rows = batch
    config = KtoConfig(beta=beta, desirable_weight=desirable, undesirable_weight=undesirable)
    actual = kto(
        sequences(policy),
        sequences(reference),
        torch.from_numpy(desirable_rows),
        torch.tensor(kl, dtype=torch.float64),
        config,
    )
    expected = 0.0
    for ratio, is_good in zip(policy - reference, desirable_rows, strict=True):
        z0 = max(kl, 0)
        weight = desirable if is_good else undesirable
        value = weight * expit(beta * (ratio - z0) if is_good else beta * (z0 - ratio))
        expected += weight - value
    assert actual.sum.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert actual.count == len(desirable_rows)


def test_kto_of_an_example() -> None:
    from scipy.special import expit

    # Log-ratios 2 and -1 desirable, 3 undesirable; kl 1 nat.
    desirable_rows = torch.tensor([True, True, False])
    config = KtoConfig(desirable_weight=2, undesirable_weight=0.5)
    actual = kto(sequences([-3.0, -5, -4]), sequences([-5.0, -4, -7]), desirable_rows, torch.tensor(1.0), config)
    expected = 2 * expit(-0.1) + 2 * expit(0.2) + 0.5 * expit(0.2)
    assert actual.sum.item() == pytest.approx(expected)
    assert {name: count for name, (_, count) in actual.metrics.items()} == {
        "kl": 3,
        "rewards/chosen": 2,
        "logps/chosen": 2,
        "rewards/rejected": 1,
        "logps/rejected": 1,
    }
    assert mean_metrics(actual.metrics) == pytest.approx(
        {
            "kl": 1,
            "rewards/chosen": 0.05,
            "rewards/rejected": 0.3,
            "rewards/margins": -0.25,
            "logps/chosen": -4,
            "logps/rejected": -4,
        }
    )


@pytest.mark.parametrize("desirable", [True, False])
def test_kto_with_answers_of_one_kind(desirable: bool) -> None:
    config = KtoConfig()
    result = kto(sequences([-3.0]), sequences([-3.0]), torch.tensor([desirable]), torch.tensor(0.0), config)
    assert result.sum.item() == pytest.approx(0.5)
    assert ("rewards/rejected" in mean_metrics(result.metrics)) is not desirable


def test_the_kl_estimate_is_a_clamped_mean_without_graph() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -6.0], requires_grad=True)
    policy = SequenceLogProbs(log_probs, torch.ones(3, dtype=torch.long))
    estimate = kl_estimate(policy, sequences([-4.0, -4, -4]))
    assert estimate.item() == pytest.approx(1)
    assert not estimate.requires_grad
    assert kl_estimate(policy, sequences([0.0, 0, 0])).item() == 0
    assert kl_estimate(policy[:0], sequences([])).item() == 0


def test_the_kl_estimate_gets_no_gradient() -> None:
    from scipy.special import expit

    kl = torch.tensor(0.5, requires_grad=True)
    log_probs = torch.tensor([-1.0], requires_grad=True)
    policy = SequenceLogProbs(log_probs, torch.ones(1, dtype=torch.long))
    kto(policy, sequences([-2.0]), torch.tensor([True]), kl, KtoConfig()).sum.backward()
    assert kl.grad is None
    slope = expit(0.05) * expit(-0.05)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(-0.1 * slope)


def test_saturated_answers_keep_their_precision() -> None:
    result = kto(sequences([0.0]), sequences([-30.0]), torch.tensor([True]), torch.tensor(0.0), KtoConfig(beta=1))
    assert result.sum.item() == pytest.approx(math.exp(-30), rel=1e-4, abs=0)


def test_the_number_of_marks_must_match() -> None:
    with pytest.raises(ValueError, match="marks"):
        kto(sequences([-1.0, -2]), sequences([-1.0, -2]), torch.tensor([True]), torch.tensor(0.0), KtoConfig())


def test_marks_are_those_of_the_records_or_of_the_sides_of_pairs() -> None:
    lone = [[TokenizedExample([1, number, 3], [False, False, True])] for number in range(3)]
    config = TrainConfig(objective={"name": "kto"}, batch_size=2)
    marked = KtoObjective.from_inputs(ObjectiveInputs(lone, config, Any, [0, 1, 0]))
    assert marked.desirable.tolist() == [False, True, False]
    pairs = [[*lone[0], *lone[1]], [*lone[1], *lone[2]]]
    assert KtoObjective.from_inputs(ObjectiveInputs(pairs, config, Any)).desirable.tolist() == [True, False] * 2
