"""Draws a sample of the pool by hash, and estimates shares of the pool from a sample."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_Z_TWO_SIDED = 1.959964  # 95% of a normal distribution lie within so many standard deviations


def sample_pool(pool: pa.Table, n: int, seed: int, *, after: int = 0) -> pa.Table:
    """Draws at most ``n`` records, those with the smallest hash of seed and id; sorted by id.

    Args:
        pool: table with an ``id``.
        n: number of records.
        seed: seed of the hashes.
        after: number of records, the first by hash, to skip.
    """
    ids = pool["id"].to_pylist()
    if after or len(ids) > n:
        # By hash: whether a record is drawn depends on the ids alone, not on the order of the rows.
        ids = sorted(ids, key=lambda id: hashlib.sha256(f"{seed}:{id}".encode()).digest())[after : after + n]
    sample = set(ids)
    return pool.filter(pa.array([id in sample for id in pool["id"].to_pylist()], pa.bool_())).sort_by("id")


def with_sample_sizes(scores: pa.Table, pool: pa.Table) -> pa.Table:
    """Returns the score table with the numbers of its records and of the pool's in its metadata."""
    return scores.replace_schema_metadata({"sampled": str(scores.num_rows), "pool": str(pool.num_rows)})


def sample_sizes(scores: pa.Table) -> dict[str, int]:
    """Reads what `with_sample_sizes` wrote: ``{"sampled": n, "pool": N}``."""
    return {name.decode(): int(count) for name, count in (scores.schema.metadata or {}).items()}


@dataclass(frozen=True)
class PoolShare:
    """A share of the pool, estimated from ``drawn`` random records, with the interval that holds it at 95%.

    The fields are keys of ``posttrain label report --json``.
    """

    value: float
    low: float
    high: float
    drawn: int


def estimate_pool_share(true: npt.NDArray[np.bool_], inclusion: npt.NDArray[np.floating]) -> PoolShare | None:
    """Estimates the share of the pool's records for which a statement is true.

    Each drawn record stands for 1 / inclusion of them (J. Hajek, Comment on an essay by D. Basu, 1971): the estimate
    is the weighted mean. The interval is E. B. Wilson's (JASA 22, 1927).

    Args:
        true: bool [M], whether it is true of each record of the sample.
        inclusion: float [M], the probability with which each was drawn.

    Returns:
        None where nothing was drawn.

    Raises:
        ValueError: a probability is not above 0 and at most 1.
    """
    if not len(true):
        return None
    probabilities = np.asarray(inclusion, np.float64)
    if not ((probabilities > 0) & (probabilities <= 1)).all():
        raise ValueError("a drawn record's inclusion probability is above 0 and at most 1")
    weights = 1 / probabilities
    value = float((weights * true).sum() / weights.sum())
    # L. Kish's effective number of records, (sum w)^2 / sum w^2: their number where all were equally likely.
    count = float(weights.sum() ** 2 / (weights**2).sum())
    spread = _Z_TWO_SIDED**2 / count
    centre = (value + spread / 2) / (1 + spread)
    half = _Z_TWO_SIDED / (1 + spread) * np.sqrt(value * (1 - value) / count + spread / (4 * count))
    return PoolShare(value, max(0.0, float(centre - half)), min(1.0, float(centre + half)), len(true))
