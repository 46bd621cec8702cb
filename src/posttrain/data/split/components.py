"""Records that must not be parted."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

Indices = npt.NDArray[np.int64]


def ties(keys: pa.Table, clusters: Indices | None) -> list[Indices]:
    """By input, group, origin and cluster: for every row the first one with the same, itself if it has none; [N] each.

    Args:
        keys: KEYS table of N rows.
        clusters: [N], equal for the rows of a cluster.
    """
    labellings = [_codes(keys["input_id"]), _codes(keys["group"])]
    if compute.any(keys["made"]).as_py():
        labellings.append(_codes(keys["origin"]))
    if clusters is not None:
        labellings.append(np.asarray(clusters, dtype=np.int64))
    return [first_of(labels) for labels in labellings]


def first_of_component(tied: list[Indices]) -> Indices:
    """The first row of all that hang together with a row, through whichever `ties`: int64 [N]."""
    rows = np.arange(len(tied[0]))
    later = [np.flatnonzero(firsts != rows) for firsts in tied]
    left, right = np.concatenate(later), np.concatenate([firsts[at] for firsts, at in zip(tied, later, strict=True)])
    if not len(left):
        return rows
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), shape=(len(rows), len(rows)))
    _, component = connected_components(graph, directed=False)
    return first_of(np.asarray(component, dtype=np.int64))


def _codes(column: pa.ChunkedArray) -> Indices:
    """A number for each value, its own for each null."""
    codes = column.combine_chunks().dictionary_encode().indices
    numbers = np.asarray(codes.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    return np.where(np.asarray(codes.is_null()), -1 - np.arange(len(numbers)), numbers)


def first_of(labels: Indices) -> Indices:
    """For every row the first one with its label."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], dtype=np.int64)
