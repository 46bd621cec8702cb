"""A linear text classifier over hashed n-grams: trains, calibrates, scores, saves and loads it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from posttrain.models.calibration import expected_calibration_error
from posttrain.store.errors import UserError
from posttrain.store.files import disk_errors, make_folder, write_atomically

SETTINGS = "classifier.json"

WEIGHTS = "classifier.safetensors"

_VERSION = 2

_COLUMNS = 1 << 18  # of hashed words and pairs of words, and as many of runs of four characters

_LONGEST = 20_000  # characters of a text that are read, from its beginning

_FOLDS = 5

Numbers = npt.NDArray[np.float64]

Targets = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class LinearClassifier:
    """A calibrated logistic regression for the probability that a text is good.

    Attributes:
        weights: float32 [F], one for each feature of `ngram_features`.
        intercept: of the logit.
        slope, offset: of Platt's calibration: P(good) = 1 / (1 + exp(-(slope * logit + offset))).
        report: measurements of its training: counts, AUC, ECE.
    """

    weights: npt.NDArray[np.float32]
    intercept: float
    slope: float = 1.0
    offset: float = 0.0
    report: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, texts: Sequence[str]) -> Numbers:
        """Returns uncalibrated logits, float64 [N]; that of a text does not depend on the others."""
        if not len(texts):
            return np.zeros(0)
        return np.asarray(ngram_features(texts) @ self.weights.astype(np.float64) + self.intercept)

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
            save_file({"weights": self.weights}, folder / WEIGHTS)
        numbers = {"intercept": self.intercept, "slope": self.slope, "offset": self.offset}
        settings = {"version": _VERSION, **numbers, "report": dict(self.report)}
        write_atomically(folder / SETTINGS, json.dumps(settings, indent=2).encode())


def ngram_features(texts: Sequence[str]) -> Any:
    """Returns hashed words, pairs of words and runs of four characters, sparse float64 [N, F].

    Both halves of a row have length 1, so that long texts do not stand out. Case and amounts of whitespace are ignored.
    """
    return _vectorizer().transform([text[:_LONGEST] for text in texts])


@cache
def _vectorizer() -> Any:
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.pipeline import make_union

    return make_union(
        HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\w+", n_features=_COLUMNS, alternate_sign=False),
        HashingVectorizer(analyzer="char", ngram_range=(4, 4), n_features=_COLUMNS, alternate_sign=False),
    )


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
        weights = load_file(folder / WEIGHTS)["weights"]
        intercept, slope, offset = (float(settings[name]) for name in ("intercept", "slope", "offset"))
        loaded = LinearClassifier(weights, intercept, slope, offset, settings["report"])
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"is not a whole classifier: {error}", where=where, fix="train it again") from None
    if weights.shape != (2 * _COLUMNS,) or weights.dtype != np.float32:
        raise UserError(f"its weights do not fit its {SETTINGS}", where=where, fix="train it again")
    return loaded


def train_quality(good: Iterable[str], bad: Iterable[str], extra: Mapping[str, Any] | None = None) -> LinearClassifier:
    """Trains a logistic regression over hashed n-grams, calibrated and measured out of fold.

    A classifier trained on the other folds scores each of five parts. Platt's sigmoid is fitted to these logits, and
    the ``report`` holds their AUC and expected calibration error. The classifier itself learns from all texts. The same
    texts give the same classifier.

    Args:
        good, bad: examples; a text may be in both.
        extra: further entries of the report, such as the source of the examples.

    Raises:
        UserError: there are fewer good or bad examples than parts.
    """
    from scipy.special import expit
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from threadpoolctl import threadpool_limits

    texts = [*good]
    positives = len(texts)
    texts += bad
    truths = np.arange(len(texts)) < positives
    for name, count in (("good", positives), ("bad", len(texts) - positives)):
        if count < _FOLDS:
            what = f"{count} {name} examples are too few for {_FOLDS} folds"
            raise UserError(what, where="quality", fix=f"give at least {_FOLDS}, better some thousands")
    with threadpool_limits(1):  # more threads would add up in another order, and round differently
        features, model = ngram_features(texts), LogisticRegression(max_iter=1000)
        folds = StratifiedKFold(_FOLDS, shuffle=True, random_state=0)
        # Out of fold: on texts that it has learned from, the classifier is surer than on any others.
        logits = cross_val_predict(model, features, truths, cv=folds, method="decision_function")
        slope, offset = fit_platt(logits, truths)
        model.fit(features, truths)
    report = {
        "good": positives,
        "bad": len(texts) - positives,
        "folds": _FOLDS,
        "auc": float(roc_auc_score(truths, logits)),
        "ece": expected_calibration_error(expit(slope * logits + offset), truths),
        **(extra or {}),
    }
    return LinearClassifier(model.coef_[0].astype(np.float32), float(model.intercept_[0]), slope, offset, report)


def fit_platt(logits: Numbers, truths: Targets) -> tuple[float, float]:
    """Fits slope and offset of the sigmoid that maps logits [N] to probabilities.

    Platt, "Probabilistic outputs for support vector machines" (1999): the most likely sigmoid, for targets that are
    drawn in from 0 and 1 by what the counts leave open: (N+ + 1) / (N+ + 2) and 1 / (N- + 2).
    """
    from sklearn.linear_model import LogisticRegression

    positives = int(truths.sum())
    targets = np.where(truths, (positives + 1) / (positives + 2), 1 / (len(truths) - positives + 2))
    # The solver starts with steps of size one, whatever the scale of the logits.
    scale = max(float(np.abs(logits).max()), 1e-12)
    rows = np.tile(logits[:, None] / scale, (2, 1))
    # A target between 0 and 1 is a row of each class, weighed by its share.
    model = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000)
    model.fit(rows, np.repeat([True, False], len(logits)), np.concatenate([targets, 1 - targets]))
    return float(model.coef_[0, 0] / scale), float(model.intercept_[0])
