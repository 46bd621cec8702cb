"""The split of every record."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.split.components import Indices, first_of_component, ties
from posttrain.data.split.config import SPLITS, SplitsConfig
from posttrain.data.split.draw import by_draw, draws
from posttrain.data.split.moments import moment
from posttrain.data.steps.step import Rejection, places

Splits = npt.NDArray[np.int8]

LINKS = "links two splits"
NOWHERE = -1


class Sides(NamedTuple):
    """Where N records go.

    Attributes:
        splits: int8 [N], index into `SPLITS`; -1 for a rejected record.
        rejections: by row.
    """

    splits: Splits
    rejections: Mapping[int, Rejection]


def assign(keys: pa.Table, config: SplitsConfig, clusters: Indices | None = None, known: Splits | None = None) -> Sides:
    """Decide for all records at once.

    In reading order, a record goes where the records before it are that share its input, its group or its cluster;
    where there are none, its own draw or moment decides. A record that shares something with two splits is rejected,
    and so is, by time, one that shares something with a split of another time: on either side it would leak. So
    nothing that is appended moves a record. A new record may join two clusters, though, and their label alone does not
    say which one: give ``known`` wherever the set has a past, so that what has a split keeps it.

    What holds of the shares: every record, or what hangs together with it, has the config's shares as its odds. With
    ``stratify``, the thresholds of `settle` make the shares hold in every stratum of the first version, as nearly as
    whole numbers of groups and clusters allow; what comes later has the odds again. Shares that stay exact while a set
    grows would move records.

    Args:
        keys: KEYS table of N rows in reading order.
        clusters: int64 [N], equal for near duplicates; None: only equal inputs are alike.
        known: int8 [K], splits of the first K records in the version before; -1 for what has none.
    """
    before = np.full(keys.num_rows, NOWHERE, dtype=np.int8)
    before[: 0 if known is None else len(known)] = [] if known is None else known
    own = _by_time(keys, config) if config.by == "time" else _by_hash(keys, config)
    splits = np.where(before == NOWHERE, own, before)
    tied = ties(keys, clusters)
    head = first_of_component(tied)
    mixed = np.zeros(keys.num_rows, dtype=bool)
    mixed[head[splits != splits[head]]] = True
    rows = np.flatnonzero(mixed[head])
    told = _in_order(rows, tied, splits, before, strict=config.by == "time")
    return Sides(splits, _rejections(keys, told, own if config.by == "time" else None))


def _by_hash(keys: pa.Table, config: SplitsConfig) -> Splits:
    """Split of each row's own draw."""
    _, validation, test = config.shares
    draw = draws(keys["input_id"].to_pylist(), keys["group"].to_pylist(), config.seed)
    if not config.thresholds:
        return by_draw(draw, test, test + validation)
    fixed = config.thresholds
    strata = keys["stratum"].fill_null("").combine_chunks().dictionary_encode()
    named = [fixed.get(name, (test, test + validation)) for name in strata.dictionary.to_pylist()]
    below = np.array(named, dtype=np.float64).reshape(-1, 2)[strata.indices.to_numpy()]
    return by_draw(draw, below[:, 0], below[:, 1])


def _by_time(keys: pa.Table, config: SplitsConfig) -> Splits:
    """Split of each row's own moment.

    Raises:
        ValueError: the config has no moments; `settle` finds them.
    """
    if config.since is None and keys.num_rows:
        raise ValueError("the moments from which records are held out are not settled")
    times = keys["time"].cast(pa.int64()).to_numpy()
    splits = np.zeros(len(times), dtype=np.int8)
    for index, name in enumerate(SPLITS[1:], 1):
        if config.since and name in config.since:
            splits[times >= moment(config.since[name])] = index
    return splits


def _in_order(
    rows: Indices, tied: list[Indices], splits: Splits, before: Splits, *, strict: bool
) -> dict[int, list[int]]:
    """Decide for rows that hang together and have different sides of their own; ``splits`` is changed in place.

    Args:
        rows: rising.
        strict: whether a row goes where it would go by itself, or nowhere.

    Returns:
        By rejected row the first row that it meets in each split, -1 for none.
    """
    names = np.stack([firsts[rows] + place * len(splits) for place, firsts in enumerate(tied)], axis=1)
    distinct, names = np.unique(names, return_inverse=True)
    names = names.reshape(len(rows), len(tied))
    holders = [[-1] * len(SPLITS) for _ in range(len(distinct))]
    told = {}
    for row, mine in zip(rows.tolist(), names.tolist(), strict=True):
        split = int(splits[row])
        if before[row] == NOWHERE:
            met = [max(holders[name][index] for name in mine) for index in range(len(SPLITS))]
            where = [index for index, holder in enumerate(met) if holder >= 0]
            if len(where) > 1 or (strict and where and where != [split]):
                told[row] = met
                splits[row] = NOWHERE
                continue
            split = where[0] if where else split
            splits[row] = split
        for name in mine:
            if holders[name][split] < 0:
                holders[name][split] = row
    return told


def _rejections(keys: pa.Table, told: Mapping[int, list[int]], own: Splits | None) -> dict[int, Rejection]:
    """Why rows go, with the records that they share something with."""
    met = sorted({row for found in told.values() for row in found if row >= 0})
    where = dict(zip(met, places(keys.take(pa.array(met, pa.int64()))), strict=True))
    rejections = {}
    for row, found in told.items():
        shared = " and ".join(f"`{SPLITS[i]}` ({where[other]})" for i, other in enumerate(found) if other >= 0)
        moment_of = "" if own is None else f"is of the time of `{SPLITS[own[row]]}` and "
        rejections[row] = Rejection(LINKS, f"{moment_of}hangs together with {shared}")
    return rejections
