"""Splits records as a step between those for all records and those for training records only."""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.arrays import Floats, Indices, Mask, Splits
from posttrain.data.records.provenance import current_ids
from posttrain.data.records.record import input_texts
from posttrain.data.similarity.minhash import cached_minhash_sketch
from posttrain.data.similarity.near_duplicates import cluster_near_duplicates
from posttrain.data.split import SPLITS, FrozenSplits, assign_splits, split_keys
from posttrain.data.split.assignment import (
    DRAW_STEP,
    UNASSIGNED,
    first_of_component,
    hash_draw,
    links,
)
from posttrain.data.split.config import format_timestamp
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep
from posttrain.store.errors import UserError
from posttrain.store.message import Message

_STRATA = 10_000


class Split(GlobalStep):
    """Assigns every record to a split by its index in `SPLITS`.

    Attributes:
        settings: Settings of the config, or as an earlier version has frozen them.
    """

    name: ClassVar[str] = "split"
    version: ClassVar[int] = 3
    evaluation: ClassVar[bool] = True
    settings: FrozenSplits

    def key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, **self.settings.model_dump(mode="json")}

    def sketch_key(self) -> dict[str, Any]:
        # Not the shares and the seed: sketches serve any of them, so that changing one reads no file again.
        settings = self.settings.model_dump(mode="json", include={"near_duplicates", "group", "stratify", "time"})
        return {"step": self.name, "version": self.version, **settings}

    def sketch(self, table: pa.Table) -> pa.Table:
        columns = split_keys(table, self.settings)
        if self.settings.near_duplicates is None:
            return columns
        bands = cached_minhash_sketch(tuple(input_texts(table)), self.settings.near_duplicates)
        return pa.table([*columns.columns, *bands.columns], names=[*columns.column_names, *bands.column_names])

    def decide(self, corpus: Corpus) -> GlobalResult:
        """Assigns all rows; a row keeps the split that it had in earlier versions."""
        sketches, rows, previous = corpus.sketches(), np.flatnonzero(corpus.alive), corpus.previous_splits()
        if compute.any(sketches["made"]).as_py():
            # A derived record may name its origin by the id that it had before some step changed it.
            index, originals = sketches.column_names.index("origin"), compute.invert(sketches["made"])
            origin = current_ids(sketches["origin"], corpus.id_changes(), sketches["origin"].filter(originals))
            sketches = sketches.set_column(index, "origin", origin)
        cluster, among_previous = np.arange(corpus.rows, dtype=np.int64), None
        if self.settings.near_duplicates is not None:
            cluster = self._clusters(corpus, sketches)
            among_previous = self._among_previous(corpus, sketches, cluster, previous)
        living = sketches.take(pa.array(rows))
        frozen = freeze_settings(living, self.settings, cluster[rows])
        splits, rejections = assign_splits(
            living, frozen, cluster[rows], previous[rows], None if among_previous is None else among_previous[rows]
        )
        row_splits = np.full(corpus.rows, UNASSIGNED, dtype=np.int8)
        row_splits[rows] = splits
        # Rows without a split are marked, as a later version must not take their clusters for intact.
        state = pa.table({"cluster": cluster, "side": row_splits})
        rejections_by_row = {int(rows[row]): rejection for row, rejection in rejections.items()}
        return GlobalResult(
            rejections_by_row,
            state=state,
            frozen_settings=frozen.model_dump(mode="json"),
            splits=np.maximum(row_splits, 0).astype(np.uint8),
        )

    def _clusters(self, corpus: Corpus, sketches: pa.Table) -> Indices:
        """Finds the cluster of every row, int64 [N], named by its smallest row."""
        state = corpus.previous_state
        # If other rows are alive now, a cluster may have lost the row that joined its halves: search from scratch.
        previous = np.asarray(state.table["cluster"].to_numpy()) if state and state.unchanged else None
        return self._cluster(corpus, sketches, np.arange(corpus.rows), corpus.alive, previous)

    def _among_previous(self, corpus: Corpus, sketches: pa.Table, cluster: Indices, previous: Splits) -> Indices | None:
        """Clusters that rows with a split form by themselves, int64 [N]; None if no cluster of all rows spans two
        splits.

        Rows without a split may be all that joins two splits into one cluster; these rows are rejected then.
        """
        assigned = np.flatnonzero(corpus.alive & (previous >= 0))
        least, most = np.full(len(cluster), len(SPLITS), dtype=np.int8), np.full(len(cluster), -1, dtype=np.int8)
        np.minimum.at(least, cluster[assigned], previous[assigned])
        np.maximum.at(most, cluster[assigned], previous[assigned])
        torn = assigned[least[cluster[assigned]] != most[cluster[assigned]]]
        if not len(torn):
            return None
        alone = np.arange(len(cluster))
        alone[torn] = torn[self._cluster(corpus, sketches, torn)]
        return alone

    def _cluster(
        self,
        corpus: Corpus,
        sketches: pa.Table,
        rows: Indices,
        alive: Mask | None = None,
        previous: Indices | None = None,
    ) -> Indices:
        """Clusters some rows, and names each cluster by its first position."""

        def texts(positions: Indices) -> list[str]:
            return input_texts(corpus.take(rows[positions]))

        threshold = self.settings.near_duplicates
        assert threshold is not None
        alone = self._alone(corpus, threshold)[rows]
        subset = sketches.take(pa.array(rows))
        return cluster_near_duplicates(subset, texts, threshold, alive, alone, previous, corpus.map)

    def _alone(self, corpus: Corpus, threshold: float) -> Mask:
        """Marks, bool [N], the rows for which an earlier step found no similar living row."""
        clusters = corpus.clusters.get(threshold)
        if clusters is None:
            return np.zeros(corpus.rows, dtype=bool)
        cluster = np.asarray(clusters.to_numpy())
        living = np.bincount(cluster[corpus.alive], minlength=corpus.rows)
        return np.asarray(living[cluster] < 2)


