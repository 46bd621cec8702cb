"""Features of a training's task, by which searches of settings find earlier ones that are like them."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from posttrain.data.records.record import input_texts
from posttrain.models.weight_files import read_headers
from posttrain.store.errors import UserError


def data_features(records: pa.Table) -> dict[str, float]:
    """Returns the features that follow from the training data.

    These are the logarithms of the number of records, of the mean length of inputs and of answers in characters, and of
    the number of different answers; the deviation of the input's length by its mean; and the entropy of the answers
    in nats.
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
    return features


def model_features(folder: Path) -> dict[str, float]:
    """Returns the logarithm of the number of the model's parameters; empty where the folder has no safetensors."""
    try:
        headers = read_headers(folder)
    except UserError:  # such as a GGUF file, whose numbers are packed
        return {}
    count = sum(math.prod(header.shape) for header in headers.values())
    return {"model size": math.log10(count)} if count else {}
