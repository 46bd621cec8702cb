"""Reports the class sizes of the training records, and downsamples large classes."""

import hashlib
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from posttrain.data.records.outcome import Rejection
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep


class Balance(GlobalStep):
    """Reports the size of each class, or downsamples large classes.

    A record's class is its answer or its source; plain text has no answer, and passes. Fact: ``class_size``.

    With ``mode: downsample`` a class keeps the records with the lowest hashes, so a larger cap keeps all records that
    a smaller one keeps.

    To weigh classes instead, a training phase meets them more or less often: ``mix: sizes`` with ``mix_by:
    completion`` (or source) and ``mix_temperature: 2`` weighs a record by the inverse square root of its class's size,
    the compromise of detection's repeat factors (Gupta et al. 2019, arXiv:1908.03195); the higher the temperature, the
    nearer all classes come to counting alike.
    """

    name: ClassVar[str] = "balance"
    training_only: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = True

    by: Literal["label", "source"] = Field("label", description="Class of a record: its answer or its source.")
    mode: Literal["report", "downsample"] = Field(
        "report", description="Report the sizes, or remove records of large classes."
    )
    ratio: float = Field(
        10.0, ge=1, description="For `downsample`: the largest size of a class, in sizes of the smallest."
    )

    def sketch(self, table: pa.Table) -> pa.Table:
        """Sketches ``id`` and ``class``, a 64-bit hash of the class's name, null for none."""
        # A hash of fixed size: dictionary codes differ from table to table, and names of ten million rows take memory.
        column = table["completion" if self.by == "label" else "source"].combine_chunks().dictionary_encode()
        hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in column.dictionary.to_pylist()]
        numbers = pa.array(np.frombuffer(b"".join(hashes), dtype=np.int64))
        return pa.table({"id": table["id"], "class": numbers.take(column.indices)})

    def decide(self, corpus: Corpus) -> GlobalResult:
        sketches = corpus.sketches()
        rows = np.flatnonzero(corpus.alive & np.asarray(pa.compute.is_valid(sketches["class"])))
        hashes = sketches["class"].take(pa.array(rows)).to_numpy()
        _, inverse, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
        facts = {"class_size": _fact_column(corpus.rows, rows, sizes[inverse].astype(np.float64))}
        rejections: dict[int, Rejection] = {}
        if self.mode == "downsample" and len(rows):
            rejections = self._surplus(corpus, sketches, rows, inverse, sizes)
        return GlobalResult(rejections, facts=facts)

    def _surplus(
        self,
        corpus: Corpus,
        sketches: pa.Table,
        rows: npt.NDArray[np.int64],
        inverse: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
    ) -> dict[int, Rejection]:
        """Returns the records over the cap of their class."""
        # Of the smallest class that occurs: a label without records would make every class too large.
        cap = int(np.floor(self.ratio * sizes.min()))
        large = np.flatnonzero(sizes[inverse] > cap)
        ids = sketches["id"].take(pa.array(rows[large])).to_pylist()
        # By a hash of the id, not by a draw: the choice stays when records are added or come in another order.
        draws = [hashlib.sha256(f"balance\0{identity}".encode()).digest()[:8] for identity in ids]
        order = large[np.lexsort((large, np.frombuffer(b"".join(draws), dtype=">u8"), inverse[large]))]
        classes, begin = np.unique(inverse[order], return_index=True)
        rank = np.arange(len(order)) - begin[np.searchsorted(classes, inverse[order])]
        surplus = np.sort(order[rank >= cap])
        column = "completion" if self.by == "label" else "source"
        names = corpus.columns([column])[column].take(pa.array(rows[order[begin]], pa.int64())).to_pylist()
        details = {
            index: f"`{name}`: {cap:,} of {sizes[index]:,} records stay"
            for index, name in zip(classes.tolist(), names, strict=True)
        }
        return {
            row: Rejection("majority class", details[index])
            for row, index in zip(rows[surplus].tolist(), inverse[surplus].tolist(), strict=True)
        }


def _fact_column(rows: int, at: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> pa.Array:
    """Returns float64 [rows] with ``values`` at the rows ``at``, null elsewhere."""
    column = np.full(rows, np.nan)
    column[at] = values
    return pa.array(column, mask=np.isnan(column))
