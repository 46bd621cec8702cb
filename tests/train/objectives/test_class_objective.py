import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.store.errors import UserError
from posttrain.train.objectives.classification import classification, label_weights
from posttrain.train.objectives.config import ClassificationConfig
from posttrain.train.objectives.loss import mean_metrics

Array = np.ndarray
batches = st.tuples(st.integers(1, 6), st.integers(2, 5)).flatmap(
    lambda shape: st.tuples(
        arrays(np.float64, shape, elements=st.floats(-30, 30)),
        arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)),
        arrays(np.float64, shape[1], elements=st.floats(0.1, 5)),
    )
)


@given(batches, st.floats(0, 0.9), st.booleans())
def test_classification_matches_its_definition(
    batch: tuple[Array, Array, Array], smoothing: float, weighted: bool
) -> None:
    from scipy.special import log_softmax

    logits, targets, weights = batch
    labels = logits.shape[1]
    if not weighted:
        weights = np.ones(labels)
    actual = classification(
        torch.from_numpy(logits),
        torch.from_numpy(targets),
        ClassificationConfig(label_smoothing=smoothing),
        weights=torch.from_numpy(weights) if weighted else None,
    )
    target_distribution = (1 - smoothing) * np.eye(labels)[targets] + smoothing / labels
    expected = -(weights * target_distribution * log_softmax(logits, axis=1)).sum()
    assert actual.sum.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert actual.count == pytest.approx(weights[targets].sum())
    assert mean_metrics(actual.metrics)["accuracy"] == pytest.approx((logits.argmax(1) == targets).mean())


@given(batches)
def test_a_label_weight_of_two_repeats_the_row(batch: tuple[Array, Array, Array]) -> None:
    logits, targets = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
    weights = torch.ones(logits.shape[1])
    weights[0] = 2
    result = classification(logits, targets, ClassificationConfig(), weights=weights)
    weighted_rows = targets == 0
    repeated = classification(
        torch.cat([logits, logits[weighted_rows]]), torch.cat([targets, targets[weighted_rows]]), ClassificationConfig()
    )
    assert result.count == repeated.count
    assert result.sum.item() == pytest.approx(repeated.sum.item(), rel=1e-9, abs=1e-9)


def test_classification_of_an_example() -> None:
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    result = classification(logits, torch.tensor([0, 1]), ClassificationConfig())
    assert result.sum.item() == pytest.approx(math.log(4 / 3) + math.log(2))
    assert mean_metrics(result.metrics) == {"accuracy": 0.5}


def test_label_weights_follow_the_labels() -> None:
    config = ClassificationConfig(label_weights={"loan": 3.0})
    weights = label_weights(["card", "loan"], config)
    assert weights is not None
    assert weights.tolist() == [1, 3]
    assert label_weights(["card", "loan"], ClassificationConfig()) is None


def test_a_weight_of_an_unknown_label_is_refused() -> None:
    with pytest.raises(UserError, match="no label `laon` to weigh; did you mean `loan`") as caught:
        label_weights(["card", "loan"], ClassificationConfig(label_weights={"laon": 3.0}), "train.label_weights")
    assert caught.value.where == "train.label_weights"
