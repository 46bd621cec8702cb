"""Assign every record to a split: by a hash or its time, and together with the records it is linked to."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.records.outcome import Rejection, locations
from posttrain.data.records.provenance import origin_ids
from posttrain.data.split.config import SPLITS, SplitsConfig, parse_timestamp
from posttrain.store.errors import UserError

Splits = npt.NDArray[np.int8]

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
"""One row a record. ``stratum`` is its label or source and ``time`` its moment, each null unless the config asks.
``made``: whether it was made of others, as `posttrain.data.records.provenance` reads it; ``origin`` is the id of the one
that it was
made of, its own for all others."""

Indices = npt.NDArray[np.int64]

Floats = npt.NDArray[np.float64]

DRAW_STEP = 2.0**-48
"""Draws are whole multiples of this."""


class SplitAssignment(NamedTuple):
    """Where N records go.

    Attributes:
        splits: int8 [N], index into `SPLITS`; -1 for a rejected record.
        rejections: by row.
    """

    splits: Splits
    rejections: Mapping[int, Rejection]


def assign_splits(
    keys: pa.Table,
    config: SplitsConfig,
    clusters: Indices | None = None,
    known: Splits | None = None,
    among_known: Indices | None = None,
) -> SplitAssignment:
    """Decide for all records at once.

    In reading order, a record goes where the records before it are that share its input, its group, its origin or its
    cluster; where there are none, its own draw or moment decides. A record that shares something with two splits is
    rejected, and so is, by time, one that shares something with a split of another time: on either side it would leak.
    What was made of others (variants and synthetic records) is learned from or rejected, never measured on. So
    nothing that is appended moves a record. A new record may join two clusters, though, and their label alone does not
    say which one: give ``known`` wherever the set has a past. What has a split comes first then and keeps it, wherever
    it stands, and a new record that joins two splits is rejected. Only where records with two splits share something
    by themselves, as under settings of today that those of then did not have, the one learned from is rejected.

    What holds of the shares: every record, or what hangs together with it, has the config's shares as its odds. With
    ``stratify``, the thresholds of `freeze_settings` make the shares hold in every stratum of the first version, as nearly as
    whole numbers of groups and clusters allow; what comes later has the odds again. Shares that stay exact while a set
    grows would move records.

    Args:
        keys: KEYS table of N rows in reading order.
        clusters: int64 [N], equal for near duplicates; None: only equal inputs are alike.
        known: int8 [K], splits of the first K records in the version before; -1 for what has none.
        among_known: int64 [N], clusters that the known records would make alone; None: none of two splits.
    """
    before = np.full(keys.num_rows, UNASSIGNED, dtype=np.int8)
    before[: 0 if known is None else len(known)] = [] if known is None else known
    if config.by == "time":
        own = _splits_by_time(keys, config)
    else:
        fresh = before == UNASSIGNED
        own = np.zeros(keys.num_rows, dtype=np.int8)
        own[fresh] = _splits_by_hash(keys.filter(pa.array(fresh)), config)
    made = np.asarray(keys["made"])
    own[made] = 0
    before[made & (before > 0)] = UNASSIGNED
    splits = np.where(before == UNASSIGNED, own, before)
    nothing = np.arange(keys.num_rows)
    cluster, alone = (nothing if labels is None else first_with_label(labels) for labels in (clusters, among_known))
    tied = [*links(keys, None), cluster]
    head = first_of_component(tied)
    mixed = np.zeros(keys.num_rows, dtype=bool)
    mixed[head[splits != splits[head]]] = True
    rows = np.flatnonzero(mixed[head])
    told = _assign_linked(rows, [*tied, alone], splits, before, made | (config.by == "time"))
    return SplitAssignment(splits, _link_rejections(keys, told, own if config.by == "time" else None))


def _splits_by_hash(keys: pa.Table, config: SplitsConfig) -> Splits:
    """Split of each row's own draw."""
    _, validation, test = config.shares
    draw = hash_draw(keys["input_id"].to_pylist(), keys["group"].to_pylist(), config.seed)
    if not config.thresholds:
        return split_by_draw(draw, test, test + validation)
    fixed = config.thresholds
    strata = keys["stratum"].fill_null("").combine_chunks().dictionary_encode()
    named = [fixed.get(name, (test, test + validation)) for name in strata.dictionary.to_pylist()]
    below = np.array(named, dtype=np.float64).reshape(-1, 2)[strata.indices.to_numpy()]
    return split_by_draw(draw, below[:, 0], below[:, 1])


