"""How labels come to be wrong, and how likely each of them is.

The labels are taken for the output of a channel: the true class y of a record with features x has the probability
q(y | x), and comes out as label s with the probability T[y, s] (Angluin and Laird 1988; as a correction of predictions
by Patrini et al. 2017, arXiv:1609.03683). The channel is fitted by expectation maximisation (Dawid and Skene 1979),
with q a temperature-scaled prediction (Guo et al. 2017, arXiv:1706.04599). It begins at the confident joint.

Why not prune by the confident joint alone: its thresholds are means over noisy labels, so that a prediction of middling
confidence may count as an error however likely the label was, and its counts do not say which records are meant.
"""

from typing import NamedTuple

import numpy as np

from posttrain.data.labels.confident_learning import Floats, Labels, confident_joint

_MOST_ITERATIONS = 50
_ENOUGH = 1e-5  # nats a record: far below what one label more or less changes
_TEMPERATURES = np.log([0.05, 2.0])
_LEAST = 1e-12


class Channel(NamedTuple):
    """A fitted channel.

    Attributes:
        temperature: what the predictions' logarithms are divided by; below 1 the model was too unsure.
        transition: float64 [K, K], row y: how a record of class y is labelled.
        correct: float64 [N], the probability that the label is right.
        likely: int64 [N], the likeliest true class; of equally likely ones the first.
    """

    temperature: float
    transition: Floats
    correct: Floats
    likely: Labels


def fit(labels: Labels, probabilities: Floats) -> Channel:
    """Fit temperature and channel by maximum likelihood of the labels, with one imagined record in each cell.

    That record (Laplace's rule of succession) is spread in each row as the labels are in the whole: wrong ones evenly.
    Without it a pair of classes that the model confuses would pass for one that the annotators do.

    Args:
        labels: int64 [N] in 0..K-1.
        probabilities: float64 [N, K], predicted out of fold.
    """
    from scipy.optimize import minimize_scalar

    count, classes = probabilities.shape
    if not count or classes < 2:
        return Channel(1.0, np.eye(classes), np.ones(count), labels.copy())
    logits = np.log(np.maximum(probabilities, _LEAST))
    seen = confident_joint(labels, probabilities).T.astype(np.float64)
    temperature, before = 1.0, np.inf
    for _ in range(_MOST_ITERATIONS):
        transition = _smoothed(seen)
        towards = transition[:, labels].T

        def loss(logarithm: float, towards: Floats = towards) -> float:
            return -float(np.log(np.sum(_scaled(logits, np.exp(logarithm)) * towards, axis=1)).mean())

        best = minimize_scalar(loss, bounds=_TEMPERATURES, method="bounded", options={"xatol": 1e-3})
        temperature = float(np.exp(best.x))
        true_class = _scaled(logits, temperature) * towards
        true_class /= true_class.sum(axis=1, keepdims=True)
        if before - best.fun < _ENOUGH:
            break
        before = best.fun
        seen = np.stack([np.bincount(labels, column, minlength=classes) for column in true_class.T])
    return Channel(temperature, transition, true_class[np.arange(count), labels], true_class.argmax(axis=1))


def _smoothed(seen: Floats) -> Floats:
    """Rows that sum to 1, of counts by (true class, label)."""
    classes = len(seen)
    wrong = 1 - np.trace(seen) / max(1.0, seen.sum())
    prior = np.full((classes, classes), wrong / (classes - 1))
    np.fill_diagonal(prior, 1 - wrong)
    prior = np.maximum(prior, _LEAST)
    smoothed = seen + classes * prior
    return np.asarray(smoothed / smoothed.sum(axis=1, keepdims=True), dtype=np.float64)


def _scaled(logits: Floats, temperature: float) -> Floats:
    """Softmax of ``logits / temperature`` in rows."""
    scaled = logits / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=1, keepdims=True)
    return scaled
