"""Rejects training records that overlap with evaluation records."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.arrays import Indices
from posttrain.data.contamination.evaluation_index import (
    EvaluationIndex,
    Findings,
    Prefilter,
    contaminated_counts,
    index_evaluation,
    rows_sharing_runs,
)
from posttrain.data.contamination.sketches import contamination_sketch
from posttrain.data.contamination.word_index import newly_common
from posttrain.data.duplicates.all_pairs import Map
from posttrain.data.records.outcome import Rejection
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep, ShardView

_INCREMENTAL_LIMIT = 4096  # new evaluation records, above which a search from scratch is as quick
_PARALLEL_INDEX_SIZE = 4096  # evaluation records, above which two processes index them sooner


_EVALUATION_KEYS = b"evaluation"


_KEY_BYTES = 16


_REJECTION = [
    ("reason", pa.string()),
    ("detail", pa.string()),
    ("score", pa.float64()),
    ("kept", pa.string()),
]


class Decontaminate(GlobalStep):
    """Rejects training records that overlap with an evaluation record, of the test set or of any suite.

    The reasons, the first that holds: the record **equals a test input**; it has the **group of a test record**; its
    input is **like a test input**, by the Jaccard similarity of their character 5-grams; it **shares a 13-gram with a
    test record**, a run of words without case and punctuation somewhere in prompt or answers of both (Brown et al.
    2020, arXiv:2005.14165, appendix C); it holds most of a longer test input close together, which also is **like a
    test input**. Texts of fewer than 13 words are compared whole.

    All of it is exact, except that inputs are compared in stretches of at least 4,096 characters.
    """

    name: ClassVar[str] = "decontaminate"
    training_only: ClassVar[bool] = True
    removes_leaks: ClassVar[bool] = True
    every_round: ClassVar[bool] = True

    ngram: int | None = Field(13, ge=1, description="Words in a run that must not be shared; null: any may.")
    share: float = Field(
        0.0, ge=0, le=1, description="Share of either record's runs of words that must be shared; 0: one run is enough."
    )
    threshold: float | None = Field(
        0.8, gt=0, le=1, description="Jaccard similarity from which inputs are similar; null: only equal ones count."
    )
    contained: float | None = Field(
        0.8, gt=0, le=1, description="Share of a test input that a record must not hold close together; null: no limit."
    )

    def sketch_key(self) -> dict[str, Any]:
        # Not the thresholds: sketches serve all of them, so that changing one reads no file again.
        return {"step": self.name, "version": self.version, "ngram": self.ngram, "alike": self.threshold is not None}

    def sketch(self, table: pa.Table) -> pa.Table:
        return contamination_sketch(table, self.ngram, self.threshold is not None)

    def against(self, evaluation: pa.Table, over: Map = map) -> EvaluationIndex:
        """Indexes the records of a RECORD table with these settings; ``over`` as in `index_evaluation`."""
        return index_evaluation(evaluation, **self.model_dump(), over=over)

    def decide(self, corpus: Corpus) -> GlobalResult:
        evaluation = corpus.evaluation
        if not evaluation.num_rows:
            # The state still records that nothing was searched for, so that a later version searches all rows.
            return GlobalResult(state=encode_state(corpus.alive, Findings({}, []), evaluation))
        findings = self._search(corpus, evaluation)
        return GlobalResult(
            findings.rejections,
            state=encode_state(corpus.alive, findings, evaluation),
            contaminated=contaminated_counts(evaluation, findings.pairs),
        )

    def _search(self, corpus: Corpus, evaluation: pa.Table) -> Findings:
        """Searches the rows that are alive; rows of an earlier version only for new evaluation records."""
        index = self.against(evaluation, corpus.map if evaluation.num_rows > _PARALLEL_INDEX_SIZE else map)
        state = corpus.previous_state
        before = decode_state(state.table, evaluation) if state else None
        to_search, reusable, prefilter = corpus.alive, np.zeros(corpus.rows, dtype=bool), None
        if before is not None:
            fresh, outdated = self._changed(before, evaluation)
            # Few new evaluation records: rows searched before are searched again only where the prefilter finds one
            # likely.
            if fresh.sum() <= _INCREMENTAL_LIMIT:
                reusable[: len(before.seen)] = before.seen
                # The runs of words that found these rows may have become the wording of the task since.
                reusable[outdated] = False
                reusable &= corpus.alive
                to_search, prefilter = corpus.alive & ~reusable, Prefilter.from_index(evaluation, index, fresh)
        rejections: dict[int, Rejection] = {}
        pairs: list[tuple[int, int]] = []
        first = 0
        items = list(_items(corpus.shard_views(), to_search, reusable))
        for item, (rows, findings) in zip(
            items, corpus.map(partial(_search, index=index, prefilter=prefilter), items), strict=True
        ):
            rejections.update((first + row, rejection) for row, rejection in findings.rejections.items())
            pairs += ((first + row, other) for row, other in findings.pairs)
            # What was searched again replaces the earlier findings of these rows, and is not added to them.
            reusable[first + rows] = False
            first += item.part.rows
        if before is not None:
            rejections.update(
                (row, rejection) for row, rejection in before.findings.rejections.items() if reusable[row]
            )
            pairs += (pair for pair in before.findings.pairs if reusable[pair[0]])
        return Findings(rejections, pairs)

    def _changed(self, before: "PreviousFindings", evaluation: pa.Table) -> tuple[npt.NDArray[np.bool_], list[int]]:
        """Returns the evaluation records to search for in all rows, and the rows whose findings may no longer hold."""
        if self.ngram is None:
            return before.fresh, []
        changed = np.zeros(evaluation.num_rows, dtype=bool)
        changed[newly_common(evaluation, ~before.fresh, self.ngram)] = True
        # Without its common runs a record has fewer, so that the share of them that a row holds is greater than it was.
        fresh = before.fresh | changed if self.share else before.fresh
        return fresh, [row for row, other in before.findings.pairs if changed[other]]


class _SearchItem(NamedTuple):
    """A work item for one process.

    Attributes:
        to_search: bool, the rows to search.
        reusable: bool, the rows to search only if the prefilter finds new evaluation records likely in them.
    """

    part: ShardView
    to_search: npt.NDArray[np.bool_]
    reusable: npt.NDArray[np.bool_]


def _items(
    parts: Iterable[ShardView], to_search: npt.NDArray[np.bool_], reusable: npt.NDArray[np.bool_]
) -> Iterator[_SearchItem]:
    first = 0
    for part in parts:
        rows = slice(first, first + part.rows)
        yield _SearchItem(part, to_search[rows], reusable[rows])
        first += part.rows


def _search(item: _SearchItem, index: EvaluationIndex, prefilter: Prefilter | None) -> tuple[Indices, Findings]:
    """Searches some rows, and returns them with the findings."""
    # Most parts of a grown version end here, before their sketches are read.
    if not (item.to_search | item.reusable).any():
        return np.empty(0, np.int64), Findings({}, [])
    sketches = item.part.sketches()
    to_search = item.to_search
    if prefilter is not None and item.reusable.any():
        to_search = to_search | item.reusable & prefilter.likely(sketches)
    rows = np.flatnonzero(to_search)
    if not len(rows):
        return rows, Findings({}, [])
    # Fingerprints rule most rows out, so that their texts are not hashed.
    shares = (
        rows_sharing_runs(sketches.select(["runs"]).take(pa.array(rows)), index.word_index.marks)
        if index.word_index
        else None
    )
    findings = index.search(item.part.take(rows), shares)
    return rows, Findings(
        {int(rows[row]): rejection for row, rejection in findings.rejections.items()},
        [(int(rows[row]), other) for row, other in findings.pairs],
    )


@dataclass(frozen=True)
class PreviousFindings:
    """Holds the findings of an earlier search, by the row numbers of today's evaluation records.

    Attributes:
        seen: bool [K], the training records that it looked at.
        fresh: bool [T], the evaluation records that it did not look for.
        findings: Findings of the rows seen.
    """

    seen: npt.NDArray[np.bool_]
    fresh: npt.NDArray[np.bool_]
    findings: Findings


def encode_state(seen: npt.NDArray[np.bool_], findings: Findings, evaluation: pa.Table) -> pa.Table:
    """Stores findings in one row a training record, and the evaluation records' keys in the metadata.

    Args:
        seen: bool [N], the records that were looked at.
        findings: All of them.
        evaluation: RECORD table of what was looked for.
    """
    rejections = dict(sorted(findings.rejections.items()))
    others: dict[int, set[int]] = {}
    for row, other in findings.pairs:
        others.setdefault(row, set()).add(other)
    columns = {
        name: _scatter(
            rejections, pa.array([getattr(rejection, name) for rejection in rejections.values()], kind), len(seen)
        )
        for name, kind in _REJECTION
    }
    lists = pa.array([sorted(indices) for indices in others.values()], pa.list_(pa.int32()))
    columns["others"] = _scatter(others, lists, len(seen))
    return pa.table({"seen": pa.array(seen), **columns}).replace_schema_metadata(
        {_EVALUATION_KEYS: b"".join(_record_keys(evaluation)).hex()}
    )


def _scatter(rows: Iterable[int], values: pa.Array, count: int) -> pa.Array:
    """Spreads values over ``count`` rows: the given ones at their rows, null elsewhere."""
    position = np.full(count, -1, dtype=np.int64)
    position[list(rows)] = np.arange(len(values))
    return values.take(pa.array(position, mask=position < 0))


def decode_state(state: pa.Table, evaluation: pa.Table) -> PreviousFindings | None:
    """Reads what `encode_state` stored; None unless all evaluation records of then are among today's."""
    looked_for = bytes.fromhex((state.schema.metadata or {}).get(_EVALUATION_KEYS, b"").decode())
    keys_before = [looked_for[start : start + _KEY_BYTES] for start in range(0, len(looked_for), _KEY_BYTES)]
    # Stored row numbers are those of the earlier evaluation set; keys translate them to today's.
    row_of_key = {key: row for row, key in enumerate(_record_keys(evaluation))}
    # Keys must be unique and still there, or stored row numbers could not be translated.
    if (
        len(row_of_key) < evaluation.num_rows
        or len(set(keys_before)) < len(keys_before)
        or not row_of_key.keys() >= set(keys_before)
    ):
        return None
    fresh = np.ones(evaluation.num_rows, dtype=bool)
    positions = [row_of_key[key] for key in keys_before]
    fresh[positions] = False
    rows = np.flatnonzero(state["reason"].is_valid().to_numpy())
    reasons = state.select([name for name, _ in _REJECTION]).take(pa.array(rows)).to_pylist()
    rejections = {row: Rejection(**values) for row, values in zip(rows.tolist(), reasons, strict=True)}
    paired = np.flatnonzero(state["others"].is_valid().to_numpy())
    lists = state["others"].take(pa.array(paired)).to_pylist()
    pairs = [(row, positions[other]) for row, others in zip(paired.tolist(), lists, strict=True) for other in others]
    return PreviousFindings(np.array(state["seen"].to_numpy(), dtype=bool), fresh, Findings(rejections, pairs))


def _record_keys(evaluation: pa.Table) -> list[bytes]:
    """Hashes to 16 bytes all of a record that a finding can mention."""
    # Findings quote file and line, so a record that has moved within its file counts as new.
    columns = (evaluation[name].to_pylist() for name in ("id", "group", "source", "line"))
    return [
        hashlib.blake2b(repr(values).encode(), digest_size=_KEY_BYTES).digest() for values in zip(*columns, strict=True)
    ]
