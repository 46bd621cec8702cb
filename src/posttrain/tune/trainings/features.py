"""Features of a training's task, by which searches of settings find earlier ones that are like them."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from posttrain.data.records.record import input_texts, plain_words
from posttrain.models.weight_files import read_headers
from posttrain.store.errors import UserError
from posttrain.tune.transfer.past import EARLY_TRIALS, Task

EARLY_FOLDER = "early"
"""Folder beside those of the trials: the training loss of each at step 10."""

_TEXTS = 200  # records that the centroids are of, evenly spread

_BUCKETS = 256  # of the hashed words

_DIGITS = 6  # of a centroid's coordinates: the last bits differ from run to run


def data_task(records: pa.Table) -> Task:
    """Returns the features that follow from the training data.

    These are the logarithms of the number of records, of the mean length of inputs and of answers in characters, and of
    the number of different answers; the deviation of the input's length by its mean; the entropy of the answers in
    nats; and the centroids of the inputs, by a sentence model if one is installed, and by hashed words.
    """
    texts = input_texts(records)
    answers = [answer for answer in records["completion"].to_pylist() if answer is not None]
    lengths = np.array([len(text or "") for text in texts], np.float64)
    counts = np.array([*Counter(answers).values()], np.float64)
    features = {
        "records": math.log10(max(1, records.num_rows)),
        "input length": math.log10(1 + float(lengths.mean())) if len(lengths) else 0.0,
        "input spread": float(lengths.std() / lengths.mean()) if len(lengths) and lengths.mean() > 0 else 0.0,
    }
    if answers:
        shares = counts / counts.sum()
        features["answer length"] = math.log10(1 + float(np.mean([len(answer) for answer in answers])))
        features["different answers"] = math.log10(len(counts))
        features["answer entropy"] = float(-(shares * np.log(shares)).sum())
    chosen = [texts[at] or "" for at in np.unique(np.linspace(0, len(texts) - 1, min(_TEXTS, len(texts))).astype(int))]
    return Task(features, _centroids(chosen))


def model_features(folder: Path) -> dict[str, float]:
    """Returns the logarithm of the number of the model's parameters; empty where the folder has no safetensors."""
    try:
        headers = read_headers(folder)
    except UserError:  # such as a GGUF file, whose numbers are packed
        return {}
    count = sum(math.prod(header.shape) for header in headers.values())
    return {"model size": math.log10(count)} if count else {}


def early_losses(folder: Path) -> dict[str, float]:
    """Returns the mean training loss of the first trials at step 10; empty where none has come so far.

    Args:
        folder: Folder of the trials' folders.
    """
    files = [folder / EARLY_FOLDER / f"{number:04d}.json" for number in range(EARLY_TRIALS)]
    losses = [float(json.loads(file.read_bytes())) for file in files if file.is_file()]
    return {"loss at step 10": float(np.mean(losses))} if losses else {}


def _centroids(texts: Sequence[str]) -> dict[str, list[float]]:
    """Returns the mean vectors of texts, of length one, by embedder."""
    if not texts:
        return {}
    hashed = np.zeros(_BUCKETS)
    for line in plain_words(texts):
        for word in line.split():
            hashed[xxhash.xxh64_intdigest(word.encode()) % _BUCKETS] += 1 / len(texts)
    return {**_embedded(texts), "words": _unit(hashed)}


def _embedded(texts: Sequence[str]) -> dict[str, list[float]]:
    from posttrain.models.embedder_source import MINILM, find_embedder

    try:
        find_embedder(MINILM)
    except UserError:  # it is not installed
        return {}
    from posttrain.models.embedder import Embedder

    return {MINILM: _unit(Embedder.load(MINILM).embed(texts, tokens=128).mean(0))}


def _unit(vector: np.ndarray) -> list[float]:
    norm = float(np.linalg.norm(vector))
    return [round(float(value), _DIGITS) for value in vector / (norm or 1.0)]
