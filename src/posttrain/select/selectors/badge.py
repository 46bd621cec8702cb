"""BADGE, and the k-means++ draws it is made of (D. Arthur and S. Vassilvitskii, SODA 2007).

The draws are exact without a pass over all rows for each: a squared distance only shrinks while rows are drawn, so a
row proposed by its old distance is accepted with the share of it that remains."""

import numpy as np

from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.similarity import OuterProducts, Rows, Similarity, Weights, max_similarity

_PROPOSALS = 64  # drawn and measured at a time, in one matrix product
_MIN_ACCEPTANCE = 1 / 4  # share of accepted proposals below which distances are computed again


def badge(pool: Pool, n: int, seed: int, dimensions: int | None = None) -> Rows:
    """Draws rows by k-means++ on the gradients of the last layer: J. Ash et al., ICLR 2020.

    The gradient of a row's loss, if its most probable label were right, is ``(probabilities - label) ⊗ embedding``.
    The first row is drawn by its gradient's squared length.

    Args:
        dimensions: number of principal components of the embeddings; None for the embeddings as they are.
    """
    probabilities = np.array(pool.column("probabilities"), np.float32)
    probabilities[np.arange(len(pool)), probabilities.argmax(axis=1)] -= 1
    # K times D numbers a row are never formed: their inner products follow from those of the two factors.
    gradients = OuterProducts.from_rows(probabilities, pool.whitened_embeddings(dimensions))
    weights = np.where(pool.labelled, 0.0, 1.0)
    lengths = weights * gradients.halves.astype(np.float64)
    generator = np.random.default_rng(seed)
    return draw_by_squared_distance(gradients, n, generator, weights, first=lengths if lengths.any() else weights)


def draw_by_squared_distance(
    similarity: Similarity, n: int, generator: np.random.Generator, weights: Weights, first: Weights | None = None
) -> Rows:
    """Draws ``n`` distinct rows, each by its weight times its squared distance to the nearest one drawn before.

    Args:
        similarity: minus half the squared distance of N rows.
        n: number of rows, at most as many as there are positive weights.
        generator: makes the draws.
        weights: float64 [N], non-negative.
        first: float64 [N], the odds of the first row, of those with a weight; None for the weights.

    Returns:
        int64 [n] in the order of the draws. Once every other row is equal to a drawn one, by their weights alone.
    """
    rows = [_draw_one(weights if first is None else first, generator)]
    distances = np.full(len(weights), np.inf)
    measured = 0
    while len(rows) < n:
        # One pass over all rows, for the rows drawn since the last one together.
        nearest = max_similarity(similarity, np.arange(len(weights)), np.array(rows[measured:]))
        distances = np.minimum(distances, -2.0 * nearest.astype(np.float64))
        # Exactly 0: rounding leaves a row a little away from itself, and it could be drawn again.
        distances[rows] = 0
        measured = len(rows)
        if not (weights * distances).any():
            break
        rows += _draw_proposals(similarity, n - len(rows), generator, weights, distances)
    remaining = weights.copy()
    remaining[rows] = 0
    while len(rows) < n:
        rows.append(_draw_one(remaining, generator))
        remaining[rows[-1]] = 0
    return np.array(rows[:n], np.int64)


def _draw_proposals(
    similarity: Similarity, most: int, generator: np.random.Generator, weights: Weights, distances: Weights
) -> list[int]:
    """Draws rows by old distances with rejection, until too few proposals are accepted."""
    odds = np.cumsum(weights * distances)
    accepted: list[int] = []
    tried = 0
    # At least one round, whatever the acceptance: the first proposal is always accepted.
    while len(accepted) < most and (len(accepted) >= tried * _MIN_ACCEPTANCE or tried < _PROPOSALS):
        rows = np.minimum(np.searchsorted(odds, generator.random(_PROPOSALS) * odds[-1], side="right"), len(odds) - 1)
        luck = generator.random(_PROPOSALS)
        current = distances[rows]
        if accepted:
            current = np.minimum(current, -2.0 * max_similarity(similarity, rows, np.array(accepted)))
        # Proposals of one round also shrink each other's distances.
        among = -2.0 * similarity.between(rows, rows).astype(np.float64)
        for index, row in enumerate(rows.tolist()):
            # Accepted with the share of its old distance that remains: the draw is exact.
            if luck[index] * distances[row] < current[index] and row not in accepted and len(accepted) < most:
                accepted.append(row)
                current = np.minimum(current, among[index])
        tried += _PROPOSALS
    return accepted


def _draw_one(weights: Weights, generator: np.random.Generator) -> int:
    odds = np.cumsum(weights)
    index = int(np.searchsorted(odds, generator.random() * odds[-1], side="right"))
    # Rounding can put the draw behind the last row with a weight.
    return min(index, int(np.flatnonzero(weights)[-1]))
