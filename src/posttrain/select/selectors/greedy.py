"""Selectors that take one row after the other: facility location, which covers the pool, and MMR."""

import numpy as np

from posttrain.select.selectors.pool import Pool, min_max_scale, sample_rows
from posttrain.select.selectors.similarity import DIMENSIONS, Floats, Rows, blocks
from posttrain.store.errors import UserError

_FIRST_BLOCK = 32  # bounds that are computed again first, up to _MAX_BLOCK
_MAX_BLOCK = 1024
_FRONT = 4096  # rows whose marginal relevance is kept up to date

# A matrix of both sizes is 512 MiB of float32.
MAX_GROUND = 8192
MAX_CANDIDATES = 16_384


def facility_location(
    pool: Pool,
    n: int,
    seed: int,
    by: str | None = None,
    dimensions: int | None = DIMENSIONS,
) -> Rows:
    """Chooses rows so that each row of the pool is similar to a chosen one: facility location, greedily.

    The sum over the pool of each row's similarity to the nearest chosen row is maximised. Its gains only shrink while
    rows are chosen (it is submodular: M. Minoux, Accelerated greedy algorithms for maximizing submodular set functions,
    1978), and the greedy cover is worth at least 1 - 1/e of the best one (G. Nemhauser, L. Wolsey and M. Fisher,
    Mathematical Programming 14, 1978).

    Similarity is (1 + cosine) / 2. With ``by``, each row of the sum is weighted by the model's uncertainty: it covers
    what the model does not know yet. Of a large pool the sum is over rows drawn at random, and so are the rows to
    choose from. Once no row adds anything, others follow at random.

    Args:
        by: ``entropy``, ``least_confidence`` or ``margin``; None for rows that count alike.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    points = pool.whitened_embeddings(dimensions)
    generator = np.random.default_rng(seed)
    # A sample is enough: the mean over the pool counts, and that of the sample has a standard error of at most
    # 1 / (2 sqrt(ground)).
    rows_to_cover = sample_rows(np.arange(len(pool)), MAX_GROUND, generator)
    to_cover = _unit_rows(points[rows_to_cover]).T
    weights = np.ones(len(rows_to_cover), np.float32)
    if by is not None:
        weights = min_max_scale(pool.uncertainty(by), pool.unlabelled_rows)[rows_to_cover].astype(np.float32)

    def similarity(rows: Rows) -> Floats:
        # In place: a matrix of candidates by ground rows is the largest thing in memory here.
        similarities: Floats = _unit_rows(points[rows]) @ to_cover
        similarities += 1
        similarities *= weights / 2
        return np.maximum(similarities, 0, out=similarities)

    candidates = sample_rows(pool.unlabelled_rows, max(MAX_CANDIDATES, 4 * n), generator)
    # Labelled rows cover from the start: what lies near them is known.
    before = np.zeros(len(rows_to_cover), np.float32)
    for part in blocks(len(pool.labelled_rows)):
        before = np.maximum(before, similarity(pool.labelled_rows[part]).max(axis=0))
    chosen = candidates[greedy_cover(similarity(candidates), n, before)]
    rest = generator.permutation(np.setdiff1d(pool.unlabelled_rows, chosen)) if len(chosen) < n else chosen
    return np.concatenate([chosen, rest[: n - len(chosen)]])


def _unit_rows(points: Floats) -> Floats:
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    unit: Floats = np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 0)
    return unit


def greedy_cover(similarity: Floats, n: int, before: Floats) -> Rows:
    """Takes ``n`` times the row that adds most to the sum over columns of the greatest similarity in a chosen row.

    Args:
        similarity: float32 [M, G], non-negative: how well each candidate covers each row to cover.
        n: number of rows.
        before: float32 [G], how well each is covered from the start.

    Returns:
        int64 rows in the order of the choice; fewer than ``n`` once none adds anything. The lower of two rows that add
        the same is taken first.
    """
    covered = before.copy()
    bounds = np.empty(len(similarity), np.float32)
    for part in blocks(len(bounds), _MAX_BLOCK):
        bounds[part] = _gains(similarity[part], covered)
    exact = np.ones(len(bounds), bool)
    chosen: list[int] = []
    while len(chosen) < min(n, len(bounds)):
        size = _FIRST_BLOCK
        order = _top_rows(bounds, size)
        # A gain bounds itself after further choices: only bounds that may win are computed again. The block doubles, as
        # a stale winner is seldom alone.
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
        np.maximum(covered, similarity[best], out=covered)
        exact[:] = False
    return np.array(chosen, np.int64)


def _gains(similarity: Floats, covered: Floats) -> Floats:
    more = similarity - covered
    gains: Floats = np.maximum(more, 0, out=more).sum(axis=1)
    return gains


def _top_rows(bounds: Floats, count: int) -> Rows:
    """Returns the rows with the greatest bounds, greatest first; of equal ones the lowest first."""
    if count >= len(bounds):
        return np.argsort(-bounds, kind="stable")
    limit = -np.partition(-bounds, count)[count]
    above = np.flatnonzero(bounds > limit)
    together = np.concatenate([above, np.flatnonzero(bounds == limit)[: count - len(above)]])
    return together[np.lexsort((together, -bounds[together]))]


def mmr(
    pool: Pool, n: int, seed: int, relevance: float = 0.5, by: str = "entropy", dimensions: int | None = DIMENSIONS
) -> Rows:
    """Chooses by maximal marginal relevance: ``relevance * u - (1 - relevance) * cosine to the nearest chosen row``.

    J. Carbonell and J. Goldstein, SIGIR 1998. Uncertainty u is scaled to [0, 1]; rows with a label count as chosen.

    Args:
        relevance: weight of uncertainty from 0, only unlike each other, to 1, only uncertain.
        by: ``entropy``, ``least_confidence`` or ``margin``.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    pool.check_numbers(relevance=relevance)
    if relevance > 1:
        raise UserError(f"strategy `mmr`: relevance is {relevance}, and must be from 0 to 1")
    unit, rows = _unit_rows(pool.whitened_embeddings(dimensions)), pool.unlabelled_rows
    worth = (relevance * min_max_scale(pool.uncertainty(by), rows)[rows]).astype(np.float32)
    return rows[marginal_relevance(unit[rows], unit[pool.labelled_rows], worth, np.float32(1 - relevance), n)]


