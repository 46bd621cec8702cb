"""The split of every record."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.split.components import Indices, first_of, first_of_component, ties
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


def assign(
    keys: pa.Table,
    config: SplitsConfig,
    clusters: Indices | None = None,
    known: Splits | None = None,
    among_known: Indices | None = None,
) -> Sides:
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
    ``stratify``, the thresholds of `settle` make the shares hold in every stratum of the first version, as nearly as
    whole numbers of groups and clusters allow; what comes later has the odds again. Shares that stay exact while a set
    grows would move records.

    Args:
        keys: KEYS table of N rows in reading order.
        clusters: int64 [N], equal for near duplicates; None: only equal inputs are alike.
        known: int8 [K], splits of the first K records in the version before; -1 for what has none.
        among_known: int64 [N], clusters that the known records would make alone; None: none of two splits.
    """
    before = np.full(keys.num_rows, NOWHERE, dtype=np.int8)
    before[: 0 if known is None else len(known)] = [] if known is None else known
    if config.by == "time":
        own = _by_time(keys, config)
    else:
        fresh = before == NOWHERE
        own = np.zeros(keys.num_rows, dtype=np.int8)
        own[fresh] = _by_hash(keys.filter(pa.array(fresh)), config)
    made = np.asarray(keys["made"])
    own[made] = 0
    before[made & (before > 0)] = NOWHERE
    splits = np.where(before == NOWHERE, own, before)
    nothing = np.arange(keys.num_rows)
    cluster, alone = (nothing if labels is None else first_of(labels) for labels in (clusters, among_known))
    tied = [*ties(keys, None), cluster]
    head = first_of_component(tied)
    mixed = np.zeros(keys.num_rows, dtype=bool)
    mixed[head[splits != splits[head]]] = True
    rows = np.flatnonzero(mixed[head])
    told = _in_order(rows, [*tied, alone], splits, before, made | (config.by == "time"))
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
    times = keys["time"].cast(pa.int64()).fill_null(0).to_numpy()
    splits = np.zeros(len(times), dtype=np.int8)
    for index, name in enumerate(SPLITS[1:], 1):
        if config.since and name in config.since:
            splits[times >= moment(config.since[name])] = index
    return splits


def _in_order(
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
    rows = rows[np.lexsort((rows, np.where(before[rows] == NOWHERE, 1, -before[rows])))]
    names = np.stack([firsts[rows] + place * len(splits) for place, firsts in enumerate(tied)], axis=1)
    distinct, names = np.unique(names, return_inverse=True)
    names = names.reshape(len(rows), len(tied))
    holders = [[-1] * len(SPLITS) for _ in range(len(distinct))]
    told = {}
    for row, mine in zip(rows.tolist(), names.tolist(), strict=True):
        split = int(splits[row])
        new = before[row] == NOWHERE
        asked = mine[:-1] if new else [*mine[:-2], mine[-1]]
        met = [max(holders[name][index] for name in asked) for index in range(len(SPLITS))]
        where = [index for index, holder in enumerate(met) if holder >= 0]
        if len(where) > 1 or ((strict[row] or not new) and where and where != [split]):
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
    made = keys["made"].to_pylist()
    for row, found in told.items():
        shared = " and ".join(f"`{SPLITS[i]}` ({where[other]})" for i, other in enumerate(found) if other >= 0)
        why = "" if own is None else f"is of the time of `{SPLITS[own[row]]}` and "
        why = "was made of others and " if made[row] else why
        rejections[row] = Rejection(LINKS, f"{why}hangs together with {shared}")
    return rejections
