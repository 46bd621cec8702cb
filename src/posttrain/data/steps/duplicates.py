"""Removes exact, near and semantic duplicates, and records that contradict each other."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from posttrain.data.arrays import Indices
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.record import TextField, exact_ids, joined_texts, locations
from posttrain.data.similarity.cosine import cosine_clusters, cosines
from posttrain.data.similarity.minhash import cached_minhash_sketch
from posttrain.data.similarity.near_duplicates import cluster_near_duplicates, similarities
from posttrain.data.steps.resources import embed_texts
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep
from posttrain.store.paths import locate_path

_MINILM = "minilm"


class Minhash(GlobalStep):
    """Keeps the first record of each answer in every cluster of near-duplicate inputs.

    Similar inputs with different answers are not duplicates: they mark the boundary between two classes. Two inputs are
    near duplicates if their sets of character 5-grams have at least the threshold's Jaccard similarity, which is
    verified exactly; clusters are the connected components of such pairs. MinHash proposes pairs, and misses one in a
    thousand just at the threshold, and fewer above it. Of inputs that are almost alike without being near duplicates,
    each is compared with the 16 most promising earlier ones only (`posttrain.data.similarity.near_duplicates`).
    """

    name: ClassVar[str] = "minhash"

    threshold: float = Field(
        0.8, gt=0, le=1, description="Jaccard similarity from which two inputs are near duplicates."
    )

    def sketch(self, table: pa.Table) -> pa.Table:
        """Sketches inputs as `minhash_sketch` does, with a 64-bit hash of each ``answer``."""
        sketches = cached_minhash_sketch(tuple(joined_texts(table, "input")), self.threshold)
        answers = zip(table["completion"].to_pylist(), table["rejected"].to_pylist(), strict=True)
        # `repr` keeps a missing answer apart from an empty one, and a pair from its two answers joined.
        digests = b"".join(hashlib.blake2b(repr(answer).encode(), digest_size=8).digest() for answer in answers)
        return sketches.append_column("answer", pa.array(np.frombuffer(digests, dtype=np.uint64)))

    def decide(self, corpus: Corpus) -> GlobalResult:
        state = corpus.previous_state
        # If other rows are alive now, a cluster may have lost the row that joined its halves: search from scratch.
        previous = state.table if state and state.unchanged else None
        clusters_before = None if previous is None else np.asarray(previous["cluster"].to_numpy())

        def texts(rows: Indices) -> list[str]:
            return joined_texts(corpus.take(rows), "input")

        cluster = cluster_near_duplicates(
            corpus.sketches(), texts, self.threshold, corpus.alive, previous=clusters_before, over=corpus.map
        )
        sketches = corpus.sketches().select(["grams", "answer"])
        grams, answers = (np.asarray(column.to_numpy(), dtype=np.uint64) for column in sketches.columns)
        # Alike inputs with different answers stay: they may show the limit between two labels.
        duplicates, first_rows = _repeats_in_clusters(np.flatnonzero(corpus.alive), cluster, answers)
        # Equal hashes of all n-grams are similarity 1, and pairs of the version before keep their score: only the rest
        # needs the texts.
        score = np.where(grams[duplicates] == grams[first_rows], 1.0, np.nan)
        if previous is not None:
            old = np.flatnonzero(duplicates < previous.num_rows)
            same = old[previous["kept"].to_numpy()[duplicates[old]] == first_rows[old]]
            score[same] = previous["score"].to_numpy()[duplicates[same]]
        unknown = np.flatnonzero(np.isnan(score))
        score[unknown] = similarities(texts, duplicates[unknown], first_rows[unknown], corpus.map)
        named_rows = np.unique(np.concatenate([first_rows, cluster[duplicates]]))
        named_records = corpus.columns(["id", "source", "line"]).take(pa.array(named_rows))
        ids = dict(zip(named_rows.tolist(), named_records["id"].to_pylist(), strict=True))
        where = dict(zip(named_rows.tolist(), locations(named_records), strict=True))
        rejections = {}
        for row, first, similarity in zip(duplicates.tolist(), first_rows.tolist(), score.tolist(), strict=True):
            detail = f"similarity {similarity:.2f} to {where[first]}"
            if similarity < self.threshold:
                detail += "; linked through other records"
            rejections[row] = Rejection(
                "near duplicate", detail, similarity, cluster=ids[int(cluster[row])], kept=ids[first]
            )
        state = _state(cluster, duplicates, first_rows, score)
        return GlobalResult(rejections, state=state, similarity=self.threshold)


def _state(cluster: Indices, duplicates: Indices, first_rows: Indices, score: npt.NDArray[np.float64]) -> pa.Table:
    """Returns for every row its cluster, the row kept in its place (-1 for none) and the similarity of the two."""
    column, scores = np.full(len(cluster), -1, dtype=np.int64), np.zeros(len(cluster))
    column[duplicates], scores[duplicates] = first_rows, score
    return pa.table({"cluster": cluster, "kept": column, "score": scores})


def _repeats_in_clusters(rows: Indices, cluster: Indices, answers: npt.NDArray[np.uint64]) -> tuple[Indices, Indices]:
    """Returns the rows that repeat cluster and answer of an earlier row, and for each the first such row."""
    # The sort is stable, so the first of equal rows in reading order is kept.
    order = rows[np.lexsort((answers[rows], cluster[rows]))]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (cluster[order][1:] != cluster[order][:-1]) | (answers[order][1:] != answers[order][:-1])
    first = order[new][np.cumsum(new) - 1]
    return order[~new], first[~new]


class Exact(GlobalStep):
    """Keeps the first of records with equal content.

    Whitespace and canonical forms of Unicode do not count in a text of one line; in one of several lines, such as a
    program, whitespace does.
    """

    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 2
    evaluation: ClassVar[bool] = True

    def sketch(self, table: pa.Table) -> pa.Table:
        return pa.table({"exact_id": pa.array(exact_ids(table)[0], pa.string())})

    def decide(self, corpus: Corpus) -> GlobalResult:
        # Fixed-width bytes sort ten million ids in place, without a Python object each.
        ids = np.asarray(corpus.sketches()["exact_id"].to_numpy(), dtype="S20")
        rows = np.flatnonzero(corpus.alive)
        _, first, inverse = np.unique(ids[rows], return_index=True, return_inverse=True)
        first_rows = rows[first][inverse]  # np.unique returns the first of equal ids
        duplicates = rows[first_rows != rows]
        originals = first_rows[first_rows != rows]
        named = np.unique(originals)
        records = corpus.columns(["id", "source", "line"]).take(pa.array(named))
        origins = dict(
            zip(named.tolist(), zip(records["id"].to_pylist(), locations(records), strict=True), strict=True)
        )
        rejections = {}
        for row, other in zip(duplicates.tolist(), originals.tolist(), strict=True):
            identity, where = origins[other]
            rejections[row] = Rejection("exact duplicate", f"the same as {where}", cluster=identity, kept=identity)
        return GlobalResult(rejections)


class Conflicts(GlobalStep):
    """Rejects all records with equal inputs and different answers, as nothing says which answer is right.

    It is skipped for free text, where one input may have several good answers. Preference pairs and
    records without an answer pass. Inputs and answers are compared as `exact` compares records.
    """

    name: ClassVar[str] = "conflicts"
    version: ClassVar[int] = 2
    evaluation: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    def sketch(self, table: pa.Table) -> pa.Table:
        answered = pa.compute.and_(pa.compute.is_valid(table["completion"]), pa.compute.is_null(table["rejected"]))
        ids, inputs = exact_ids(table)
        return pa.table({"exact_id": pa.array(ids, pa.string()), "input": pa.array(inputs, pa.string())}).append_column(
            "answered", answered
        )

    def decide(self, corpus: Corpus) -> GlobalResult:
        sketches = corpus.sketches()
        rows = np.flatnonzero(corpus.alive & sketches["answered"].to_numpy())
        inputs = np.asarray(sketches["input"].to_numpy(), dtype="S20")[rows]
        ids = np.asarray(sketches["exact_id"].to_numpy(), dtype="S20")[rows]
        # An id holds input and answer, so an input with two different ids has two different answers.
        distinct = np.unique(np.stack([inputs, ids]), axis=1)[0]
        names, counts = np.unique(distinct, return_counts=True)
        disputed = rows[np.isin(inputs, names[counts > 1])]
        records = corpus.take(disputed)
        named = sketches["input"].take(pa.array(disputed)).to_pylist()
        quotes = [
            (identity, f"`{answer}` at {where}")
            for identity, answer, where in zip(
                named, records["completion"].to_pylist(), locations(records), strict=True
            )
        ]
        details: dict[str, list[str]] = {}
        for identity, text in quotes:
            details.setdefault(identity, []).append(text)
        return GlobalResult(
            {
                row: Rejection("conflicting labels", "; ".join(details[identity]))
                for row, (identity, _) in zip(disputed.tolist(), quotes, strict=True)
            }
        )


class Semantic(GlobalStep):
    """Keeps the first record of each answer in every cluster of inputs with the same meaning (SemDeDup; Abbas et al.
    2023, arXiv:2303.09540).

    Clusters are the connected components of pairs whose embeddings have at least the threshold's cosine. Up to
    100,000 distinct embeddings, all pairs are compared. Beyond, each is compared with those that share one of
    its two nearest cells of spherical k-means, where SemDeDup compares within one cell: a pair is missed if the two
    nearest cells of one record are not among those of the other.

    An embedding takes 2 bytes a dimension, 768 bytes with MiniLM.
    """

    name: ClassVar[str] = "semantic"

    model: str = Field(_MINILM, description="Sentence embedder: `minilm`, a folder or a Hub id.")
    threshold: float = Field(0.95, gt=0, le=1, description="Cosine similarity from which two records are duplicates.")
    field: TextField = Field("input", description="Text to embed: the input, the answer, or all.")

    def located(self, root: Path) -> Self:
        folder = locate_path(root, self.model)
        # A Hub id looks like a relative path: only a folder that is there is taken for one.
        is_folder = self.model != _MINILM and folder.is_dir()
        return self.model_copy(update={"model": str(folder)}) if is_folder else self

    def check(self) -> None:
        from posttrain.models.embedder_source import find_embedder

        find_embedder(self.model)

    def key(self) -> dict[str, Any]:
        return {**super().key(), "model": _embedder_key(self.model)}

    def sketch_key(self) -> dict[str, Any]:
        # Without the threshold: embeddings are the costly part, and another threshold must not repeat them.
        return {"step": self.name, "version": self.version, "model": _embedder_key(self.model), "field": self.field}

    def sketch(self, table: pa.Table) -> pa.Table:
        # float16 halves the memory of all rows, and moves a cosine by less than thresholds are set by.
        vectors = embed_texts(self.model, joined_texts(table, self.field)).astype(np.float16)
        values = pa.array(vectors.reshape(-1), pa.float16())
        lists = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
        return table.select(["id"]).append_column("embedding", lists)

    def decide(self, corpus: Corpus) -> GlobalResult:
        rows = np.flatnonzero(corpus.alive)
        sketches = corpus.sketches()
        vectors = _vectors(sketches["embedding"], corpus.alive)
        cluster = cosine_clusters(vectors, self.threshold)
        sizes = np.bincount(cluster, minlength=len(rows))
        # Answers are read only of rows that are not alone in their cluster.
        many = np.flatnonzero(sizes[cluster] > 1)
        ids = sketches["id"].take(pa.array(rows)).to_pylist()
        duplicates, first_rows = _semantic_repeats(corpus, rows, many, cluster)
        first_records = corpus.columns(["source", "line"]).take(pa.array(rows[np.unique(first_rows)]))
        where = dict(zip(np.unique(first_rows).tolist(), locations(first_records), strict=True))
        rejections = {}
        scores = cosines(vectors, duplicates, first_rows).tolist()
        for row, first, cosine in zip(duplicates.tolist(), first_rows.tolist(), scores, strict=True):
            detail = f"cosine {cosine:.3f} to {where[first]}"
            if cosine < self.threshold:
                detail += "; linked through other records"
            rejections[int(rows[row])] = Rejection(
                "semantic duplicate", detail, cosine, cluster=ids[int(cluster[row])], kept=ids[first]
            )
        return GlobalResult(rejections)


def _vectors(column: pa.ChunkedArray, alive: npt.NDArray[np.bool_]) -> npt.NDArray[np.float16]:
    """Returns the embeddings of the rows that are alive, and hold no others in memory."""
    width = column.type.list_size
    chunks = [np.empty((0, width), dtype=np.float16)]
    first = 0
    for chunk in column.chunks:
        chunks.append(chunk.flatten().to_numpy().reshape(len(chunk), width)[alive[first : first + len(chunk)]])
        first += len(chunk)
    return np.concatenate(chunks)


def _semantic_repeats(
    corpus: Corpus, rows: npt.NDArray[np.int64], many: npt.NDArray[np.int64], cluster: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns those of ``many`` that repeat cluster and answer of an earlier embedding, and the first of each."""
    first: dict[tuple[int, str | None, str | None], int] = {}
    duplicates, first_rows = [], []
    records = corpus.take(rows[many]).select(["completion", "rejected"])
    answers = zip(records["completion"].to_pylist(), records["rejected"].to_pylist(), strict=True)
    for row, (better, worse) in zip(many.tolist(), answers, strict=True):
        first_row = first.setdefault((int(cluster[row]), better, worse), row)
        if first_row != row:
            duplicates.append(row)
            first_rows.append(first_row)
    return np.array(duplicates, dtype=np.int64), np.array(first_rows, dtype=np.int64)


@lru_cache(maxsize=8)
def _embedder_key(model: str) -> str:
    from posttrain.models.embedder_source import embedder_key

    return embedder_key(model)
