import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from posttrain.train.objectives.classification import classification
from posttrain.train.objectives.config import ClassificationConfig
from posttrain.train.objectives.loss import mean_metrics

Array = np.ndarray
batches = st.tuples(st.integers(1, 6), st.integers(2, 5)).flatmap(
    lambda shape: st.tuples(
        arrays(np.float64, shape, elements=st.floats(-30, 30)),
        arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)),
    )
)


@given(batches, st.floats(0, 0.9))
def test_classification_matches_its_definition(batch: tuple[Array, Array], smoothing: float) -> None:
    from scipy.special import log_softmax

    logits, targets = batch
    labels = logits.shape[1]
    actual = classification(
        torch.from_numpy(logits),
        torch.from_numpy(targets),
        ClassificationConfig(label_smoothing=smoothing),
    )
    target_distribution = (1 - smoothing) * np.eye(labels)[targets] + smoothing / labels
    expected = -(target_distribution * log_softmax(logits, axis=1)).sum()
    assert actual.sum.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert actual.count == len(targets)
    assert mean_metrics(actual.metrics)["accuracy"] == pytest.approx((logits.argmax(1) == targets).mean())


def test_classification_of_an_example() -> None:
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    result = classification(logits, torch.tensor([0, 1]), ClassificationConfig())
    assert result.sum.item() == pytest.approx(math.log(4 / 3) + math.log(2))
    assert mean_metrics(result.metrics) == {"accuracy": 0.5}