def _splits_by_time(keys: pa.Table, config: SplitsConfig) -> Splits:
    """Split of each row's own moment.

    Raises:
        ValueError: the config has no moments; `freeze_settings` finds them.
    """
    if config.since is None and keys.num_rows:
        raise ValueError("the moments from which records are held out are not settled")
    times = keys["time"].cast(pa.int64()).fill_null(0).to_numpy()
    splits = np.zeros(len(times), dtype=np.int8)
    for index, name in enumerate(SPLITS[1:], 1):
        if config.since and name in config.since:
            splits[times >= parse_timestamp(config.since[name])] = index
    return splits


def _assign_linked(
    rows: Indices,
    tied: list[Indices],
    splits: Splits,
    before: Splits,
    strict: npt.NDArray[np.bool_],
) -> dict[int, list[int]]:
    """Decide for rows that hang together and have different sides of their own; ``splits`` is changed in place.

    Args:
        rows: rising.
        tied: [N] each; by the last but one only new rows meet others, by the last only those that have a split.
        strict: [N], whether a row goes where it would go by itself, or nowhere.

    Returns:
        By rejected row the first row that it meets in each split, -1 for none.
    """
    # What has a split comes first, and of that what is measured on: so what was learned from is what leaves.
    rows = rows[np.lexsort((rows, np.where(before[rows] == UNASSIGNED, 1, -before[rows])))]
    names = np.stack([firsts[rows] + place * len(splits) for place, firsts in enumerate(tied)], axis=1)
    distinct, names = np.unique(names, return_inverse=True)
    names = names.reshape(len(rows), len(tied))
    holders = [[-1] * len(SPLITS) for _ in range(len(distinct))]
    told = {}
    for row, mine in zip(rows.tolist(), names.tolist(), strict=True):
        split = int(splits[row])
        new = before[row] == UNASSIGNED
        asked = mine[:-1] if new else [*mine[:-2], mine[-1]]
        met = [max(holders[name][index] for name in asked) for index in range(len(SPLITS))]
        where = [index for index, holder in enumerate(met) if holder >= 0]
        if len(where) > 1 or ((strict[row] or not new) and where and where != [split]):
            told[row] = met
            splits[row] = UNASSIGNED
            continue
        split = where[0] if where else split
        splits[row] = split
        for name in mine:
            if holders[name][split] < 0:
                holders[name][split] = row
    return told


def _link_rejections(keys: pa.Table, told: Mapping[int, list[int]], own: Splits | None) -> dict[int, Rejection]:
    """Why rows go, with the records that they share something with."""
    met = sorted({row for found in told.values() for row in found if row >= 0})
    where = dict(zip(met, locations(keys.take(pa.array(met, pa.int64()))), strict=True))
    rejections = {}
    made = keys["made"].to_pylist()
    for row, found in told.items():
        shared = " and ".join(f"`{SPLITS[i]}` ({where[other]})" for i, other in enumerate(found) if other >= 0)
        why = "" if own is None else f"is of the time of `{SPLITS[own[row]]}` and "
        why = "was made of others and " if made[row] else why
        rejections[row] = Rejection(LINKS_TWO_SPLITS, f"{why}hangs together with {shared}")
    return rejections


def split_keys(table: pa.Table, config: SplitsConfig) -> pa.Table:
    """KEYS table of a RECORD table; of a large set it can be made table by table.

    Raises:
        UserError: ``by: time``, and a record has no moment, or none that can be read.
    """
    nothing = pa.nulls(table.num_rows, pa.string())
    stratum = {None: nothing, "label": table["completion"], "source": table["source"]}[config.stratify]
    times = (
        _timestamps(table, config.time)
        if config.time is not None
        else pa.nulls(table.num_rows, SPLIT_KEYS.field("time").type)
    )
    group = table["group"] if config.group else nothing
    of = origin_ids(table)
    origin = compute.if_else(compute.equal(of, "").fill_null(True), table["id"], of)
    columns = [table["input_id"], group, stratum, times, table["source"], table["line"], origin, of.is_valid()]
    return pa.table(columns, schema=SPLIT_KEYS)


