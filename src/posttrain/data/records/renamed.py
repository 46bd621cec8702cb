"""Ids of records that steps have rewritten: those with which they were read, and those that they have now."""

import pyarrow as pa
import pyarrow.compute as compute

_MOST_CHANGES = 64  # of one record; its ids could go round in a circle


def first_ids(ids: pa.ChunkedArray, changed: pa.Table) -> pa.ChunkedArray:
    """The id with which each record was read: string [N]; one of several where steps have made them the same.

    Args:
        changed: CHANGED table of all that steps have done; what they made of another record has the other's.
    """
    for _ in range(_MOST_CHANGES if changed.num_rows else 0):
        at = compute.index_in(ids, value_set=changed["id"])
        if at.null_count == len(at):
            break
        ids = compute.coalesce(changed["before"].take(at), ids)
    return ids


def last_ids(ids: pa.ChunkedArray, changed: pa.Table, present: pa.ChunkedArray) -> pa.ChunkedArray:
    """The id that each record has now, string [N], by one that it had before or between two steps.

    Args:
        changed: CHANGED table of what steps have rewritten.
        present: ids that records have now; these stand for themselves.
    """
    for _ in range(_MOST_CHANGES if changed.num_rows else 0):
        at = compute.index_in(ids, value_set=changed["before"])
        at = compute.if_else(compute.is_in(ids, value_set=present), pa.scalar(None, at.type), at)
        if at.null_count == len(at):
            break
        ids = compute.coalesce(changed["id"].take(at), ids)
    return ids
