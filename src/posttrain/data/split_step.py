"""The split as the step between those for all records and those for training records alone."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from posttrain.data.clusters import clusters
from posttrain.data.minhash import sketch
from posttrain.data.normalise import input_texts
from posttrain.data.split import SplitsConfig, assign, keys, settle
from posttrain.data.steps.step import Corpus, Decision, GlobalStep

_NGRAM = 5


class Split(GlobalStep):
    """Gives every record a side: its place in `SPLITS`. Its state, `cluster` and `side`, is what growth goes on from.

    Attributes:
        settings: as the config has them, or as the version before has settled them.
    """

    name: ClassVar[str] = "split"
    evaluation: ClassVar[bool] = True
    settings: SplitsConfig

    def key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, **self.settings.model_dump(mode="json")}

    def sketch_key(self) -> dict[str, Any]:
        read = self.settings.model_dump(mode="json", include={"near_duplicates", "group", "stratify", "time"})
        return {"step": self.name, "version": self.version, **read}

    def sketch(self, table: pa.Table) -> pa.Table:
        columns = keys(table, self.settings)
        if self.settings.near_duplicates is None:
            return columns
        bands = sketch(input_texts(table), self.settings.near_duplicates, _NGRAM)
        return pa.table([*columns.columns, *bands.columns], names=[*columns.column_names, *bands.column_names])

    def decide(self, corpus: Corpus) -> Decision:
        sketches, known = corpus.sketches(), corpus.known()
        alike = np.arange(corpus.rows, dtype=np.int64)
        if self.settings.near_duplicates is not None:
            alike = clusters(
                sketches,
                lambda rows: input_texts(corpus.take(rows)),
                self.settings.near_duplicates,
                _NGRAM,
                corpus.alive,
                None if known is None else known["cluster"].to_numpy(),
                corpus.map,
            )
        rows = np.flatnonzero(corpus.alive)
        living = sketches.take(pa.array(rows))
        settled = settle(living, self.settings, alike[rows])
        before = None
        if known is not None:
            before = known["side"].to_numpy()[rows[rows < known.num_rows]]
        splits, rejections = assign(living, settled, alike[rows], before)
        side = np.full(corpus.rows, -1, dtype=np.int8)
        side[rows] = splits
        state = pa.table({"cluster": alike, "side": side})
        found = {int(rows[row]): rejection for row, rejection in rejections.items()}
        return Decision(found, state=state, settled=settled.model_dump(mode="json"))


def sides_of(state: pa.Table) -> npt.NDArray[np.uint8]:
    """Uint8 [N]: the split of each row by its place in `SPLITS`; 0 for rows that have none."""
    return np.asarray(np.maximum(state["side"].to_numpy(), 0), dtype=np.uint8)
