"""Records whose inputs say nearly the same."""

import hashlib
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.duplicates import clusters as search
from posttrain.data.duplicates.minhash import PERMUTATIONS, sketch_of_shard
from posttrain.data.records.normalise import texts_of
from posttrain.data.steps.step import Corpus, Decision, GlobalStep, Likeness, Rejection, places

Indices = npt.NDArray[np.int64]


class Minhash(GlobalStep):
    """In a cluster of like inputs the first record of each answer stays.

    Like inputs with different answers are no duplicates; they are where one class ends and the next begins. Inputs
    are alike when the sets of their n-grams have at least the threshold's Jaccard similarity, which is verified
    exactly; a cluster is what hangs together by such pairs. Candidates come from MinHash bands; one in a thousand
    pairs just at the threshold is missed, and fewer above it (`posttrain.data.duplicates.minhash`).
    """

    name: ClassVar[str] = "minhash"

    threshold: float = Field(0.8, gt=0, le=1, description="Jaccard similarity from which two inputs are alike")
    ngram: int = Field(5, ge=1, description="characters in one n-gram")
    seed: int = Field(0, ge=0, description="draws the permutations of the sketches")
    permutations: int = Field(
        PERMUTATIONS, ge=1, description="most minima a sketch may take; more of them propose fewer pairs in vain"
    )

    def sketch(self, table: pa.Table) -> pa.Table:
        """The inputs by `posttrain.data.duplicates.minhash.sketch`, and a 64-bit hash of the answer, ``answer``."""
        sketches = sketch_of_shard(
            tuple(texts_of(table, "input")), self.threshold, self.ngram, self.seed, self.permutations
        )
        answers = zip(table["completion"].to_pylist(), table["rejected"].to_pylist(), strict=True)
        digests = b"".join(hashlib.blake2b(repr(answer).encode(), digest_size=8).digest() for answer in answers)
        return sketches.append_column("answer", pa.array(np.frombuffer(digests, dtype=np.uint64)))

    def decide(self, corpus: Corpus) -> Decision:
        known = corpus.known()
        before = known.table if known and known.unchanged else None
        cluster = clusters(
            corpus, self.threshold, self.ngram, None if before is None else np.asarray(before["cluster"].to_numpy())
        )
        sketches = corpus.sketches().select(["grams", "answer"])
        grams, answers = (np.asarray(column.to_numpy(), dtype=np.uint64) for column in sketches.columns)
        gone, kept = _repeated(np.flatnonzero(corpus.alive), cluster, answers)
        score = np.where(grams[gone] == grams[kept], 1.0, np.nan)
        if before is not None:
            again = np.flatnonzero(gone < before.num_rows)
            same = again[before["kept"].to_numpy()[gone[again]] == kept[again]]
            score[same] = before["score"].to_numpy()[gone[same]]
        asked = np.flatnonzero(np.isnan(score))
        score[asked] = search.similarities(_texts(corpus), gone[asked], kept[asked], self.ngram, corpus.map)
        named = np.unique(np.concatenate([kept, cluster[gone]]))
        told = corpus.columns(["id", "source", "line"]).take(pa.array(named))
        ids = dict(zip(named.tolist(), told["id"].to_pylist(), strict=True))
        where = dict(zip(named.tolist(), places(told), strict=True))
        rejections = {}
        for row, stays, similarity in zip(gone.tolist(), kept.tolist(), score.tolist(), strict=True):
            detail = f"similarity {similarity:.2f} to {where[stays]}"
            if similarity < self.threshold:
                detail += ", with which it hangs together by others"
            rejections[row] = Rejection(
                "near duplicate", detail, similarity, cluster=ids[int(cluster[row])], kept=ids[stays]
            )
        likeness = Likeness(self.threshold, self.ngram, self.seed, self.permutations)
        return Decision(rejections, state=_state(cluster, gone, kept, score), clustered=likeness)


def clusters(corpus: Corpus, threshold: float, ngram: int, known: Indices | None = None) -> Indices:
    """Cluster of every row of a corpus, int64 [N], named by the smallest row in it; dead rows stand alone.

    Args:
        corpus: its sketches hold the columns of `posttrain.data.duplicates.minhash.sketch` for this threshold and
            ngram.
        known: int64 [K], the clusters of the first K rows, which were then alive just as they are now; only pairs
            with a later row are looked for, and the result is that of a search from scratch.
    """
    return search.clusters(corpus.sketches(), _texts(corpus), threshold, ngram, corpus.alive, known, corpus.map)


def _state(cluster: Indices, gone: Indices, kept: Indices, score: npt.NDArray[np.float64]) -> pa.Table:
    """Of every row its cluster, which row is kept in its place, -1 for none, and how like the two are."""
    instead, likeness = np.full(len(cluster), -1, dtype=np.int64), np.zeros(len(cluster))
    instead[gone], likeness[gone] = kept, score
    return pa.table({"cluster": cluster, "kept": instead, "score": likeness})


def _repeated(rows: Indices, cluster: Indices, answers: npt.NDArray[np.uint64]) -> tuple[Indices, Indices]:
    """The rows that repeat the cluster and the answer of an earlier one, and for each the first of those."""
    order = rows[np.lexsort((answers[rows], cluster[rows]))]  # stable: rows of one kind stay in order
    new = np.ones(len(order), dtype=bool)
    new[1:] = (cluster[order][1:] != cluster[order][:-1]) | (answers[order][1:] != answers[order][:-1])
    first = order[new][np.cumsum(new) - 1]
    return order[~new], first[~new]


def _texts(corpus: Corpus) -> search.Fetch:
    return lambda rows: texts_of(corpus.take(rows), "input")
