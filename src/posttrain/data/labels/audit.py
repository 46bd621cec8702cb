"""From features and labels to what is wrong with the labels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.data.labels.confident_learning import Floats, Labels
from posttrain.data.labels.noise import Channel, fit
from posttrain.data.labels.out_of_fold import folds, predictions

_LEAST_WEIGHT = 1e-3  # so that a class of which nothing seems right is still learnt


class Audit(NamedTuple):
    """What the labels look like from outside.

    Attributes:
        probabilities: float64 [N, K], out of fold.
        channel: fitted to them.
    """

    probabilities: Floats
    channel: Channel


def audit(
    features: npt.NDArray[Any], labels: Labels, inputs: Sequence[str], count: int = 5, rounds: int = 2, seed: int = 0
) -> Audit:
    """Predict out of fold, fit the channel, and predict again with each record weighed by how likely it is right.

    What wrong labels have taught the first models thus counts little in the next. The predictions are the mean over
    the rounds. No model learns from the record that it predicts; of its label it knows what others' weights tell.

    Args:
        features: [N, D], of about unit length.
        labels: int64 [N] in 0..K-1, each with at least two different inputs.
        inputs: [N], equal for equal inputs.
        count: folds.
    """
    fold = folds(inputs, labels, count, seed)
    models: dict[int, Any] = {}
    total = predictions(features, labels, fold, models=models)
    channel = fit(labels, total)
    for number in range(2, rounds + 1):
        total = total + predictions(features, labels, fold, np.maximum(channel.correct, _LEAST_WEIGHT), models)
        channel = fit(labels, total / number)
    return Audit(total / rounds, channel)
