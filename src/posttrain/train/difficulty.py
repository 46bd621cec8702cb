"""How hard records are for a model before it is trained."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from posttrain.models.language_model import LanguageModel
from posttrain.models.packing import Unit
from posttrain.train.lessons.reference import reference
from posttrain.train.lessons.units import supervised_tokens


def first_losses(lm: LanguageModel, units: Sequence[Unit], folder: Path, tokens: int, *, padded: bool) -> np.ndarray:
    """float32 [N]: nats a supervised token of each unit, of a pair's chosen sequence.

    They are what a preference objective's reference says as well, and computed once for both.

    Args:
        lm: a language model as the training finds it.
        folder: where they are kept.
        tokens: how many are read at once.
        padded: whether the model must be given padded rows.
    """
    sums = reference(lm, units, folder, tokens, padded=padded)[:, 0].numpy()
    return -sums / np.array([supervised_tokens(unit[0]) for unit in units], np.float32)
