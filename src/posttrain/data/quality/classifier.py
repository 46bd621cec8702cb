"""The classifier: what it has learned, how it scores, and its files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from posttrain.data.quality.ngrams import Ngrams, features
from posttrain.store.errors import UserError
from posttrain.store.files import make_folder, write_atomically, writing

SETTINGS = "classifier.json"
WEIGHTS = "classifier.safetensors"
_VERSION = 1

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LinearClassifier:
    """The probability that a text is one of the good ones: a logistic regression, calibrated.

    Attributes:
        ngrams: which are looked at.
        weights: float32 [B], one a bucket.
        intercept: of the logit.
        slope, offset: of Platt's calibration: P(good) = 1 / (1 + exp(-(slope * logit + offset))).
        embedder: name of the sentence embeddings that are looked at as well.
        embedding_weights: float32 [D], one a dimension of them.
        report: what its training found: counts, AUC, ECE and the like.
    """

    ngrams: Ngrams
    weights: npt.NDArray[np.float32]
    intercept: float
    slope: float = 1.0
    offset: float = 0.0
    embedder: str | None = None
    embedding_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    report: Mapping[str, Any] = field(default_factory=dict)

    def logits(self, texts: Sequence[str]) -> Numbers:
        """Uncalibrated logits, float64 [N]; that of a text does not hang on the others."""
        found = np.full(len(texts), self.intercept)
        weights = self.weights.astype(np.float64)
        for part in features(texts, self.ngrams):
            size = part.texts.stop - part.texts.start
            found[part.texts] += np.bincount(part.rows, weights[part.buckets] * part.values, size)
        if self.embedder is not None and len(texts):
            from posttrain.data.quality.embeddings import embeddings

            # A product of matrices would round a row in a way that hangs on how many there are.
            products = embeddings(self.embedder, texts).astype(np.float64) * self.embedding_weights
            found += products.sum(axis=1)
        return found

    def probabilities(self, texts: Sequence[str]) -> Numbers:
        """P(good), calibrated, float64 [N]."""
        from scipy.special import expit

        return np.asarray(expit(self.slope * self.logits(texts) + self.offset))

    def save(self, folder: Path) -> None:
        """Write the weights as safetensors and everything else as JSON.

        Raises:
            UserError: the disk refused.
        """
        make_folder(folder)
        with writing(folder):
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
    """Whether a folder is one of ours, by the look of it."""
    return (folder / SETTINGS).is_file()


def load_classifier(folder: Path) -> LinearClassifier:
    """What :meth:`LinearClassifier.save` wrote.

    Raises:
        UserError: the folder holds no such classifier, or a part of one.
    """
    where = str(folder)
    if not is_classifier(folder):
        raise UserError(f"holds no {SETTINGS}", where=where, fix="train one with posttrain.data.quality.training")
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        if settings["version"] != _VERSION:
            raise UserError(f"a classifier of version {settings['version']} is not known here", where=where)
        tensors = load_file(folder / WEIGHTS)
        loaded = LinearClassifier(
            Ngrams.read(settings["ngrams"], where),
            tensors["weights"],
            float(settings["intercept"]),
            float(settings["slope"]),
            float(settings["offset"]),
            settings["embedder"],
            tensors["embedding_weights"],
            settings["report"],
        )
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"is no whole classifier: {error}", where=where, fix="train it again") from None
    if loaded.weights.shape != (loaded.ngrams.buckets,) or loaded.weights.dtype != np.float32:
        raise UserError(f"its weights do not fit its {SETTINGS}", where=where, fix="train it again")
    return loaded
