"""Selectors that cover the pool: facility location and ProbCover, by lazy greedy maximisation.

What a row adds to a cover only shrinks while rows are chosen (the cover is submodular), so that its gain from before
bounds it: M. Minoux, Accelerated greedy algorithms for maximizing submodular set functions, 1978. The greedy cover is
worth at least 1 - 1/e of the best one: G. Nemhauser, L. Wolsey and M. Fisher, Mathematical Programming 14, 1978."""

from collections.abc import Callable

import numpy as np

from posttrain.select.selectors.k_means import k_means
from posttrain.select.selectors.pool import Pool, min_max_scale, sample_rows
from posttrain.select.selectors.similarity import DIMENSIONS, Euclidean, Floats, Rows, blocks
from posttrain.store.errors import UserError

_FIRST_BLOCK = 32  # bounds that are brought up to date first, up to _MAX_BLOCK
_MAX_BLOCK = 1024

# A matrix of both sizes is 512 MiB of float32.
MAX_GROUND = 8192
MAX_CANDIDATES = 16_384

_PURITY = 0.95  # of balls by ProbCover, section 4.2
_RADIUS_SAMPLE = 2000


def greedy_cover(similarity: Floats, n: int, before: Floats) -> tuple[Rows, Floats]:
    """Takes ``n`` times the row that adds most to the sum over columns of the greatest similarity in a chosen row.

    Args:
        similarity: float32 [M, G], non-negative: how well each candidate covers each row to cover.
        n: number of rows.
        before: float32 [G], how well each is covered from the start.

    Returns:
        int64 rows in the order of the choice, and what each added; fewer than ``n`` once none adds anything. The lower
        of two rows that add the same is taken first.
    """
    covered = before.copy()
    bounds = np.empty(len(similarity), np.float32)
    for part in blocks(len(bounds), _MAX_BLOCK):
        bounds[part] = _gains(similarity[part], covered)
    exact = np.ones(len(bounds), bool)
    chosen: list[int] = []
    gains: list[float] = []
    while len(chosen) < min(n, len(bounds)):
        size = _FIRST_BLOCK
        order = _top_rows(bounds, size)
        # Only bounds that may win are brought up to date; the block doubles, as a stale winner is seldom alone.
        while not exact[order[0]]:
            stale = order[~exact[order]]
            bounds[stale], exact[stale] = _gains(similarity[stale], covered), True
            size = min(2 * size, _MAX_BLOCK)
            order = _top_rows(bounds, size)
        best = int(order[0])
        # The cover is complete, and any further row would be taken by its number alone.
        if bounds[best] <= 0:
            break
        chosen.append(best)
        gains.append(float(bounds[best]))
        np.maximum(covered, similarity[best], out=covered)
        exact[:] = False
    return np.array(chosen, np.int64), np.array(gains, np.float32)


def _gains(similarity: Floats, covered: Floats) -> Floats:
    more = similarity - covered
    gains: Floats = np.maximum(more, 0, out=more).sum(axis=1)
    return gains


def _top_rows(bounds: Floats, count: int) -> Rows:
    """Returns the rows with the greatest bounds, greatest first; of equal ones the lowest first."""
    if count >= len(bounds):
        return np.argsort(-bounds, kind="stable")
    least = -np.partition(-bounds, count)[count]
    above = np.flatnonzero(bounds > least)
    together = np.concatenate([above, np.flatnonzero(bounds == least)[: count - len(above)]])
    return together[np.lexsort((together, -bounds[together]))]