def _timestamps(table: pa.Table, column: str) -> pa.Array:
    found: list[int | None] = []
    made = origin_ids(table).is_valid().to_pylist()
    columns = (table[name].to_pylist() for name in ("meta", "source", "line"))
    for meta, source, line, is_made in zip(*columns, made, strict=True):
        value = json.loads(meta).get(column)
        if value is None and is_made:  # its moment decides nothing
            found.append(None)
            continue
        if value is None:
            raise UserError(f"has no `{column}`, which decides its split", where=f"{source}:{line}")
        try:
            found.append(parse_timestamp(value))
        except ValueError as error:
            raise UserError(f"`{column}`: {error}", where=f"{source}:{line}") from None
    return pa.array(found, SPLIT_KEYS.field("time").type)


def links(keys: pa.Table, clusters: Indices | None) -> list[Indices]:
    """By input, group, origin and cluster: for every row the first one with the same, itself if it has none; [N] each.

    Args:
        keys: KEYS table of N rows.
        clusters: [N], equal for the rows of a cluster.
    """
    labellings = [_label_codes(keys["input_id"]), _label_codes(keys["group"])]
    if compute.any(keys["made"]).as_py():
        labellings.append(_label_codes(keys["origin"]))
    if clusters is not None:
        labellings.append(np.asarray(clusters, dtype=np.int64))
    return [first_with_label(labels) for labels in labellings]


def first_of_component(tied: list[Indices]) -> Indices:
    """The first row of all that hang together with a row, through whichever `links`: int64 [N]."""
    rows = np.arange(len(tied[0]))
    later = [np.flatnonzero(firsts != rows) for firsts in tied]
    left, right = np.concatenate(later), np.concatenate([firsts[at] for firsts, at in zip(tied, later, strict=True)])
    if not len(left):
        return rows
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), shape=(len(rows), len(rows)))
    _, component = connected_components(graph, directed=False)
    return first_with_label(np.asarray(component, dtype=np.int64))


def _label_codes(column: pa.ChunkedArray) -> Indices:
    """A number for each value, its own for each null."""
    codes = column.combine_chunks().dictionary_encode().indices
    numbers = np.asarray(codes.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    return np.where(np.asarray(codes.is_null()), -1 - np.arange(len(numbers)), numbers)


def first_with_label(labels: Indices) -> Indices:
    """For every row the first one with its label."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(first[inverse], dtype=np.int64)


def hash_draw(inputs: Sequence[str], groups: Sequence[str | None] | None, seed: int) -> Floats:
    """Float64 [N] in [0, 1): of the group, or of the input where there is none.

    It is the first 48 bits of the SHA-256 of the seed and the name, so it is the same on every machine and in every
    release.
    """
    by_group, by_input = hashlib.sha256(f"{seed}\0group\0".encode()), hashlib.sha256(f"{seed}\0input\0".encode())
    first_bits = bytearray()
    for name, group in zip(inputs, groups if groups is not None else repeat(None, len(inputs)), strict=True):
        state = (by_input if group is None else by_group).copy()
        state.update((name if group is None else group).encode())
        first_bits += state.digest()[:6]
    octets = np.frombuffer(first_bits, dtype=np.uint8).reshape(-1, 6).astype(np.float64)
    return np.asarray(octets @ (256.0 ** np.arange(5, -1, -1)) * DRAW_STEP, dtype=np.float64)


def split_by_draw(draw: Floats, below_test: Floats | float, below_validation: Floats | float) -> npt.NDArray[np.int8]:
    """Index of the split of each draw, int8 [N]: test begins at 0, validation follows, train is the rest."""
    return np.where(draw < below_test, 2, np.where(draw < below_validation, 1, 0)).astype(np.int8)


def hash_split(table: pa.Table, fraction: float, seed: int = 0, group: bool = True) -> tuple[pa.Table, pa.Table]:
    """Part ``table`` into (rest, held out), both in table order; about ``fraction`` of it is held out.

    The side is a hash of the seed and the record's group, or of its input where it has none. So a record
    stays on its side whatever else the set holds, a group is never torn, and neither are ungrouped records
    with one input. The same input in two groups can fall on both sides; the leak check takes it from the
    training side. What was made of others is never held out.

    Args:
        fraction: in [0, 1].
        group: whether groups count; otherwise every record goes by its input.
    """
    groups = table["group"].to_pylist() if group else None
    held_out = hash_draw(table["input_id"].to_pylist(), groups, seed) < fraction
    held_out &= np.asarray(origin_ids(table).is_null())
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))
