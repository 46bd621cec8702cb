"""A linear head on sentence embeddings: trains, calibrates, predicts, saves and loads it.

Multinomial logistic regression. It learns from a few hundred labels in seconds, and is what a language model has to be
better than.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from posttrain.models.calibration import at_temperature, expected_calibration_error, fit_temperature
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, write_atomically

SETTINGS, WEIGHTS = "head.json", "head.safetensors"

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

_VERSION = 1

_INVERSE_PENALTIES = (5.0, 20.0, 80.0, 320.0)

_PENALTY_RECORDS = 2000  # drawn to choose the penalty, which more records change little

_FOLDS = 5

_FIT_TOLERANCE, _FINAL_TOLERANCE = 1e-3, 1e-5

_MAX_FIT_ITERATIONS = 1000

_MIN_PROBABILITY = 1e-12


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Calibrated probabilities of labels, linear in a sentence's embedding.

    Attributes:
        labels: the K labels that it was trained on, in the order of the outputs.
        weights: float32 [K, D], divided by the temperature.
        bias: float32 [K], likewise.
        embedder: key of the sentence model (`posttrain.models.embedder_source.embedder_key`).
        report: measurements out of fold: ``records``, ``accuracy``, ``ece``; and ``inverse_penalty``, ``temperature``.
    """

    labels: tuple[str, ...]
    weights: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]
    embedder: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)

    def probabilities(self, embeddings: npt.NDArray[Any]) -> Floats:
        """Returns the probability of each label, float64 [N, K].

        Args:
            embeddings: float [N, D], by the same sentence model.
        """
        logits = np.asarray(embeddings, np.float64) @ self.weights.astype(np.float64).T + self.bias
        return _softmax(logits)

    def save(self, folder: Path) -> None:
        """Saves the weights as safetensors and everything else as JSON.

        Raises:
            UserError: the disk refused.
        """
        make_folder(folder)
        with disk_errors(folder):
            save_file({"weights": self.weights, "bias": self.bias}, folder / WEIGHTS)
        # The settings last: a kill in between leaves a folder that holds no head.
        settings = {"version": _VERSION, "labels": self.labels, "embedder": self.embedder, "report": dict(self.report)}
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=1, ensure_ascii=False).encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Loads what `save` wrote.

        Raises:
            UserError: the folder holds no such head, or a part of one.
        """
        where = str(folder)
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            if settings["version"] != _VERSION:
                raise UserError(f"a linear head of version {settings['version']} is not known here", where=where)
            tensors = load_file(folder / WEIGHTS)
            labels = tuple(settings["labels"])
            head = cls(labels, tensors["weights"], tensors["bias"], settings["embedder"], settings["report"])
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            raise UserError(f"holds no linear head: {error}", where=where) from None
        if not head.weights.shape[:1] == head.bias.shape == (len(labels),):
            raise UserError("holds a linear head of another shape than its labels", where=where)
        return head


class FittedHead(NamedTuple):
    """A head, and its predictions of the records that it was trained on, each by heads that did not learn from it.

    Attributes:
        head: trained on all records.
        out_of_fold: float64 [N, K], calibrated by the other folds; 0 for a label that only the record's own fold has.
    """

    head: LinearHead
    out_of_fold: Floats


def fit_linear_head(
    embeddings: npt.NDArray[Any],
    answers: Sequence[str],
    labels: Sequence[str],
    inputs: Sequence[str],
    *,
    embedder: str = "",
    seed: int = 0,
) -> FittedHead | None:
    """Trains a head; its penalty and temperature are those of the least negative log-likelihood out of fold.

    A temperature calibrates it (C. Guo et al., On Calibration of Modern Neural Networks, ICML 2017).

    Args:
        embeddings: float [N, D] of the labelled records.
        answers: [N], the labels of the records.
        labels: the closed label set.
        inputs: [N], equal for equal inputs, which share a fold.
        embedder: key of the sentence model.
        seed: fixes the folds.

    Returns:
        None where fewer than two labels have two different inputs each: nothing could be measured.
    """
    from threadpoolctl import threadpool_limits

    present = [label for label in labels if label in set(answers)]
    index_of = {label: index for index, label in enumerate(present)}
    truth = np.array([index_of[answer] for answer in answers], np.int64)
    values = np.asarray(embeddings, np.float64)
    fold = assign_folds(inputs, truth, min(_FOLDS, max(2, len(truth))), seed)
    counts = np.bincount(truth, minlength=len(present))
    # A label in one fold alone cannot be predicted out of fold: its records are errors, and say nothing on confidence.
    spread = np.array([len(set(fold[truth == index].tolist())) > 1 for index in range(len(present))], bool)
    if spread.sum() < 2:
        return None
    drawn = _draw(len(truth), _PENALTY_RECORDS, seed)
    penalty, _ = min(((c, _loss(values[drawn], truth[drawn], fold[drawn], c)) for c in _INVERSE_PENALTIES), key=_second)
    logs = np.log(np.maximum(predict_out_of_fold(values, truth, fold, penalty=penalty), _MIN_PROBABILITY))
    judged = spread[truth]
    temperature = fit_temperature(logs[judged], truth[judged])
    out_of_fold = np.zeros_like(logs)
    for number in np.unique(fold).tolist():
        # By a temperature of the other folds, or the error that is measured would be that of the fit.
        others, own = judged & (fold != number), fold == number
        cooled = fit_temperature(logs[others], truth[others]) if others.any() else temperature
        out_of_fold[own] = np.exp(at_temperature(logs[own], cooled))
    out_of_fold[logs <= np.log(_MIN_PROBABILITY)] = 0.0
    with threadpool_limits(1):
        model = _fit(_regression(penalty, tolerance=_FINAL_TOLERANCE), values, truth)
    # Two classes have one row of weights, for the second class.
    two = len(model.classes_) == 2
    weights = np.concatenate([-model.coef_, model.coef_]) / 2 if two else model.coef_
    bias = np.concatenate([-model.intercept_, model.intercept_]) / 2 if two else model.intercept_
    right = out_of_fold.argmax(axis=1) == truth
    report = {
        "records": len(truth),
        "classes": int((counts > 0).sum()),
        "accuracy": float(right.mean()),
        "ece": expected_calibration_error(out_of_fold.max(axis=1), right),
        "inverse_penalty": penalty,
        "temperature": temperature,
    }
    head = LinearHead(
        tuple(present),
        np.ascontiguousarray(weights / temperature, np.float32),
        np.ascontiguousarray(bias / temperature, np.float32),
        embedder,
        report,
    )
    return FittedHead(head, out_of_fold)


def _second(pair: tuple[float, float]) -> float:
    return pair[1]


def _loss(values: Floats, truth: Labels, fold: Labels, penalty: float) -> float:
    """Returns the negative log-likelihood out of fold, calibrated, in nats per record."""
    probabilities = predict_out_of_fold(values, truth, fold, penalty=penalty)
    logs = np.log(np.maximum(probabilities, _MIN_PROBABILITY))
    # Without records whose label the other folds lack: their loss would be the same for every penalty, and infinite.
    known = probabilities[np.arange(len(truth)), truth] > 0
    if not known.any():
        return np.inf
    cooled = at_temperature(logs[known], fit_temperature(logs[known], truth[known]))
    return float(-cooled[np.arange(int(known.sum())), truth[known]].mean())


def _draw(count: int, size: int, seed: int) -> npt.NDArray[np.int64]:
    rows = np.arange(count)
    return rows if count <= size else np.sort(np.random.default_rng(seed).permutation(rows)[:size])


def _regression(penalty: float, *, tolerance: float = _FIT_TOLERANCE, warm_start: bool = False) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=penalty, tol=tolerance, max_iter=_MAX_FIT_ITERATIONS, warm_start=warm_start)


def _fit(model: Any, values: Floats, labels: Labels, weights: Floats | None = None) -> Any:
    with warnings.catch_warnings():
        # Two records a class are few, and all that there may be in a first round.
        warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%")
        return model.fit(values, labels, weights)


def _softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    probabilities: Floats = shifted / shifted.sum(axis=1, keepdims=True)
    return probabilities


def assign_folds(inputs: Sequence[str], labels: Labels, count: int, seed: int = 0) -> Labels:
    """Assigns every record to a fold, int64 [N] in 0..count-1, each label evenly, in the order of hashes.

    Records with equal label and input share a fold, so that no copy of a record predicts it.

    Args:
        inputs: [N], equal for equal inputs.
        labels: int64 [N].
    """
    hashed = b"".join(hashlib.sha256(f"{seed}\0fold\0{name}".encode()).digest()[:8] for name in inputs)
    draws = np.frombuffer(hashed, dtype=">u8").astype(np.uint64)
    distinct, inverse = np.unique(np.stack([labels.astype(np.uint64), draws]), axis=1, return_inverse=True)
    _, begin = np.unique(distinct[0], return_index=True)
    rank = np.arange(distinct.shape[1]) - np.repeat(begin, np.diff([*begin, distinct.shape[1]]))
    return np.asarray((rank % count)[inverse.reshape(-1)], dtype=np.int64)


def predict_out_of_fold(
    features: npt.NDArray[Any],
    labels: Labels,
    fold: Labels,
    weights: Floats | None = None,
    models: dict[int, Any] | None = None,
    *,
    penalty: float = _INVERSE_PENALTIES[0],
) -> Floats:
    """Predicts the probability of every class for every record, float64 [N, K], by multinomial logistic regression.

    Args:
        features: [N, D], of about unit length.
        labels: int64 [N] in 0..K-1; one that only a single fold has gets the probability 0 there.
        fold: int64 [N].
        weights: float64 [N], how much each record counts in training.
        models: models of an earlier call by fold, from which training continues; updated in place.
        penalty: the inverse of the L2 penalty.
    """
    from threadpoolctl import threadpool_limits

    values = np.asarray(features, dtype=np.float64)
    models = {} if models is None else models
    probabilities = np.zeros((len(labels), int(labels.max(initial=-1)) + 1))
    with threadpool_limits(1):  # more threads would round sums differently, by the number of cores
        for number in np.unique(fold).tolist():
            rest, held_out = fold != number, fold == number
            model = models.setdefault(number, _regression(penalty, warm_start=True))
            _fit(model, values[rest], labels[rest], None if weights is None else weights[rest])
            probabilities[np.ix_(held_out, model.classes_)] = model.predict_proba(values[held_out])
    return probabilities
