"""Digests of what decides a model's outputs: its weights, and the tokens that it reads."""

import hashlib
from collections.abc import Sequence

import numpy as np
from torch import nn

from posttrain.models.packing import Unit
from posttrain.train.checkpoint.tensor_bytes import raw


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the model's weights in their order, without those of an adapter."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        if "lora_" not in name:
            found.update(f"{weight.dtype}{list(weight.shape)}".encode())
            found.update(raw(weight.detach().cpu().contiguous()))
    return found.hexdigest()


def tokens_digest(units: Sequence[Unit]) -> str:
    """SHA-256 of the units' tokens and of which are supervised."""
    found = hashlib.sha256()
    for unit in units:
        for sequence in unit:
            found.update(np.array([len(unit), len(sequence.ids), *sequence.ids], np.int64).tobytes())
            found.update(bytes(sequence.supervised))
    return found.hexdigest()
