"""Rows that stand for all others: facility location."""

from collections.abc import Callable

import numpy as np

from posttrain.select.selectors.closeness import Floats, Rows, blocks
from posttrain.select.selectors.coverage import cover
from posttrain.select.selectors.pool import Pool, normalised
from posttrain.select.selectors.whitening import DIMENSIONS

GROUND = 8192
CANDIDATES = 16_384


def facility_location(
    pool: Pool,
    n: int,
    seed: int,
    by: str | None = None,
    power: float = 1.0,
    ground: int = GROUND,
    candidates: int = CANDIDATES,
    dimensions: int | None = DIMENSIONS,
) -> Rows:
    """Rows for which the sum over the pool of each row's similarity to the nearest chosen one is greatest, greedily.

    Similarity is (1 + cosine) / 2. With ``by``, each row of the sum counts by the model's doubt of it: what is covered
    is what the model does not know yet. Of a large pool the sum is over rows drawn at random: it is the mean that
    counts, of which the sample's standard error is at most 1 / (2 sqrt(ground)). Once no row adds anything, others
    follow at random.

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``; None for rows that count alike.
        power: of the doubt, put between 0 and 1.
        ground: rows of the sum at most.
        candidates: rows that are looked at, at most, or four times ``n`` if that is more; drawn at random.
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    points = pool.points("facility_location", dimensions)
    generator = np.random.default_rng(seed)
    rows_to_cover = sample(np.arange(len(pool)), ground, generator)
    to_cover = _directions(points[rows_to_cover]).T
    counts = np.ones(len(rows_to_cover), np.float32)
    if by is not None:
        counts = (normalised(pool.doubt(by), pool.free)[rows_to_cover] ** power).astype(np.float32)

    def similarity(rows: Rows) -> Floats:
        found: Floats = _directions(points[rows]) @ to_cover
        found += 1
        found *= counts / 2
        return np.maximum(found, 0, out=found)

    return covering(similarity, pool, n, candidates, generator)


def covering(
    similarity: Callable[[Rows], Floats], pool: Pool, n: int, candidates: int, generator: np.random.Generator
) -> Rows:
    """`cover` by some of the free rows, given what rows with a label cover already; then others, drawn uniformly."""
    looked_at = sample(pool.free, max(candidates, 4 * n), generator)
    found = similarity(looked_at)
    before = np.zeros(found.shape[1], np.float32)
    for part in blocks(len(pool.chosen)):
        before = np.maximum(before, similarity(pool.chosen[part]).max(axis=0))
    chosen = looked_at[cover(found, n, before)[0]]
    rest = generator.permutation(np.setdiff1d(pool.free, chosen)) if len(chosen) < n else chosen
    return np.concatenate([chosen, rest[: n - len(chosen)]])


def sample(rows: Rows, most: int, generator: np.random.Generator) -> Rows:
    """At most so many of them, drawn uniformly, in order."""
    return rows if len(rows) <= most else np.sort(generator.choice(rows, most, replace=False))


def _directions(points: Floats) -> Floats:
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    found: Floats = np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 0)
    return found