def facility_location(
    pool: Pool,
    n: int,
    seed: int,
    by: str | None = None,
    power: float = 1.0,
    ground: int = MAX_GROUND,
    candidates: int = MAX_CANDIDATES,
    dimensions: int | None = DIMENSIONS,
) -> Rows:
    """Chooses rows so that each row of the pool is similar to a chosen one: facility location, greedily.

    The sum over the pool of each row's similarity to the nearest chosen row is maximised.

    Similarity is (1 + cosine) / 2. With ``by``, each row of the sum is weighted by the model's uncertainty: it covers
    what the model does not know yet. Of a large pool the sum is over rows drawn at random. Once no row adds anything,
    others follow at random.

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``; None for rows that count alike.
        power: exponent of the uncertainty, scaled to [0, 1].
        ground: most rows of the sum.
        candidates: most rows to choose from, or four times ``n`` if that is more; drawn at random.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    pool.check_numbers(power=power)
    pool.check_counts(ground=ground, candidates=candidates)
    points = pool.whitened_embeddings(dimensions)
    generator = np.random.default_rng(seed)
    # A sample is enough: the mean over the pool counts, and that of the sample has a standard error of at most
    # 1 / (2 sqrt(ground)).
    rows_to_cover = sample_rows(np.arange(len(pool)), ground, generator)
    to_cover = _unit_rows(points[rows_to_cover]).T
    counts = np.ones(len(rows_to_cover), np.float32)
    if by is not None:
        counts = (min_max_scale(pool.uncertainty(by), pool.unlabelled_rows)[rows_to_cover] ** power).astype(np.float32)

    def similarity(rows: Rows) -> Floats:
        # In place: a matrix of candidates by ground rows is the largest thing in memory here.
        similarities: Floats = _unit_rows(points[rows]) @ to_cover
        similarities += 1
        similarities *= counts / 2
        return np.maximum(similarities, 0, out=similarities)

    return cover_pool(similarity, pool, n, candidates, generator)


def cover_pool(
    similarity: Callable[[Rows], Floats], pool: Pool, n: int, candidates: int, generator: np.random.Generator
) -> Rows:
    """Covers the pool by some of the unlabelled rows, beyond what labelled rows cover; then draws others uniformly."""
    sampled = sample_rows(pool.unlabelled_rows, max(candidates, 4 * n), generator)
    similarities = similarity(sampled)
    # Labelled rows cover from the start: what lies near them is known.
    before = np.zeros(similarities.shape[1], np.float32)
    for part in blocks(len(pool.labelled_rows)):
        before = np.maximum(before, similarity(pool.labelled_rows[part]).max(axis=0))
    chosen = sampled[greedy_cover(similarities, n, before)[0]]
    rest = generator.permutation(np.setdiff1d(pool.unlabelled_rows, chosen)) if len(chosen) < n else chosen
    return np.concatenate([chosen, rest[: n - len(chosen)]])


def _unit_rows(points: Floats) -> Floats:
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    unit: Floats = np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 0)
    return unit


def prob_cover(
    pool: Pool,
    n: int,
    seed: int,
    radius: float | None = None,
    classes: int | None = None,
    ground: int = MAX_GROUND,
    candidates: int = MAX_CANDIDATES,
    dimensions: int | None = DIMENSIONS,
) -> Rows:
    """Chooses, one after the other, the row with most uncovered rows within ``radius``: O. Yehuda et al., NeurIPS 2022.

    Rows near one with a label are covered from the start. Once all are, the others follow at random.

    Args:
        radius: Euclidean distance; None for the greatest at which 95% of rows have none but rows of their own cluster
            within it (section 4.2 there), on at most 2,000 rows.
        classes: clusters that the radius is estimated from; None for the columns of the probabilities, or ``n``.
        ground: most rows to cover; of a larger pool they are drawn at random.
        candidates: most rows to choose from, or four times ``n`` if that is more; drawn at random.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    pool.check_numbers(radius=radius)
    pool.check_counts(classes=classes, ground=ground, candidates=candidates)
    if radius == 0:
        raise UserError("strategy `prob_cover`: radius is 0, and must be positive")
    points = pool.whitened_embeddings(dimensions)
    euclidean = Euclidean.from_rows(points)
    generator = np.random.default_rng(seed)
    if radius is None:
        classes = classes or (np.shape(pool.scores["probabilities"])[1] if "probabilities" in pool.scores else n)
        radius = pure_radius(points, classes, seed, generator)

    to_cover = sample_rows(np.arange(len(pool)), ground, generator)

    def similarity(rows: Rows) -> Floats:
        return (euclidean.between(rows, to_cover) >= -(radius**2) / 2).astype(np.float32)

    return cover_pool(similarity, pool, n, candidates, generator)


def pure_radius(points: Floats, classes: int, seed: int, generator: np.random.Generator) -> float:
    """Returns the greatest radius at which 95% of rows have none but rows of their own cluster within it.

    Args:
        points: float32 [N, D].
        classes: number of clusters.
        seed: seed of the clusters.
        generator: draws the sampled rows.
    """
    rows = sample_rows(np.arange(len(points)), _RADIUS_SAMPLE, generator)
    sample = points[rows]
    clusters = k_means(sample, np.arange(len(sample)), min(classes, len(sample)), seed).cluster
    distances = np.sqrt(-2 * Euclidean.from_rows(sample).between(slice(None), slice(None)))
    strangers = np.where(clusters[:, None] != clusters, distances, np.inf).min(axis=1)
    if not np.isfinite(strangers).any():  # one cluster: everything is of it
        return float(distances.max()) or 1.0
    radius = np.quantile(strangers, 1 - _PURITY)
    # Above 0, where equal rows are in different clusters: a row must at least cover itself.
    return float(radius) or float(np.finfo(np.float32).eps)
