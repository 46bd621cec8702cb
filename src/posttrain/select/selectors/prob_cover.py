"""Rows whose neighbourhoods cover most of the pool, for a start without labels."""

import numpy as np

from posttrain.select.selectors.closeness import Euclidean, Floats, Rows
from posttrain.select.selectors.facility import CANDIDATES, GROUND, covering, sample
from posttrain.select.selectors.k_means import k_means
from posttrain.select.selectors.pool import Pool
from posttrain.select.selectors.whitening import DIMENSIONS
from posttrain.store.errors import UserError

_PURITY = 0.95
_SAMPLE = 2000


def prob_cover(
    pool: Pool,
    n: int,
    seed: int,
    radius: float | None = None,
    classes: int | None = None,
    ground: int = GROUND,
    candidates: int = CANDIDATES,
    dimensions: int | None = DIMENSIONS,
) -> Rows:
    """Rows that have most rows not covered yet within ``radius``, one after the other: O. Yehuda et al., NeurIPS 2022.

    Rows near one with a label are covered from the start. Once all are, the others follow at random.

    Args:
        radius: Euclidean; None for the greatest at which 95% of rows have none but rows of their own cluster within it
            (section 4.2 there), on at most 2,000 rows.
        classes: clusters by which the radius is found; None for as many as the probabilities have columns, or ``n``.
        ground: rows to cover at most; of more, so many are drawn.
        candidates: rows that are looked at, at most, or four times ``n`` if that is more; drawn at random.
        dimensions: principal components that are kept; None for the embeddings as they are.
    """
    if radius is not None and not radius > 0:
        raise UserError(f"strategy `prob_cover`: radius is {radius}, and must be positive")
    points = pool.points("prob_cover", dimensions)
    closeness = Euclidean.between_rows_of(points)
    generator = np.random.default_rng(seed)
    if radius is None:
        classes = classes or (np.shape(pool.scores["probabilities"])[1] if "probabilities" in pool.scores else n)
        radius = pure_radius(points, classes, seed, generator)

    to_cover = sample(np.arange(len(pool)), ground, generator)

    def similarity(rows: Rows) -> Floats:
        return (closeness.between(rows, to_cover) >= -(radius**2) / 2).astype(np.float32)

    return covering(similarity, pool, n, candidates, generator)


def pure_radius(points: Floats, classes: int, seed: int, generator: np.random.Generator) -> float:
    """The greatest radius at which 95% of rows have none but rows of their own cluster within it.

    Args:
        points: float32 [N, D].
        classes: clusters.
        seed: of the clusters.
        generator: of the rows that are looked at.
    """
    rows = sample(np.arange(len(points)), _SAMPLE, generator)
    some = points[rows]
    found = k_means(some, np.arange(len(some)), min(classes, len(some)), seed)
    distances = np.sqrt(-2 * Euclidean.between_rows_of(some).between(slice(None), slice(None)))
    strangers = np.where(found.cluster[:, None] != found.cluster, distances, np.inf).min(axis=1)
    if not np.isfinite(strangers).any():  # one cluster: everything is of it
        return float(distances.max()) or 1.0
    radius = np.quantile(strangers, 1 - _PURITY)
    return float(radius) or float(np.finfo(np.float32).eps)
