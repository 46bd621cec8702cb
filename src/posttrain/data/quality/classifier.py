"""A linear text classifier: trains, calibrates, scores, saves and loads it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from posttrain.data.quality.features import NgramSettings, embed_texts, ngram_features
from posttrain.models.calibration import expected_calibration_error
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, write_atomically

SETTINGS = "classifier.json"

WEIGHTS = "classifier.safetensors"

_VERSION = 1

Numbers = npt.NDArray[np.float64]

Targets = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class LinearClassifier:
    """A calibrated logistic regression for the probability that a text is good.

    Attributes:
        ngrams: the n-grams that are features.
        weights: float32 [B], one for each bucket.
        intercept: of the logit.
        slope, offset: of Platt's calibration: P(good) = 1 / (1 + exp(-(slope * logit + offset))).
        embedder: name of the sentence embeddings that are further features.
        embedding_weights: float32 [D], one for each of their dimensions.
        report: measurements of its training: counts, AUC, ECE.
    """

    ngrams: NgramSettings
    weights: npt.NDArray[np.float32]
    intercept: float
    slope: float = 1.0
    offset: float = 0.0
    embedder: str | None = None
    embedding_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    report: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, texts: Sequence[str]) -> Numbers:
        """Returns uncalibrated logits, float64 [N]; that of a text does not depend on the others."""
        logits = np.full(len(texts), self.intercept)
        weights = self.weights.astype(np.float64)
        for part in ngram_features(texts, self.ngrams):
            size = part.texts.stop - part.texts.start
            logits[part.texts] += np.bincount(part.rows, weights[part.buckets] * part.values, size)
        if self.embedder is not None and len(texts):
            # A matrix product would round a row differently with the number of rows, and so cut shards differently.
            products = embed_texts(self.embedder, texts).astype(np.float64) * self.embedding_weights
            logits += products.sum(axis=1)
        return logits

    def probabilities(self, texts: Sequence[str]) -> Numbers:
        """Returns calibrated P(good), float64 [N]."""
        from scipy.special import expit

        return np.asarray(expit(self.slope * self.logits(texts) + self.offset))

    def save(self, folder: Path) -> None:
        """Saves the weights as safetensors and everything else as JSON.

        Raises:
            UserError: the disk refused.
        """
        make_folder(folder)
        # Weights first: `is_classifier` looks for the settings, so a kill in between leaves no classifier.
        with disk_errors(folder):
            save_file({"weights": self.weights, "embedding_weights": self.embedding_weights}, folder / WEIGHTS)
        settings = {
            "version": _VERSION,
            "ngrams": self.ngrams.model_dump(mode="json"),
            "intercept": self.intercept,
            "slope": self.slope,
            "offset": self.offset,
            "embedder": self.embedder,
            "report": dict(self.report),
        }
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=2).encode())


def is_classifier(folder: Path) -> bool:
    """Returns True if a folder holds the settings of such a classifier."""
    return (folder / SETTINGS).is_file()


def load_classifier(folder: Path) -> LinearClassifier:
    """Loads what `LinearClassifier.save` wrote.

    Raises:
        UserError: the folder holds no such classifier, or a part of one.
    """
    where = str(folder)
    if not is_classifier(folder):
        raise UserError(f"holds no {SETTINGS}", where=where, fix="train one with posttrain.data.quality.classifier")
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        if settings["version"] != _VERSION:
            raise UserError(f"a classifier of version {settings['version']} is not known here", where=where)
        tensors = load_file(folder / WEIGHTS)
        loaded = LinearClassifier(
            NgramSettings.read(settings["ngrams"], where),
            tensors["weights"],
            float(settings["intercept"]),
            float(settings["slope"]),
            float(settings["offset"]),
            settings["embedder"],
            tensors["embedding_weights"],
            settings["report"],
        )
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"is not a whole classifier: {error}", where=where, fix="train it again") from None
    if loaded.weights.shape != (loaded.ngrams.buckets,) or loaded.weights.dtype != np.float32:
        raise UserError(f"its weights do not fit its {SETTINGS}", where=where, fix="train it again")
    return loaded


def train_quality(
    good: Iterable[str],
    bad: Iterable[str],
    *,
    ngrams: NgramSettings | None = None,
    embedder: str | None = None,
    strength: float = 1.0,
    folds: int = 5,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> LinearClassifier:
    """Trains a logistic regression over hashed n-grams, calibrated and measured out of fold.

    A classifier trained on the other folds scores each of the ``folds`` parts. Platt's sigmoid is fitted to these
    logits, and the ``report`` holds their AUC and expected calibration error. The classifier itself learns from all
    texts. The same texts give the same classifier.

    Args:
        good, bad: examples; a text may be in both.
        ngrams: the n-grams that are features.
        embedder: sentence embeddings as further features, by the name that `posttrain.models.embedder` knows.
        strength: weight of the examples against the penalty on large weights, scikit-learn's ``C``.
        folds: number of parts; at least 2.
        seed: seed of the assignment of texts to parts.
        extra: further entries of the report, such as the source of the examples.

    Raises:
        UserError: there are fewer good or bad examples than parts.
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold
    from threadpoolctl import threadpool_limits

    ngrams = ngrams or NgramSettings()
    texts = [*good]
    positives = len(texts)
    texts += bad
    truths = np.arange(len(texts)) < positives
    for name, count in (("good", positives), ("bad", len(texts) - positives)):
        if count < folds:
            what = f"{count} {name} examples are too few for {folds} folds"
            raise UserError(what, where="quality", fix=f"give at least {folds}, better some thousands")
    with threadpool_limits(1):  # more threads would add up in another order, and round differently
        matrix = _feature_matrix(texts, ngrams, embedder)
        logits = np.zeros(len(texts))
        parts = StratifiedKFold(folds, shuffle=True, random_state=seed)
        # Out of fold: on texts that it has learned from, the classifier is surer than on any others.
        for train, test in parts.split(np.zeros(len(texts)), truths):
            weights, intercept = _fit_logistic(matrix[train], truths[train], strength)
            logits[test] = matrix[test] @ weights + intercept
        slope, offset = fit_platt(logits, truths)
        weights, intercept = _fit_logistic(matrix, truths, strength)
    probabilities = 1 / (1 + np.exp(-(slope * logits + offset)))
    report = {
        "good": positives,
        "bad": len(texts) - positives,
        "folds": folds,
        "seed": seed,
        "strength": strength,
        "auc": float(roc_auc_score(truths, logits)),
        "ece": expected_calibration_error(probabilities, truths),
        **(extra or {}),
    }
    return LinearClassifier(
        ngrams,
        weights[: ngrams.buckets].astype(np.float32),
        intercept,
        slope,
        offset,
        embedder,
        weights[ngrams.buckets :].astype(np.float32),
        report,
    )


