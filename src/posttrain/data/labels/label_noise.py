"""Estimates how likely each label is right: out-of-fold predictions and a noise channel fitted to them.

The labels are modelled as the output of a channel: the true class y of a record with features x has the probability
q(y | x), and comes out as label s with the probability T[y, s] (Angluin and Laird 1988; as a correction of predictions
by Patrini et al. 2017, arXiv:1609.03683). The channel is fitted by expectation maximisation (Dawid and Skene 1979),
with q a temperature-scaled prediction (Guo et al. 2017, arXiv:1706.04599). It starts at the confident joint of
Northcutt, Jiang and Chuang, "Confident learning: estimating uncertainty in dataset labels" (JAIR 2021,
arXiv:1911.00068).

Pruning by the confident joint alone is worse: its thresholds are means over noisy labels, so that a prediction of
middling confidence may count as an error however likely the label was, and its counts do not say which records are
meant.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posttrain.models.linear_head import assign_folds, predict_out_of_fold

Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MAX_EM_ITERATIONS = 50

_EM_TOLERANCE = 1e-5  # nats per record; one label changes the likelihood by far more

_TEMPERATURES = np.log([0.05, 2.0])

_MIN_PROBABILITY = 1e-12

_MIN_WEIGHT = 1e-3  # above 0, so that a class whose labels all seem wrong is still learned


class NoiseChannel(NamedTuple):
    """A fitted channel.

    Attributes:
        temperature: divisor of the predictions' logarithms; below 1 the model was underconfident.
        transition: float64 [K, K], row y: the probabilities of the labels of a record of class y.
        correct: float64 [N], the probability that the label is right.
        likely: int64 [N], the most likely true class, the first of equals.
    """

    temperature: float
    transition: Floats
    correct: Floats
    likely: Labels


def confident_joint(labels: Labels, probabilities: Floats) -> Labels:
    """Counts the records labelled s that are confidently of class y, int64 [K, K] by (s, y) (equation 1 of the paper).

    The threshold of a class is the mean probability of that class among the records with its label (equation 2). A
    record counts for the most likely class whose threshold it reaches, and not at all if it reaches none.
    """
    classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, probabilities[np.arange(len(labels)), labels], minlength=classes)
    # No prediction is confident for a class without records: infinity is never reached.
    thresholds = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
    reached = np.where(probabilities >= thresholds, probabilities, -1.0)
    counted = reached.max(axis=1, initial=-1.0) >= 0
    pairs = np.bincount(labels[counted] * classes + reached.argmax(axis=1)[counted], minlength=classes * classes)
    return pairs.reshape(classes, classes).astype(np.int64)


def fit_noise_channel(labels: Labels, probabilities: Floats) -> NoiseChannel:
    """Fits temperature and channel by maximum likelihood of the labels, with one pseudo-record in each cell.

    The pseudo-records (Laplace's rule of succession) follow the overall rate of wrong labels, evenly over the wrong
    classes. Without them, a pair of classes that the model confuses would look like one that annotators confuse.

    Args:
        labels: int64 [N] in 0..K-1.
        probabilities: float64 [N, K], predicted out of fold.
    """
    from scipy.optimize import minimize_scalar

    count, classes = probabilities.shape
    if not count or classes < 2:
        return NoiseChannel(1.0, np.eye(classes), np.ones(count), labels.copy())
    # A probability of 0 would rule a class out, whatever the temperature.
    logits = np.log(np.maximum(probabilities, _MIN_PROBABILITY))
    seen = confident_joint(labels, probabilities).T.astype(np.float64)
    temperature, before = 1.0, np.inf
    for _ in range(_MAX_EM_ITERATIONS):
        transition = _smoothed_transition(seen)
        towards = transition[:, labels].T

        def loss(logarithm: float, towards: Floats = towards) -> float:
            return -float(np.log(np.sum(_scaled_softmax(logits, np.exp(logarithm)) * towards, axis=1)).mean())

        best = minimize_scalar(loss, bounds=_TEMPERATURES, method="bounded", options={"xatol": 1e-3})
        temperature = float(np.exp(best.x))
        true_class = _scaled_softmax(logits, temperature) * towards
        true_class /= true_class.sum(axis=1, keepdims=True)
        if before - best.fun < _EM_TOLERANCE:
            break
        before = best.fun
        seen = np.stack([np.bincount(labels, column, minlength=classes) for column in true_class.T])
    return NoiseChannel(temperature, transition, true_class[np.arange(count), labels], true_class.argmax(axis=1))


def _smoothed_transition(seen: Floats) -> Floats:
    """Smooths and normalise counts by (true class, label) to rows that sum to 1."""
    classes = len(seen)
    wrong = 1 - np.trace(seen) / max(1.0, seen.sum())
    prior = np.full((classes, classes), wrong / (classes - 1))
    np.fill_diagonal(prior, 1 - wrong)
    prior = np.maximum(prior, _MIN_PROBABILITY)
    smoothed = seen + classes * prior
    return np.asarray(smoothed / smoothed.sum(axis=1, keepdims=True), dtype=np.float64)


def _scaled_softmax(logits: Floats, temperature: float) -> Floats:
    """Returns the softmax of ``logits / temperature`` over rows."""
    scaled = logits / temperature
    # The same softmax, and `exp` cannot overflow.
    scaled -= scaled.max(axis=1, keepdims=True)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=1, keepdims=True)
    return scaled


def audit_labels(
    features: npt.NDArray[Any], labels: Labels, inputs: Sequence[str], count: int = 5, rounds: int = 2, seed: int = 0
) -> NoiseChannel:
    """Predicts out of fold, fits the channel, and predicts again with records weighed by how likely they are right.

    The weights reduce the influence of wrong labels on the next models. The channel is fitted to the mean over the
    rounds. No model learns from the record that it predicts; its label enters only through other records' weights.

    Args:
        features: [N, D], of about unit length.
        labels: int64 [N] in 0..K-1, each with at least two different inputs.
        inputs: [N], equal for equal inputs.
        count: folds.
    """
    fold = assign_folds(inputs, labels, count, seed)
    models: dict[int, Any] = {}
    total = predict_out_of_fold(features, labels, fold, models=models)
    channel = fit_noise_channel(labels, total)
    for number in range(2, rounds + 1):
        # Weighed, not removed: a class whose labels all seem wrong would be left without a record.
        total = total + predict_out_of_fold(features, labels, fold, np.maximum(channel.correct, _MIN_WEIGHT), models)
        channel = fit_noise_channel(labels, total / number)
    return channel
