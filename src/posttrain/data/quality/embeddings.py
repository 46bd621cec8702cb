"""Sentence embeddings for the classifier, their model loaded once a process."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


def embeddings(name: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """float32 [N, D] of the model that `posttrain.models.embedder` knows by ``name``."""
    return np.asarray(_embedder(name).embed(list(texts)), np.float32)


@cache
def _embedder(name: str) -> Any:
    from posttrain.models.embedder import Embedder

    return Embedder.load(name)
