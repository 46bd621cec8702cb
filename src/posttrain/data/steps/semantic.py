"""Records whose inputs mean nearly the same."""

from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.duplicates.cosine import cosine_clusters, cosines
from posttrain.data.quality.embeddings import embeddings
from posttrain.data.records.normalise import Field as Words
from posttrain.data.records.normalise import texts_of
from posttrain.data.steps.step import Corpus, Decision, GlobalStep, Rejection, places

_MINILM = "minilm"


class Semantic(GlobalStep):
    """In a cluster of records that mean the same the first of each answer stays (SemDeDup; Abbas et al. 2023,
    arXiv:2303.09540).

    Records whose embeddings have at least the threshold's cosine are joined; a cluster is what hangs together. Up to
    ``exact_rows`` different embeddings all pairs are compared. Of more, each is compared with those that share one of
    its two nearest cells of spherical k-means, as SemDeDup compares within one: a pair at the border of cells is
    missed if neither of the two nearest cells of one record is among those of the other.

    A record's embedding takes 2 bytes a number, 768 bytes with MiniLM.
    """

    name: ClassVar[str] = "semantic"

    model: str = Field(_MINILM, description="`minilm`, a folder or the Hub id of a sentence embedder")
    threshold: float = Field(0.95, gt=0, le=1, description="cosine from which two records mean the same")
    field: Words = Field("input", description="the words that are embedded: the input, the answer, or all")
    exact_rows: int = Field(
        100_000, ge=1, description="most different embeddings of which all pairs are compared; cells beyond"
    )
    seed: int = Field(0, ge=0, description="draws the first centres of the cells")

    def located(self, root: Path) -> Self:
        folder = root / Path(self.model).expanduser()
        is_folder = self.model != _MINILM and folder.is_dir()
        return self.model_copy(update={"model": str(folder)}) if is_folder else self

    def check(self) -> None:
        from posttrain.models.embedder import find_embedder

        find_embedder(self.model)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "model": _key(self.model)}

    def sketch_key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, "model": _key(self.model), "field": self.field}

    def sketch(self, table: pa.Table) -> pa.Table:
        vectors = embeddings(self.model, texts_of(table, self.field)).astype(np.float16)
        values = pa.array(vectors.reshape(-1), pa.float16())
        lists = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
        return table.select(["id"]).append_column("embedding", lists)

    def decide(self, corpus: Corpus) -> Decision:
        rows = np.flatnonzero(corpus.alive)
        sketches = corpus.sketches()
        vectors = _vectors(sketches["embedding"], corpus.alive)
        cluster = cosine_clusters(vectors, self.threshold, self.exact_rows, self.seed)
        sizes = np.bincount(cluster, minlength=len(rows))
        many = np.flatnonzero(sizes[cluster] > 1)
        ids = sketches["id"].take(pa.array(rows)).to_pylist()
        gone, kept = _repeats(corpus, rows, many, cluster)
        told = corpus.columns(["source", "line"]).take(pa.array(rows[np.unique(kept)]))
        where = dict(zip(np.unique(kept).tolist(), places(told), strict=True))
        rejections = {}
        scores = cosines(vectors, gone, kept).tolist()
        for row, stays, cosine in zip(gone.tolist(), kept.tolist(), scores, strict=True):
            detail = f"cosine {cosine:.3f} to {where[stays]}"
            if cosine < self.threshold:
                detail += ", with which it hangs together by others"
            rejections[int(rows[row])] = Rejection(
                "semantic duplicate", detail, cosine, cluster=ids[int(cluster[row])], kept=ids[stays]
            )
        return Decision(rejections)


def _vectors(column: pa.ChunkedArray, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float16]:
    """The rows that are alive; no more than these are held in memory."""
    width = column.type.list_size
    kept = [np.empty((0, width), dtype=np.float16)]
    first = 0
    for chunk in column.chunks:
        kept.append(chunk.flatten().to_numpy().reshape(len(chunk), width)[alive[first : first + len(chunk)]])
        first += len(chunk)
    return np.concatenate(kept)


def _repeats(
    corpus: Corpus, rows: npt.NDArray[np.int64], many: npt.NDArray[np.int64], cluster: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of the embeddings ``many`` those that repeat cluster and answer of an earlier one, and for each the first."""
    first: dict[tuple[int, str | None, str | None], int] = {}
    gone, kept = [], []
    records = corpus.take(rows[many]).select(["completion", "rejected"])
    answers = zip(records["completion"].to_pylist(), records["rejected"].to_pylist(), strict=True)
    for row, (better, worse) in zip(many.tolist(), answers, strict=True):
        stays = first.setdefault((int(cluster[row]), better, worse), row)
        if stays != row:
            gone.append(row)
            kept.append(stays)
    return np.array(gone, dtype=np.int64), np.array(kept, dtype=np.int64)


@lru_cache(maxsize=8)
def _key(model: str) -> str:
    from posttrain.models.embedder import embedder_key

    return embedder_key(model)
