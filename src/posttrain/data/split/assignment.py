"""Assigns every record to a split, by a hash or by its time, and keeps linked records together."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.arrays import Floats, Indices, Splits
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.provenance import origin_ids
from posttrain.data.records.record import locations
from posttrain.data.split.config import SPLITS, FrozenSplits, SplitsConfig, parse_timestamp
from posttrain.store.errors import UserError

LINKS_TWO_SPLITS = "links two splits"

UNASSIGNED = -1

SPLIT_KEYS: pa.Schema = pa.schema(
    [
        ("input_id", pa.string()),
        ("group", pa.string()),
        ("stratum", pa.string()),
        ("time", pa.timestamp("us", "UTC")),
        ("source", pa.string()),
        ("line", pa.int64()),
        ("origin", pa.string()),
        ("made", pa.bool_()),
    ]
)
"""One row per record. ``stratum`` is its label or source and ``time`` its moment, each null unless the config needs it.
``made``: True if it was derived from others (`posttrain.data.records.provenance`); ``origin`` is the id of the one that
it was derived from, its own for all others. Shards on disk hold these columns, so their names stay."""


DRAW_STEP = 2.0**-48
"""Draws are whole multiples of this."""


class SplitAssignment(NamedTuple):
    """Holds the split of each of N records.

    Attributes:
        splits: int8 [N], index into `SPLITS`; -1 for a rejected record.
        rejections: The rejections by row.
    """

    splits: Splits
    rejections: Mapping[int, Rejection]


def assign_splits(
    keys: pa.Table,
    config: FrozenSplits,
    clusters: Indices | None = None,
    previous_splits: Splits | None = None,
    previous_clusters: Indices | None = None,
) -> SplitAssignment:
    """Assigns all records at once.

    In reading order, a record joins the split of earlier records that share its input, group, origin or cluster;
    without such records its own hash or time decides. A record linked to two splits is rejected, and by time also one
    linked to a split of another time: in either split it would leak. Records derived from others (variants and
    synthetic ones) are trained on or rejected, never measured on. So appending moves no record. A new record may join
    two clusters, though, and their labels alone do not say which one: give ``previous_splits`` if the set has earlier
    versions. Records with a split then come first and keep it, and a new record that joins two splits is rejected. Only
    if records with two splits are linked by themselves, which new settings can cause, the training record is rejected.

    Each record, or each group of linked records, falls into a split with the odds of the config's shares. With
    ``stratify``, the thresholds of `freeze_settings` make the shares hold in every stratum of the first version, as
    nearly as whole numbers of groups and clusters allow; what comes later has the odds again. Shares that stay exact
    while a set grows would move records.

    Args:
        keys: SPLIT_KEYS table of N rows in reading order.
        clusters: int64 [N], equal for near duplicates; None: only equal inputs are alike.
        previous_splits: int8 [K], splits of the first K records in the version before; -1 for what has none.
        previous_clusters: int64 [N], clusters that records with a split form alone; None: none spans two splits.
    """
    previous = np.full(keys.num_rows, UNASSIGNED, dtype=np.int8)
    if previous_splits is not None:
        previous[: len(previous_splits)] = previous_splits
    if config.by == "time":
        own = _splits_by_time(keys, config)
    else:
        fresh = previous == UNASSIGNED
        own = np.zeros(keys.num_rows, dtype=np.int8)
        own[fresh] = _splits_by_hash(keys.filter(pa.array(fresh)), config)
    derived = np.asarray(keys["made"])
    # A variant of a test record would measure whether the model has seen the original.
    own[derived] = 0
    # A record marked as derived since then leaves the held-out splits.
    previous[derived & (previous > 0)] = UNASSIGNED
    splits = np.where(previous == UNASSIGNED, own, previous)
    every_row = np.arange(keys.num_rows)
    cluster, previous_cluster = (
        every_row if labels is None else first_with_label(labels) for labels in (clusters, previous_clusters)
    )
    linked = [*links(keys, None), cluster]
    head = first_of_component(linked)
    # Only components with rows of different splits need the slow loop; these are few.
    mixed = np.zeros(keys.num_rows, dtype=bool)
    mixed[head[splits != splits[head]]] = True
    rows = np.flatnonzero(mixed[head])
    conflicts = _assign_linked(rows, [*linked, previous_cluster], splits, previous, derived | (config.by == "time"))
    return SplitAssignment(splits, _link_rejections(keys, conflicts, own if config.by == "time" else None))


def _splits_by_hash(keys: pa.Table, config: FrozenSplits) -> Splits:
    """Finds the split of each row by its own hash."""
    _, validation, test = config.shares
    draw = hash_draw(keys["input_id"].to_pylist(), keys["group"].to_pylist(), config.seed)
    if not config.thresholds:
        return split_by_draw(draw, test, test + validation)
    fixed = config.thresholds
    strata = keys["stratum"].fill_null("").combine_chunks().dictionary_encode()
    thresholds = [fixed.get(name, (test, test + validation)) for name in strata.dictionary.to_pylist()]
    below = np.array(thresholds, dtype=np.float64).reshape(-1, 2)[strata.indices.to_numpy()]
    return split_by_draw(draw, below[:, 0], below[:, 1])


def _splits_by_time(keys: pa.Table, config: SplitsConfig) -> Splits:
    """Finds the split of each row by its own time.

    Raises:
        ValueError: the config has no moments; `freeze_settings` finds them.
    """
    if config.since is None and keys.num_rows:
        raise ValueError("the times from which records are held out are not decided")
    times = keys["time"].cast(pa.int64()).fill_null(0).to_numpy()
    splits = np.zeros(len(times), dtype=np.int8)
    for index, name in enumerate(SPLITS[1:], 1):
        if config.since and name in config.since:
            splits[times >= parse_timestamp(config.since[name])] = index
    return splits


def _assign_linked(
    rows: Indices,
    linked: list[Indices],
    splits: Splits,
    previous: Splits,
    strict: npt.NDArray[np.bool_],
) -> dict[int, list[int]]:
    """Decides for linked rows that would go to different splits; changes ``splits`` in place.

    Args:
        rows: Rising.
        linked: [N] each; the last but one links only new rows, the last only rows that have a split.
        strict: [N], whether a row goes to its own split or is rejected.

    Returns:
        By rejected row the first row linked to it in each split, -1 for none.
    """
    # Held-out rows come first, then training rows, then new ones: so of two linked rows the training row is rejected,
    # as a test set must not change.
    rows = rows[np.lexsort((rows, np.where(previous[rows] == UNASSIGNED, 1, -previous[rows])))]
    names = np.stack([firsts[rows] + index * len(splits) for index, firsts in enumerate(linked)], axis=1)
    distinct, names = np.unique(names, return_inverse=True)
    names = names.reshape(len(rows), len(linked))
    holders = [[-1] * len(SPLITS) for _ in range(len(distinct))]
    links_by_row = {}
    for row, row_names in zip(rows.tolist(), names.tolist(), strict=True):
        split = int(splits[row])
        new = previous[row] == UNASSIGNED
        relevant = row_names[:-1] if new else [*row_names[:-2], row_names[-1]]
        linked_rows = [max(holders[name][index] for name in relevant) for index in range(len(SPLITS))]
        linked_splits = [index for index, holder in enumerate(linked_rows) if holder >= 0]
        if len(linked_splits) > 1 or ((strict[row] or not new) and linked_splits and linked_splits != [split]):
            # In either split it would leak into the other.
            links_by_row[row] = linked_rows
            splits[row] = UNASSIGNED
            continue
        split = linked_splits[0] if linked_splits else split
        splits[row] = split
        for name in row_names:
            if holders[name][split] < 0:
                holders[name][split] = row
    return links_by_row


def _link_rejections(keys: pa.Table, links_by_row: Mapping[int, list[int]], own: Splits | None) -> dict[int, Rejection]:
    """Builds the rejections, which name the linked records."""
    rows = sorted({row for linked in links_by_row.values() for row in linked if row >= 0})
    locations_of = dict(zip(rows, locations(keys.take(pa.array(rows, pa.int64()))), strict=True))
    rejections = {}
    derived = keys["made"].to_pylist()
    for row, linked in links_by_row.items():
        shared = " and ".join(f"`{SPLITS[i]}` ({locations_of[other]})" for i, other in enumerate(linked) if other >= 0)
        reason = "" if own is None else f"is of the time of `{SPLITS[own[row]]}` and "
        reason = "was derived from others and " if derived[row] else reason
        rejections[row] = Rejection(LINKS_TWO_SPLITS, f"{reason}is linked to {shared}")
    return rejections


def split_keys(table: pa.Table, config: SplitsConfig) -> pa.Table:
    """Builds the SPLIT_KEYS table of a RECORD table; a large set can be processed table by table.

    Raises:
        UserError: ``by: time``, and a record has no timestamp, or an unreadable one.
    """
    nothing = pa.nulls(table.num_rows, pa.string())
    stratum = {None: nothing, "label": table["completion"], "source": table["source"]}[config.stratify]
    times = (
        _timestamps(table, config.time)
        if config.time is not None
        else pa.nulls(table.num_rows, SPLIT_KEYS.field("time").type)
    )
    group = table["group"] if config.group else nothing
    origins = origin_ids(table)
    origin = compute.if_else(compute.equal(origins, "").fill_null(True), table["id"], origins)
    columns = [table["input_id"], group, stratum, times, table["source"], table["line"], origin, origins.is_valid()]
    return pa.table(columns, schema=SPLIT_KEYS)


def _timestamps(table: pa.Table, column: str) -> pa.Array:
    times: list[int | None] = []
    derived = origin_ids(table).is_valid().to_pylist()
    columns = (table[name].to_pylist() for name in ("meta", "source", "line"))
    for meta, source, line, is_derived in zip(*columns, derived, strict=True):
        value = json.loads(meta).get(column)
        if value is None and is_derived:  # derived records are never held out, so their time decides nothing
            times.append(None)
            continue
        if value is None:
            raise UserError(f"has no `{column}`, which decides its split", where=f"{source}:{line}")
        try:
            times.append(parse_timestamp(value))
        except ValueError as error:
            raise UserError(f"`{column}`: {error}", where=f"{source}:{line}") from None
    return pa.array(times, SPLIT_KEYS.field("time").type)


def links(keys: pa.Table, clusters: Indices | None) -> list[Indices]:
    """Finds for every row the first one with the same input, group, origin or cluster, else itself; [N] each.

    Args:
        keys: SPLIT_KEYS table of N rows.
        clusters: [N], equal for the rows of a cluster.
    """
    labels_by_kind = [_label_codes(keys["input_id"]), _label_codes(keys["group"])]
    if compute.any(keys["made"]).as_py():
        labels_by_kind.append(_label_codes(keys["origin"]))
    if clusters is not None:
        labels_by_kind.append(np.asarray(clusters, dtype=np.int64))
    return [first_with_label(labels) for labels in labels_by_kind]


def first_of_component(linked: list[Indices]) -> Indices:
    """Finds the first row of each row's component, connected through any of the `links`: int64 [N]."""
    rows = np.arange(len(linked[0]))
    # Links to oneself add no edge.
    later = [np.flatnonzero(firsts != rows) for firsts in linked]
    left, right = np.concatenate(later), np.concatenate([firsts[at] for firsts, at in zip(linked, later, strict=True)])
    if not len(left):
        return rows
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), shape=(len(rows), len(rows)))
    _, component = connected_components(graph, directed=False)
    return first_with_label(np.asarray(component, dtype=np.int64))