def fit_platt(logits: Numbers, truths: Targets) -> tuple[float, float]:
    """Fits slope and offset of the sigmoid that maps logits [N] to probabilities.

    Platt, "Probabilistic outputs for support vector machines" (1999): the most likely sigmoid, for targets that are
    drawn in from 0 and 1 by what the counts leave open: (N+ + 1) / (N+ + 2) and 1 / (N- + 2).
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    positives = int(truths.sum())
    targets = np.where(truths, (positives + 1) / (positives + 2), 1 / (len(truths) - positives + 2))
    # BFGS starts with steps of size one, whatever the scale of the logits.
    scale = max(float(np.abs(logits).max()), 1e-12)
    scaled = logits / scale

    def loss(values: Numbers) -> tuple[float, Numbers]:
        margin = values[0] * scaled + values[1]
        residuals = expit(margin) - targets
        # log(1 + e^m) by logaddexp, which does not overflow for large margins.
        value = float(np.sum(np.logaddexp(0, margin) - targets * margin))
        return value, np.array([residuals @ scaled, residuals.sum()])

    base = float(np.log((positives + 1) / (len(truths) - positives + 1)))
    solution = minimize(loss, np.array([0.0, base]), jac=True, method="BFGS", options={"gtol": 1e-8 * len(truths)})
    return float(solution.x[0] / scale), float(solution.x[1])


def _feature_matrix(texts: Sequence[str], ngrams: NgramSettings, embedder: str | None) -> Any:
    """Returns n-grams and embeddings, sparse float64 [N, B + D]."""
    from scipy.sparse import csr_array, hstack, vstack

    blocks = []
    for part in ngram_features(texts, ngrams):
        shape = (part.texts.stop - part.texts.start, ngrams.buckets)
        # csr_array adds up values with equal indices.
        blocks.append(csr_array((part.values, (part.rows, part.buckets)), shape=shape))
    matrix = vstack(blocks, format="csr")
    if embedder is not None:
        matrix = hstack([matrix, csr_array(embed_texts(embedder, texts).astype(np.float64))], format="csr")
    return matrix


def _fit_logistic(matrix: Any, truths: Targets, strength: float) -> tuple[Numbers, float]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000, tol=1e-4).fit(matrix, truths)
    return model.coef_[0], float(model.intercept_[0])
