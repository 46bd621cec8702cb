"""The split as a step between those for all records and those for training records only."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as compute

from posttrain.data.duplicates.minhash import PERMUTATIONS, cached_minhash_sketch
from posttrain.data.duplicates.near_duplicates import cluster_near_duplicates
from posttrain.data.records.provenance import current_ids
from posttrain.data.records.texts import input_texts
from posttrain.data.split import SPLITS, SplitsConfig, assign_splits, freeze_settings, split_keys
from posttrain.data.split.assignment import Indices, first_with_label
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep, SimilarityKind

_NGRAM = 5

Splits = npt.NDArray[np.int8]


class Split(GlobalStep):
    """Gives every record a side, its place in `SPLITS`; its state: `cluster` and `side`, -1 for none.

    Attributes:
        settings: as the config has them, or as the version before has settled them.
    """

    name: ClassVar[str] = "split"
    version: ClassVar[int] = 2
    evaluation: ClassVar[bool] = True
    settings: SplitsConfig

    def key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, **self.settings.model_dump(mode="json")}

    def sketch_key(self) -> dict[str, Any]:
        read = self.settings.model_dump(mode="json", include={"near_duplicates", "group", "stratify", "time"})
        return {"step": self.name, "version": self.version, **read}

    def sketch(self, table: pa.Table) -> pa.Table:
        columns = split_keys(table, self.settings)
        if self.settings.near_duplicates is None:
            return columns
        bands = cached_minhash_sketch(tuple(input_texts(table)), self.settings.near_duplicates, _NGRAM, 0, PERMUTATIONS)
        return pa.table([*columns.columns, *bands.columns], names=[*columns.column_names, *bands.column_names])

    def decide(self, corpus: Corpus) -> GlobalResult:
        """Sides for all rows; what a row had in versions before it keeps."""
        sketches, rows, known = corpus.sketches(), np.flatnonzero(corpus.alive), corpus.sides()
        if compute.any(sketches["made"]).as_py():
            # What names the record that it was made of may name it as it was before some step.
            place, originals = sketches.column_names.index("origin"), compute.invert(sketches["made"])
            origin = current_ids(sketches["origin"], corpus.changed(), sketches["origin"].filter(originals))
            sketches = sketches.set_column(place, "origin", origin)
        alike, among_known = np.arange(corpus.rows, dtype=np.int64), None
        if self.settings.near_duplicates is not None:
            alike = self._clusters(corpus, sketches)
            among_known = self._among_known(corpus, sketches, alike, known)
        living = sketches.take(pa.array(rows))
        settled = freeze_settings(living, self.settings, alike[rows])
        splits, rejections = assign_splits(
            living, settled, alike[rows], known[rows], None if among_known is None else among_known[rows]
        )
        side = np.full(corpus.rows, -1, dtype=np.int8)
        side[rows] = splits
        state = pa.table({"cluster": alike, "side": side})
        found = {int(rows[row]): rejection for row, rejection in rejections.items()}
        return GlobalResult(
            found,
            state=state,
            settled=settled.model_dump(mode="json"),
            sides=np.maximum(side, 0).astype(np.uint8),
        )

    def _clusters(self, corpus: Corpus, sketches: pa.Table) -> Indices:
        """Cluster of every row, int64 [N], named by its smallest row; only what changed is looked at again."""
        state = corpus.known()
        known = None if state is None else np.asarray(state.table["cluster"].to_numpy())
        if state is None or known is None or state.unchanged:
            return self._alike(corpus, sketches, None, corpus.alive, known)
        whole = _intact_rows(known, np.asarray(state.table["side"].to_numpy()), corpus.alive)
        order = np.concatenate([np.flatnonzero(whole), np.flatnonzero(~whole)])
        place = np.argsort(order)
        found = self._alike(
            corpus, sketches, order, corpus.alive[order], place[known[order[: np.count_nonzero(whole)]]]
        )
        return first_with_label(order[found][place])

    def _among_known(self, corpus: Corpus, sketches: pa.Table, alike: Indices, known: Splits) -> Indices | None:
        """Clusters that the rows with a side make alone, int64 [N]; None: no cluster of all rows holds two sides.

        What makes one cluster of two sides may be nothing but rows without a side, which leave then.
        """
        held = np.flatnonzero(corpus.alive & (known >= 0))
        least, most = np.full(len(alike), len(SPLITS), dtype=np.int8), np.full(len(alike), -1, dtype=np.int8)
        np.minimum.at(least, alike[held], known[held])
        np.maximum.at(most, alike[held], known[held])
        torn = held[least[alike[held]] != most[alike[held]]]
        if not len(torn):
            return None
        alone = np.arange(len(alike))
        alone[torn] = torn[self._alike(corpus, sketches, torn)]
        return alone

    def _alike(
        self,
        corpus: Corpus,
        sketches: pa.Table,
        rows: Indices | None,
        alive: npt.NDArray[np.bool_] | None = None,
        known: Indices | None = None,
    ) -> Indices:
        """What `clusters` finds among some rows in this order, named by their places in it; None: all."""
        some = sketches if rows is None else sketches.take(pa.array(rows))

        def texts(places: Indices) -> list[str]:
            return input_texts(corpus.take(places if rows is None else rows[places]))

        threshold = self.settings.near_duplicates
        assert threshold is not None
        asked = np.ones(some.num_rows, dtype=bool) if alive is None else alive
        lonely = self._lonely(corpus, threshold)
        asked = asked & ~(lonely if rows is None else lonely[rows])
        return cluster_near_duplicates(some, texts, threshold, _NGRAM, asked, known, corpus.map)

    def _lonely(self, corpus: Corpus, threshold: float) -> npt.NDArray[np.bool_]:
        """Bool [N]: the rows of which an earlier step has found that no living one is like them."""
        found = corpus.clustered().get(SimilarityKind(threshold, _NGRAM, 0, PERMUTATIONS))
        if found is None:
            return np.zeros(corpus.rows, dtype=bool)
        cluster = np.asarray(found.to_numpy())
        living = np.bincount(cluster[corpus.alive], minlength=corpus.rows)
        return np.asarray(living[cluster] < 2)


def _intact_rows(cluster: Indices, side: Splits, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Bool [N]: the rows of clusters that have lost none of their rows, and of those that had a side before.

    Args:
        cluster, side: [K], of the first K rows as they were.
        alive: bool [N], as the rows are now.
    """
    old = len(cluster)
    sizes = np.bincount(cluster, minlength=old)
    # A row without a side may have been dead, and alone, or not.
    changed = np.where(alive[:old], side < 0, sizes[cluster] > 1)
    broken = np.zeros(old, dtype=bool)
    broken[cluster[changed]] = True
    whole = np.zeros(len(alive), dtype=bool)
    whole[:old] = ~broken[cluster]
    return whole
