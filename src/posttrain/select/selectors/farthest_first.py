"""Selectors that take the row farthest from the chosen ones: k-center, MMR and a weighted composite.

They share an exact, lazy farthest-first traversal.

A row's similarity to the nearest chosen row only grows while rows are chosen, so that its last value bounds its worth.
The rows that may be next are kept up to date; every other row is updated only when its bound says that it may be next,
against all rows chosen since at once: one matrix product, where row by row would wait for memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from posttrain.select.selectors.pool import Pool, min_max_scale
from posttrain.select.selectors.similarity import (
    DIMENSIONS,
    Cosine,
    Euclidean,
    Floats,
    Rows,
    Similarity,
    blocks,
    max_similarity,
)
from posttrain.store.errors import UserError, suggest

Groups = npt.NDArray[np.int64]

_FIRST_SIZE = 1024  # rows of the frontier
_GROW_BELOW = 8  # choices: a frontier that lasts for fewer doubles,
_SHRINK_ABOVE = 64  # and one that lasts for more is halved


def k_center(pool: Pool, n: int, seed: int, dimensions: int | None = DIMENSIONS) -> Rows:
    """Takes always the row farthest from all that have a label or are chosen.

    T. Gonzalez, 1985; core-set, O. Sener and S. Savarese, ICLR 2018. The greatest distance to a chosen row is
    then at most twice the least possible. Where nothing has a label yet, the row nearest to the mean is the first.

    Args:
        dimensions: number of principal components; None for the embeddings as they are.
    """
    points = pool.whitened_embeddings(dimensions)
    similarity = Euclidean.from_rows(points)
    worth = np.where(pool.labelled, -np.inf, 0).astype(np.float32)
    before = pool.labelled_rows
    first = np.empty(0, np.int64)
    if not len(before):
        first = before = np.array([_most_central(points, similarity)])
        worth[first] = -np.inf
    return np.concatenate([first, farthest_first(similarity, n - len(first), worth, 1.0, before)])


def _most_central(points: Floats, similarity: Euclidean) -> int:
    # In float64: a sum over a million float32 rows loses digits.
    mean = points.mean(axis=0, dtype=np.float64).astype(np.float32)
    return int(np.argmax(points @ mean - similarity.halves))


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
    uncertainty = min_max_scale(pool.uncertainty(by), pool.unlabelled_rows)
    return _farthest_by_cosine(pool, n, relevance * uncertainty, 1 - relevance, pool.whitened_embeddings(dimensions))


def composite(
    pool: Pool,
    n: int,
    seed: int,
    uncertainty: float = 1.0,
    diversity: float = 1.0,
    difficulty: float = 0.0,
    by: str = "entropy",
    hard: str = "difficulty",
    quotas: Mapping[str, float] | None = None,
    dimensions: int | None = DIMENSIONS,
) -> Rows:
    """Takes always the row with the greatest ``uncertainty * u + diversity * distance + difficulty * hardness``.

    Each term is between 0 and 1: uncertainty u and hardness by the least and greatest in the pool, distance as
    (1 - cosine) / 2 to the most similar row with a label or chosen.

    Args:
        uncertainty: weight of u.
        diversity: weight of distance.
        difficulty: weight of the column ``hard``, which is not read for 0.
        by: ``entropy``, ``least_confidence`` or ``margin``.
        hard: the column that says how hard a row is.
        quotas: greatest share of a batch, by name in the column ``source``. If they leave too few rows, fewer than
            ``n`` are chosen.
        dimensions: number of principal components; None for the embeddings as they are.
    """
    pool.check_numbers(uncertainty=uncertainty, diversity=diversity, difficulty=difficulty)
    worth = np.zeros(len(pool))
    # A term of weight 0 is not computed: its column may be missing.
    if uncertainty:
        worth += uncertainty * min_max_scale(pool.uncertainty(by), pool.unlabelled_rows)
    if difficulty:
        worth += difficulty * min_max_scale(pool.column(hard), pool.unlabelled_rows)
    points = pool.whitened_embeddings(dimensions) if diversity else np.zeros((len(pool), 1), np.float32)
    # (1 - cosine) / 2 times the weight, without its constant.
    return _farthest_by_cosine(pool, n, worth, diversity / 2, points, quotas)


def _farthest_by_cosine(
    pool: Pool,
    n: int,
    worth: np.ndarray,
    weight: float,
    points: np.ndarray,
    quotas: Mapping[str, float] | None = None,
) -> Rows:
    worth = np.where(pool.labelled, -np.inf, worth)
    groups, most = _source_quotas(pool, n, quotas) if quotas else (None, None)
    return farthest_first(Cosine.from_rows(points), n, worth, weight, pool.labelled_rows, groups, most)


def _source_quotas(pool: Pool, n: int, quotas: Mapping[str, float]) -> tuple[Rows, Rows]:
    """Returns the group of each row, and how many rows each group may give."""
    names, groups = np.unique(np.asarray(pool.column("source")).astype(str), return_inverse=True)
    for name, share in quotas.items():
        if name not in names:
            raise UserError(f"no record is of source `{name}`", where="quotas", fix=suggest(name, names.tolist()))
        if not 0 <= share <= 1:
            raise UserError(f"the share of `{name}` is {share}, and must be from 0 to 1", where="quotas")
    whole, before = n + len(pool.batch), np.bincount(groups[pool.batch], minlength=len(names))
    shares = np.array([quotas.get(name, 1.0) for name in names.tolist()])
    # Of the whole batch, rounded down: a share of 0.1 of 5 records is none.
    return groups, np.maximum(np.floor(shares * whole + 1e-9).astype(np.int64) - before, 0)


def farthest_first(
    similarity: Similarity,
    n: int,
    worth: npt.NDArray[np.floating],
    weight: float,
    before: Rows,
    groups: Groups | None = None,
    quotas: Groups | None = None,
) -> Rows:
    """Takes ``n`` times the row with the greatest ``worth - weight * similarity to the nearest chosen row``.

    Args:
        similarity: similarity of N rows.
        n: number of rows.
        worth: float [N]; minus infinity for a row that may not be taken.
        weight: non-negative.
        before: int64 rows that count as chosen. While there are none, the row worth most is taken.
        groups: int64 [N], the group of each row.
        quotas: int64 [groups], how many rows of each may be taken.

    Returns:
        int64 distinct rows in the order of the choice; fewer than ``n`` if no more may be taken. The lower of two rows
        that are worth the same is taken first.
    """
    worth = np.array(worth, np.float32)
    groups = np.zeros(len(worth), np.int64) if groups is None else groups
    remaining = np.array([n]) if quotas is None else quotas.copy()
    worth[remaining[groups] <= 0] = -np.inf
    queue = _LazyQueue(similarity, worth, weight, before) if len(before) else None
    chosen: list[int] = []
    while len(chosen) < n:
        row = queue.take() if queue else int(np.argmax(worth))
        if row is None or np.isneginf(worth[row]):
            break
        chosen.append(row)
        worth[row] = -np.inf
        remaining[groups[row]] -= 1
        if remaining[groups[row]] == 0:
            worth[groups == groups[row]] = -np.inf
        # Nothing has a label yet: only now is there a row that the others can be far from.
        if queue is None:
            queue = _LazyQueue(similarity, worth, weight, np.array(chosen))
    return np.array(chosen, np.int64)


@dataclass(frozen=True)
class Frontier:
    """Rows whose values are kept up to date, and the greatest bound of all others.

    Attributes:
        rows: int64, in order.
        bound: the greatest bound of any other row; minus infinity if there is none that may be taken.
        first: the lowest of the other rows with that bound.
    """

    rows: Rows
    bound: float
    first: int

    def wins(self, value: float, row: int) -> bool:
        """Returns whether a row of this value comes before all others; of equal ones the lower row does."""
        return bool(value > self.bound or (value == self.bound and row < self.first))

    @property
    def alone(self) -> bool:
        """Whether no other row may be taken."""
        return bool(np.isneginf(self.bound))


class _LazyQueue:
    """Rows by their worth, which may become minus infinity meanwhile, and their similarity to the chosen ones."""

    # `worth` is the caller's array: a row that it sets to minus infinity meanwhile is never taken.
    def __init__(self, similarity: Similarity, worth: Floats, weight: float, chosen: Rows) -> None:
        self._similarity, self._worth, self._weight = similarity, worth, np.float32(weight)
        self._chosen = list(chosen)
        self._nearest = max_similarity(similarity, np.arange(len(similarity)), chosen)
        self._seen = np.full(len(similarity), len(chosen))
        self._size = FrontierSize()
        self._look_at(frontier(self._values(slice(None)), self._size.next(len(chosen))))

    def take(self) -> int | None:
        """Returns the row to take next, which counts as chosen from now on; None if no row may be taken."""
        while True:
            values = self._worth[self._front.rows] - self._weight * self._front_nearest
            index = int(np.argmax(values)) if len(values) else -1
            if len(values) and self._front.wins(values[index], int(self._front.rows[index])):
                break
            if self._front.alone:
                return None
            self._draw()
        row = int(self._front.rows[index])
        self._chosen.append(row)
        new = self._close_up.between(slice(None), slice(index, index + 1))[:, 0]
        np.maximum(self._front_nearest, new, out=self._front_nearest)
        return row

    def _values(self, rows: Rows | slice) -> Floats:
        values: Floats = self._worth[rows] - self._weight * self._nearest[rows]
        return values

    def _draw(self) -> None:
        """Brings the rows with the greatest bounds up to date and makes them the frontier."""
        self._nearest[self._front.rows], self._seen[self._front.rows] = self._front_nearest, len(self._chosen)
        front = frontier(self._values(slice(None)), self._size.next(len(self._chosen)))
        self._catch_up(front.rows[self._seen[front.rows] < len(self._chosen)])
        self._look_at(front)

    def _catch_up(self, rows: Rows) -> None:
        # By age: rows of one block then miss about the same chosen rows, and no block compares more than it must.
        rows = rows[np.argsort(self._seen[rows], kind="stable")]
        for part in blocks(len(rows)):
            others = np.array(self._chosen[self._seen[rows[part.start]] :])
            nearest = self._similarity.between(rows[part], others).max(axis=1)
            self._nearest[rows[part]] = np.maximum(self._nearest[rows[part]], nearest)
        self._seen[rows] = len(self._chosen)

    def _look_at(self, front: Frontier) -> None:
        front = replace(front, rows=front.rows[self._values(front.rows) >= front.bound])  # others cannot be next
        self._front, self._front_nearest = front, self._nearest[front.rows]
        # Copied side by side: a choice then reads 1,024 rows in order instead of jumping through a million.
        self._close_up = self._similarity.subset(front.rows)


def frontier(bounds: Floats, size: int) -> Frontier:
    """Returns the ``size`` rows with the greatest of float32 [N] bounds; of equal ones the lower rows."""
    if size >= len(bounds):
        return Frontier(np.arange(len(bounds)), -np.inf, len(bounds))
    least = -np.partition(-bounds, size)[size]
    above, level = np.flatnonzero(bounds > least), np.flatnonzero(bounds == least)
    tied = size - len(above)
    return Frontier(np.sort(np.concatenate([above, level[:tied]])), float(least), int(level[tied]))


class FrontierSize:
    """Adapts the number of rows in the frontier: more when it lasts for few choices, fewer when for many."""

    def __init__(self) -> None:
        self._size, self._chosen = _FIRST_SIZE, -_GROW_BELOW

    def next(self, chosen: int) -> int:
        """Returns the size from now on, when ``chosen`` rows are chosen."""
        lasted = chosen - self._chosen
        self._chosen = chosen
        if lasted < _GROW_BELOW:
            self._size *= 2
        elif lasted > _SHRINK_ABOVE and self._size > _FIRST_SIZE:
            self._size //= 2
        return self._size
