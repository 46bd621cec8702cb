"""Learning the classifier from good and bad examples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrain.data.quality.classifier import LinearClassifier, Numbers
from posttrain.data.quality.embeddings import embeddings
from posttrain.data.quality.ngrams import Ngrams, features
from posttrain.store.errors import UserError

_BINS = 15

Truths = npt.NDArray[np.bool_]


def train_quality(
    good: Iterable[str],
    bad: Iterable[str],
    *,
    ngrams: Ngrams | None = None,
    embedder: str | None = None,
    strength: float = 1.0,
    folds: int = 5,
    seed: int = 0,
    told: Mapping[str, Any] | None = None,
) -> LinearClassifier:
    """A logistic regression over hashed n-grams, calibrated and measured on texts that it had not seen.

    Each of ``folds`` parts is scored by a classifier that learned from the others. On these logits Platt's sigmoid is
    fitted, and AUC and expected calibration error are measured; they stand in the classifier's ``report``. The
    classifier itself learns from all texts. The same texts give the same classifier.

    Args:
        good, bad: examples; equal texts in both are left to contradict each other.
        ngrams: which are looked at.
        embedder: sentence embeddings to look at as well, by the name that `posttrain.models.embedder` knows.
        strength: how far the examples outweigh the penalty on large weights: scikit-learn's ``C``.
        folds: parts; at least 2.
        seed: of the order in which texts are dealt to the parts.
        told: what else the report is to hold, such as where the examples are from.

    Raises:
        UserError: there are fewer good or bad examples than parts.
    """
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold
    from threadpoolctl import threadpool_limits

    ngrams = ngrams or Ngrams()
    texts = [*good]
    positives = len(texts)
    texts += bad
    truths = np.arange(len(texts)) < positives
    for name, count in (("good", positives), ("bad", len(texts) - positives)):
        if count < folds:
            what = f"{count} {name} examples are too few for {folds} folds"
            raise UserError(what, where="quality", fix=f"give at least {folds}, better some thousands")
    with threadpool_limits(1):  # sums in another order would be other sums
        matrix = _matrix(texts, ngrams, embedder)
        logits = np.zeros(len(texts))
        parts = StratifiedKFold(folds, shuffle=True, random_state=seed)
        for seen, unseen in parts.split(np.zeros(len(texts)), truths):
            weights, intercept = _fit(matrix[seen], truths[seen], strength)
            logits[unseen] = matrix[unseen] @ weights + intercept
        slope, offset = platt(logits, truths)
        weights, intercept = _fit(matrix, truths, strength)
    probabilities = 1 / (1 + np.exp(-(slope * logits + offset)))
    report = {
        "good": positives,
        "bad": len(texts) - positives,
        "folds": folds,
        "seed": seed,
        "strength": strength,
        "auc": float(roc_auc_score(truths, logits)),
        "ece": calibration_error(probabilities, truths),
        **(told or {}),
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


def platt(logits: Numbers, truths: Truths) -> tuple[float, float]:
    """Slope and offset of the sigmoid that best tells probabilities from logits [N].

    Platt, "Probabilistic outputs for support vector machines" (1999): the most likely sigmoid, for targets that are
    drawn in from 0 and 1 by what the counts leave open: (N+ + 1) / (N+ + 2) and 1 / (N- + 2).
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    positives = int(truths.sum())
    targets = np.where(truths, (positives + 1) / (positives + 2), 1 / (len(truths) - positives + 2))
    scale = max(float(np.abs(logits).max()), 1e-12)  # the search starts from numbers of size one
    scaled = logits / scale

    def loss(values: Numbers) -> tuple[float, Numbers]:
        margin = values[0] * scaled + values[1]
        apart = expit(margin) - targets
        value = float(np.sum(np.logaddexp(0, margin) - targets * margin))
        return value, np.array([apart @ scaled, apart.sum()])

    base = float(np.log((positives + 1) / (len(truths) - positives + 1)))
    found = minimize(loss, np.array([0.0, base]), jac=True, method="BFGS", options={"gtol": 1e-8 * len(truths)})
    return float(found.x[0] / scale), float(found.x[1])


def calibration_error(probabilities: Numbers, truths: Truths) -> float:
    """Expected calibration error over 15 bins of equal width: mean distance of probability and share of good ones.

    Naeini, Cooper and Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning" (2015).
    """
    bins = np.minimum((probabilities * _BINS).astype(np.int64), _BINS - 1)
    apart = np.bincount(bins, probabilities - truths, _BINS)
    return float(np.abs(apart).sum() / len(truths))


def _matrix(texts: Sequence[str], ngrams: Ngrams, embedder: str | None) -> Any:
    """Sparse float64 [N, B + D]: n-grams and embeddings."""
    from scipy.sparse import csr_array, hstack, vstack

    blocks = []
    for part in features(texts, ngrams):
        shape = (part.texts.stop - part.texts.start, ngrams.buckets)
        blocks.append(csr_array((part.values, (part.rows, part.buckets)), shape=shape))  # equal places are added up
    matrix = vstack(blocks, format="csr")
    if embedder is not None:
        matrix = hstack([matrix, csr_array(embeddings(embedder, texts).astype(np.float64))], format="csr")
    return matrix


def _fit(matrix: Any, truths: Truths, strength: float) -> tuple[Numbers, float]:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000, tol=1e-4).fit(matrix, truths)
    return model.coef_[0], float(model.intercept_[0])
