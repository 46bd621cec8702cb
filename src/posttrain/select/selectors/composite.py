"""Selectors that trade uncertainty against diversity, greedily: MMR and a weighted composite."""

from collections.abc import Mapping

import numpy as np

from posttrain.select.selectors.farthest_first import farthest_first
from posttrain.select.selectors.pool import Pool, min_max_scale
from posttrain.select.selectors.similarity import DIMENSIONS, Cosine, Rows
from posttrain.store.errors import UserError, suggest


def mmr(
    pool: Pool, n: int, seed: int, relevance: float = 0.5, by: str = "entropy", dimensions: int | None = DIMENSIONS
) -> Rows:
    """Chooses by maximal marginal relevance: ``relevance * u - (1 - relevance) * cosine to the nearest chosen row``.

    J. Carbonell and J. Goldstein, SIGIR 1998. Uncertainty u is scaled to [0, 1]; rows with a label count as chosen.

    Args:
        relevance: from 0, only unlike each other, to 1, only uncertain.
        by: ``entropy``, ``least_confidence`` or ``margin``.
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    if not 0 <= relevance <= 1:
        raise UserError(f"strategy `mmr`: relevance is {relevance}, and must be from 0 to 1")
    uncertainty = min_max_scale(pool.uncertainty(by), pool.free)
    return _farthest_by_cosine(pool, n, relevance * uncertainty, 1 - relevance, pool.points("mmr", dimensions))


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
        difficulty: weight of the column ``hard``; that is not needed for 0.
        by: ``entropy``, ``least_confidence`` or ``margin``.
        hard: the column that says how hard a row is.
        quotas: by a name in the column ``source`` the greatest share of a batch that may come from it. Where they
            leave too few rows, fewer than ``n`` are chosen.
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    weights = {"uncertainty": uncertainty, "diversity": diversity, "difficulty": difficulty}
    for name, weight in weights.items():
        if not 0 <= weight < np.inf:
            raise UserError(f"strategy `composite`: {name} is {weight}, and must be a weight of 0 or more")
    worth = np.zeros(len(pool))
    if uncertainty:
        worth += uncertainty * min_max_scale(pool.uncertainty(by), pool.free)
    if difficulty:
        worth += difficulty * min_max_scale(pool.column(hard, "composite"), pool.free)
    points = pool.points("composite", dimensions) if diversity else np.zeros((len(pool), 1), np.float32)
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
    return farthest_first(Cosine.from_rows(points), n, worth, weight, pool.chosen, groups, most)


def _source_quotas(pool: Pool, n: int, quotas: Mapping[str, float]) -> tuple[Rows, Rows]:
    """Returns the group of each row, and how many rows each group may give."""
    names, groups = np.unique(np.asarray(pool.column("source", "composite")).astype(str), return_inverse=True)
    for name, share in quotas.items():
        if name not in names:
            raise UserError(f"no record is of source `{name}`", where="quotas", fix=suggest(name, names.tolist()))
        if not 0 <= share <= 1:
            raise UserError(f"the share of `{name}` is {share}, and must be from 0 to 1", where="quotas")
    whole, before = n + len(pool.batch), np.bincount(groups[pool.batch], minlength=len(names))
    shares = np.array([quotas.get(name, 1.0) for name in names.tolist()])
    return groups, np.maximum(np.floor(shares * whole + 1e-9).astype(np.int64) - before, 0)