def _label_codes(column: pa.ChunkedArray) -> Indices:
    """Numbers the values, and gives each null a number of its own."""
    # Two records without a group share none.
    codes = column.combine_chunks().dictionary_encode().indices
    numbers = np.asarray(codes.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    return np.where(np.asarray(codes.is_null()), -1 - np.arange(len(numbers)), numbers)


def first_with_label(labels: Indices) -> Indices:
    """Finds for every row the first row with its label."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], dtype=np.int64)


def hash_draw(inputs: Sequence[str], groups: Sequence[str | None] | None, seed: int) -> Floats:
    """Draws float64 [N] in [0, 1): by the group, or by the input if there is none.

    The draw is the first 48 bits of the SHA-256 of the seed and the name: the same on every machine and in every
    release.
    """
    by_group, by_input = hashlib.sha256(f"{seed}\0group\0".encode()), hashlib.sha256(f"{seed}\0input\0".encode())
    first_bits = bytearray()
    for name, group in zip(inputs, groups if groups is not None else repeat(None, len(inputs)), strict=True):
        # A copied state spares hashing the seed again for every record.
        state = (by_input if group is None else by_group).copy()
        state.update((name if group is None else group).encode())
        first_bits += state.digest()[:6]
    octets = np.frombuffer(first_bits, dtype=np.uint8).reshape(-1, 6).astype(np.float64)
    # 48 bits fit exactly into a float64, so comparisons with thresholds are exact.
    return np.asarray(octets @ (256.0 ** np.arange(5, -1, -1)) * DRAW_STEP, dtype=np.float64)


def split_by_draw(draw: Floats, below_test: Floats | float, below_validation: Floats | float) -> npt.NDArray[np.int8]:
    """Finds the index of the split of each draw, int8 [N]: test begins at 0, validation follows, train is the rest."""
    return np.where(draw < below_test, 2, np.where(draw < below_validation, 1, 0)).astype(np.int8)


def hash_split(table: pa.Table, fraction: float, seed: int = 0, group: bool = True) -> tuple[pa.Table, pa.Table]:
    """Splits ``table`` into (rest, held out), both in table order; holds out about ``fraction`` of it.

    A hash of the seed and the record's group, or of its input without a group, decides. So a record keeps its split
    whatever else the set holds, and groups and ungrouped records with one input stay together. The same input in two
    groups can fall into both splits; the leak check removes it from the training split. Derived records are never
    held out.

    Args:
        fraction: Share to hold out, in [0, 1].
        group: True if groups count; otherwise every record goes by its input.
    """
    groups = table["group"].to_pylist() if group else None
    held_out = hash_draw(table["input_id"].to_pylist(), groups, seed) < fraction
    # A derived record in the test set would measure the generator, not the task.
    held_out &= np.asarray(origin_ids(table).is_null())
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))