def freeze_settings(keys: pa.Table, config: FrozenSplits, clusters: Indices | None = None) -> FrozenSplits:
    """Returns the config with everything decided that counts decide; what is frozen already stays.

    By time: ``since``, the timestamps that split the records by the shares. With strata: ``thresholds``, which are as
    near to the shares as the shares' whole numbers of this set's records allow, so that odds change as little as
    possible.
    The result is stored with the version, and all later versions use it.

    Args:
        keys, clusters: As in `assign_splits`.

    Raises:
        UserError: there are more than 10,000 strata, so the answers are not labels; too few records to find a time;
            no record that could be held out.
    """
    if not keys.num_rows:
        return config
    # Derived records are never held out, so counting them would shift the shares.
    keys, clusters = _originals(keys, clusters)
    if not keys.num_rows and config.shares[0] < 1:
        fix = "add records of your own, or set `data.splits` to null"
        raise UserError(
            "every record was derived from others, which no model is measured on", where="data.splits", fix=fix
        )
    if config.by == "time" and config.since is None:
        return config.model_copy(update={"since": _freeze_since(keys, config)})
    if config.stratify is not None and config.thresholds is None:
        return config.model_copy(update={"thresholds": _freeze_thresholds(keys, config, clusters)})
    return config


def _originals(keys: pa.Table, clusters: Indices | None) -> tuple[pa.Table, Indices | None]:
    """Drops derived records, which cannot be held out."""
    rows = np.flatnonzero(~np.asarray(keys["made"]))
    return keys.take(pa.array(rows)), None if clusters is None else clusters[rows]


def _freeze_since(keys: pa.Table, config: FrozenSplits) -> dict[str, str]:
    # Sorted by time, the shares are positions.
    times = np.sort(keys["time"].cast(pa.int64()).to_numpy())
    train, validation, test = config.shares
    since = {}
    for name, share, before in (("validation", validation, train), ("test", test, train + validation)):
        index = round(before * len(times))
        if not share:
            continue
        if index == len(times):
            fix = "give the times in `data.splits.since`"
            raise UserError(
                Message("{count} records are too few to find where {name} begins", count=len(times), name=name),
                where="data.splits",
                fix=fix,
            )
        since[name] = format_timestamp(int(times[index]))
    return since


def _freeze_thresholds(
    keys: pa.Table, config: FrozenSplits, clusters: Indices | None
) -> dict[str, tuple[float, float]]:
    heads, sizes = np.unique(first_of_component(links(keys, clusters)), return_counts=True)
    firsts = keys.take(pa.array(heads))
    draw = hash_draw(firsts["input_id"].to_pylist(), firsts["group"].to_pylist(), config.seed)
    strata = firsts["stratum"].fill_null("").combine_chunks().dictionary_encode()
    names = strata.dictionary.to_pylist()
    # Each stratum needs records of its own to hold out; this many strata means free-text answers.
    if len(names) > _STRATA:
        fix = "leave `stratify` out where answers are not labels"
        raise UserError(f"there are {len(names):,} strata", where="data.splits.stratify", fix=fix)
    _, validation, test = config.shares
    order = np.lexsort((draw, strata.indices.to_numpy()))
    borders = np.cumsum(np.bincount(strata.indices.to_numpy(), minlength=len(names)))[:-1]
    thresholds = {}
    for name, rows in zip(names, np.split(order, borders), strict=True):
        below_test, below_validation = _nearest_cuts(draw[rows], sizes[rows], (test, test + validation))
        thresholds[name] = (below_test, below_validation)
    return dict(sorted(thresholds.items()))


def _nearest_cuts(draw: Floats, sizes: Indices, shares: Iterable[float]) -> list[float]:
    """Finds for each share the threshold below which the records' share is nearest to it.

    Args:
        draw: Draws of the components, rising.
        sizes: Number of records in each component.
    """
    below = np.concatenate([[0], np.cumsum(sizes)])
    least = np.concatenate([[0.0], draw + DRAW_STEP])
    most = np.concatenate([draw, [1.0]])
    cuts = []
    for share in shares:
        count = int(np.argmin(np.abs(below - share * below[-1])))
        # Within the gap between two draws the share itself is the threshold, so later records have the config's odds.
        cuts.append(float(np.clip(share, least[count], most[count])))
    return cuts