def marginal_relevance(points: Floats, before: Floats, worth: Floats, weight: np.float32, n: int) -> Rows:
    """Takes ``n`` times the row with the greatest ``worth - weight * product with the nearest chosen row``.

    The nearest product only grows while rows are chosen, so that a row's last value bounds its value. The rows with the
    greatest bounds are kept up to date until one of the others may be next; those are then compared with all rows
    chosen since in one matrix product.

    Args:
        points: float32 [N, D].
        before: float32 [M, D], further points that count as chosen; if there are none, the row worth most is first.
        worth: float32 [N].
        weight: non-negative.
        n: number of rows, at most N.

    Returns:
        int64 rows in the order of the choice. The lower of two rows of the same value is taken first.
    """
    worth = worth.copy()
    chosen: list[int] = []
    if not len(before):
        chosen.append(int(worth.argmax()))
        worth[chosen], before = -np.inf, points[chosen]
    nearest: Floats = np.concatenate([(points[part] @ before.T).max(axis=1) for part in blocks(len(points))])
    compared = np.full(len(points), len(chosen))  # chosen rows that each row's nearest one is looked for among
    while len(chosen) < n:
        order = _top_rows(worth - weight * nearest, _FRONT + 1)
        front, others = np.sort(order[:_FRONT]), order[_FRONT:]
        bounds = worth[others] - weight * nearest[others]
        _compare_rows(points, front, chosen, nearest, compared)
        close, near = points[front], nearest[front]
        while len(chosen) < n:
            values = worth[front] - weight * near
            best = int(values.argmax())
            # The first of the others has the greatest bound of them, and the lowest number with that bound.
            if any((bound, -row) > (values[best], -front[best]) for bound, row in zip(bounds, others, strict=True)):
                break
            chosen.append(int(front[best]))
            worth[chosen[-1]] = -np.inf
            np.maximum(near, close @ close[best], out=near)
        nearest[front], compared[front] = near, len(chosen)
    return np.array(chosen, np.int64)


def _compare_rows(points: Floats, rows: Rows, chosen: list[int], nearest: Floats, compared: Rows) -> None:
    """Raises the nearest product of some rows to that with the rows chosen since they were last compared."""
    rows = rows[np.argsort(compared[rows], kind="stable")]  # by age: a block is compared with as many as its oldest row
    for part in blocks(len(rows), _MAX_BLOCK):
        since = points[chosen[compared[rows[part.start]] :]]
        products = points[rows[part]] @ since.T
        nearest[rows[part]] = np.maximum(nearest[rows[part]], products.max(axis=1, initial=-np.inf))
