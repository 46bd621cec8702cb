"""The part of a pool that is looked at."""

import hashlib

import pyarrow as pa


def sample_pool(pool: pa.Table, n: int, seed: int, *, after: int = 0) -> pa.Table:
    """At most ``n`` records, those with the smallest hash of seed and id; sorted by id.

    Whether a record is drawn depends on the ids alone, not on the order of the rows.

    Args:
        after: leave out as many that would be drawn first.
    """
    ids = pool["id"].to_pylist()
    if after or len(ids) > n:
        ids = sorted(ids, key=lambda id: hashlib.sha256(f"{seed}:{id}".encode()).digest())[after : after + n]
    drawn = set(ids)
    return pool.filter(pa.array([id in drawn for id in pool["id"].to_pylist()], pa.bool_())).sort_by("id")


def with_note(scores: pa.Table, pool: pa.Table) -> pa.Table:
    """A score table that tells in its metadata how many records it has, and how many the pool."""
    return scores.replace_schema_metadata({"sampled": str(scores.num_rows), "pool": str(pool.num_rows)})


def sample_note(scores: pa.Table) -> dict[str, int]:
    """What `with_note` noted: ``{"sampled": n, "pool": N}``."""
    return {name.decode(): int(count) for name, count in (scores.schema.metadata or {}).items()}
