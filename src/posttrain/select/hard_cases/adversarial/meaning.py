"""Whether two texts mean the same, by a sentence embedding."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from posttrain.models.embedder import Embedder
from posttrain.select.hard_cases.adversarial.problem import Similarity


def cosine_similarity(embedder: Embedder) -> Similarity:
    """The cosine of texts' embeddings by this model."""

    @lru_cache(maxsize=16)
    def embedded(text: str) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = embedder.embed([text])[0]
        return found

    def similarity(text: str, others: Sequence[str]) -> npt.NDArray[np.float64]:
        # Embeddings have length one.
        return embedder.embed(others).astype(np.float64) @ embedded(text).astype(np.float64)

    return similarity
