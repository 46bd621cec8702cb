"""The part of a pool that is looked at."""

import hashlib

import pyarrow as pa


def sample_pool(pool: pa.Table, n: int, seed: int) -> pa.Table:
    """At most ``n`` records, those with the smallest hash of seed and id; sorted by id.

    Whether a record is drawn depends on the ids alone, not on the order of the rows.
    """
    ids = pool["id"].to_pylist()
    if len(ids) > n:
        ids = sorted(ids, key=lambda id: hashlib.sha256(f"{seed}:{id}".encode()).digest())[:n]
    drawn = set(ids)
    return pool.filter(pa.array([id in drawn for id in pool["id"].to_pylist()], pa.bool_())).sort_by("id")


def sample_note(scores: pa.Table) -> dict[str, int]:
    """How many records were scored and how many the pool had: ``{"sampled": n, "pool": N}``."""
    return {name.decode(): int(count) for name, count in (scores.schema.metadata or {}).items()}
