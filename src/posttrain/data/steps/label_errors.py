"""Finds records whose label is likely wrong."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field

from posttrain.data.arrays import Indices
from posttrain.data.labels.label_noise import audit_labels
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.record import input_texts
from posttrain.data.steps.resources import embed_texts
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep
from posttrain.store.errors import UserError

_COLUMNS = 1 << 18  # columns of hashed n-grams

_WIDTH = 256  # dimensions after the analysis

_FOLDS = 5  # the labels of each are predicted by a classifier of the others

_ROUNDS = 2  # of predictions, each with less weight on likely errors


class LabelErrors(GlobalStep):
    """Reports, or rejects, records of a closed label set whose label contradicts those of similar records.

    Confident learning (Northcutt et al. 2021, arXiv:1911.00068): classifiers predict the label of every record that
    they have not learned from. A model of label noise is fitted to predictions and labels
    (`posttrain.data.labels.label_noise`), and a label is an error if it is more likely wrong than right.
    Labels with fewer different inputs than folds are not judged, neither are records without an answer and preference
    pairs.

    Facts: ``label_quality``, the probability that the label is right, and of errors ``suggested_label``.
    """

    name: ClassVar[str] = "label_errors"
    training_only: ClassVar[bool] = True
    needs_answers: ClassVar[bool] = True

    action: Literal["report", "reject"] = Field("report", description="Report label errors, or reject the records.")
    features: Literal["embedding", "ngrams"] = Field(
        "embedding", description="Features of the inputs: a sentence embedding, or n-grams, which need no model."
    )
    embedder: str = Field("minilm", description="Model for `features: embedding`: minilm, a folder or a Hub id.")

    def check(self) -> None:
        if self.features == "embedding":
            from posttrain.models.embedder_source import find_embedder

            find_embedder(self.embedder)

    def key(self) -> dict[str, Any]:
        if self.features == "ngrams":
            return {**super().key(), "embedder": None}
        from posttrain.models.embedder_source import embedder_key

        return {**super().key(), "embedder": embedder_key(self.embedder)}

    def sketch(self, table: pa.Table) -> pa.Table:
        """Sketches ``input_id`` and ``label``, null for records that are not judged."""
        # The better answer of a preference pair is a text of its own, not a label.
        pairs = pa.compute.is_valid(table["rejected"])
        label = pa.compute.if_else(pairs, pa.scalar(None, pa.string()), table["completion"])
        return pa.table({"input_id": table["input_id"], "label": label})

    def sketch_key(self) -> dict[str, Any]:
        # No setting changes the sketch, so a new setting does not repeat it.
        return {"step": self.name, "version": self.version}

    def decide(self, corpus: Corpus) -> GlobalResult:
        sketches = corpus.sketches()
        rows, labels, names = self._judged(sketches, corpus.alive)
        quality = np.full(corpus.rows, np.nan)
        suggested: list[str | None] = [None] * corpus.rows
        rejections = {}
        if len(names) > 1:
            inputs = sketches["input_id"].take(pa.array(rows)).to_pylist()
            channel = audit_labels(self._features(corpus, rows), labels, inputs, _FOLDS, _ROUNDS)
            quality[rows] = channel.correct
            # Another class may be likelier than the label, and the label still more likely right than wrong.
            for at in np.flatnonzero((channel.likely != labels) & (channel.correct < 0.5)).tolist():
                row, other = int(rows[at]), int(channel.likely[at])
                suggested[row] = names[other]
                detail = f"likely `{names[other]}`, labelled `{names[labels[at]]}`"
                rejections[row] = Rejection("label error", detail, float(quality[row]))
        facts = {
            "label_quality": pa.array(quality, mask=np.isnan(quality)),
            "suggested_label": pa.array(suggested, pa.string()),
        }
        return GlobalResult(rejections if self.action == "reject" else {}, facts=facts)

    def _judged(self, sketches: pa.Table, alive: npt.NDArray[np.bool_]) -> tuple[Indices, Indices, list[str]]:
        """Returns the rows to judge, the index of each row's label, and the labels by index.

        Raises:
            UserError: there are answers, and none has enough different inputs to be a label.
        """
        rows = np.flatnonzero(alive & np.asarray(pa.compute.is_valid(sketches["label"])))
        judged = sketches.take(pa.array(rows)).combine_chunks()
        encoded = judged["label"].combine_chunks().dictionary_encode()
        answers, inputs = (
            np.asarray(codes.to_numpy(), dtype=np.int64)
            for codes in (encoded.indices, judged["input_id"].combine_chunks().dictionary_encode().indices)
        )
        # Different inputs, not records: copies of one input would lie in one fold, and the others lack its label.
        different = np.unique(np.stack([answers, inputs]), axis=1)[0]
        often = np.bincount(different, minlength=len(encoded.dictionary)) >= _FOLDS
        if len(rows) and not often.any():
            message = f"no answer has {_FOLDS} different inputs, so answers are not labels"
            raise UserError(message, where="label_errors", fix="leave the step out")
        label_codes, labels = np.unique(answers[often[answers]], return_inverse=True)
        return rows[often[answers]], labels, encoded.dictionary.take(pa.array(label_codes)).to_pylist()

    def _features(self, corpus: Corpus, rows: Indices) -> npt.NDArray[Any]:
        if self.features == "embedding":
            parts = [vectors for _, vectors in corpus.map_tables(partial(_embed_table, name=self.embedder))]
            return np.concatenate(parts)[rows]
        from scipy.sparse import vstack

        # Counted table by table on the workers: only the analysis of all rows together needs one process.
        return lsa_features(vstack([counted for _, counted in corpus.map_tables(_count_table)]).tocsr()[rows])


def _embed_table(table: pa.Table, name: str) -> npt.NDArray[np.float32]:
    return embed_texts(name, input_texts(table))


def _count_table(table: pa.Table) -> Any:
    return ngram_counts(input_texts(table))


def ngram_counts(texts: Sequence[str]) -> Any:
    """Counts character n-grams of 2 to 5 within words, each in the column of its hash: sparse float64 [N, 2^18]."""
    from sklearn.feature_extraction.text import HashingVectorizer

    # Hashed: workers need no vocabulary in common. Signs that alternate would leave negative counts, which have no
    # logarithm in TF-IDF.
    vectoriser = HashingVectorizer(
        analyzer="char_wb", ngram_range=(2, 5), n_features=_COLUMNS, alternate_sign=False, norm=None
    )
    return vectoriser.transform(texts).tocsr()


def lsa_features(rows: Any, seed: int = 0) -> npt.NDArray[np.float64]:
    """Reduces `ngram_counts` by latent semantic analysis (Deerwester et al. 1990): unit rows, float64 [N, <= 256].

    TF-IDF with the logarithm of counts, then the leading singular vectors by a seeded randomised method.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    # Hashing leaves most of the 2^18 columns empty, and the decomposition would still pay for their width.
    columns = np.flatnonzero(np.bincount(rows.indices, minlength=rows.shape[1]))
    tfidf = TfidfTransformer(sublinear_tf=True).fit_transform(rows[:, columns])
    with threadpool_limits(1):  # more threads would add up in another order, and round differently
        width = max(1, min(_WIDTH, tfidf.shape[0] - 1))
        return np.asarray(normalize(TruncatedSVD(width, random_state=seed).fit_transform(tfidf)), dtype=np.float64)
