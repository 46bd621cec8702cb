"""Cuts out long runs of words that occur earlier in the dataset."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from posttrain.data.duplicates.repeated_substrings import (
    RepeatedSpan,
    WordWindows,
    comparable_words,
    concatenate_windows,
    find_repeats,
    fingerprints,
    is_member,
    repeated_values,
    verify_span,
    windows,
)
from posttrain.data.records.outcome import Rejection
from posttrain.data.records.record import TextField, locations
from posttrain.data.steps.step import Corpus, GlobalResult, GlobalStep
from posttrain.store.errors import shorten

_ROWS_A_BLOCK = 1024  # rows whose texts are in memory at a time
_SAMPLE_WORDS, _SAMPLE_LENGTH = 6, 80
_WORD = re.compile(r"\S+")


class Substring(GlobalStep):
    """Cuts out runs of 50 words or more that occur earlier, in another record or in the same text.

    The exact substring deduplication of Lee et al. 2022 (arXiv:2107.06499), with words (split at whitespace, compared
    without case) in place of its 50 tokens. The first of equal runs in reading order stays. Each turn, answer and
    plain text is one text, and runs end with it. System turns and the worse answers of preference pairs are skipped:
    the first are meant to be equal, the second to resemble the better answers.

    It takes 8 bytes of memory for about every 13 words, and 24 bytes for every word that occurs twice. The search is
    exact: it misses no run, and cuts nothing that is not equal word by word.

    Facts: ``repeated_share``, the share of a record's words that occur earlier, and ``repeated_at``, which and where.
    """

    name: ClassVar[str] = "substring"

    length: int = Field(50, ge=10, description="Fewest words of a run that counts as repeated.")
    field: TextField = Field("all", description="Text of a record to read: the input, the answer, or all.")
    action: Literal["cut", "reject"] = Field(
        "cut", description="Cut the repeated runs out, or reject records that are mostly repeated."
    )
    share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="For `action: reject`: a record is rejected if a larger share of its words is repeated.",
    )

    def sketch_key(self) -> dict[str, Any]:
        return {"step": self.name, "version": self.version, "length": self.length, "field": self.field}

    def sketch(self, table: pa.Table) -> pa.Table:
        parts = _parts(table, self.field)
        prints = fingerprints(list(parts.values()), self.length)
        sizes = np.zeros(table.num_rows + 1, dtype=np.int64)
        np.add.at(sizes, _row_of(np.array(list(parts), dtype=np.int64)) + 1, prints.sizes)
        lists = pa.LargeListArray.from_arrays(pa.array(np.cumsum(sizes)), pa.array(prints.values, pa.uint64()))
        return pa.table({"fingerprints": lists})

    def decide(self, corpus: Corpus) -> GlobalResult:
        # Texts are read for the few rows with a fingerprint that occurs twice; all others cannot hold a repeated run.
        rows, shared = _suspects(corpus)
        blocks = [rows[start : start + _ROWS_A_BLOCK] for start in range(0, len(rows), _ROWS_A_BLOCK)]
        search = partial(_windows, field=self.field, length=self.length, shared=shared)
        suspects = [
            part._replace(text=_code(block[_row_of(part.text)], _part_of(part.text)))
            for block, part in zip(blocks, corpus.map(search, map(corpus.take, blocks)), strict=True)
        ]
        rejections: dict[int, Rejection] = {}
        rewritten: dict[int, dict[str, Any]] = {}
        share: list[float | None] = [None] * corpus.rows
        at: list[str | None] = [None] * corpus.rows
        for row, record, own in self._repeated(find_repeats(concatenate_windows(suspects), self.length), corpus):
            share[row], at[row] = own.share, "; ".join(own.details)
            if self.action == "reject":
                rejected = own.share > self.share
            else:
                values = _without(record, own.cuts)
                rejected = values is None
                if values is not None:
                    rewritten[row] = values
            if rejected:
                detail = f"{own.share:.0%} of its words: {'; '.join(own.details)}"
                rejections[row] = Rejection("repeated text", detail, own.share, own.first_id, own.first_id)
        facts = {"repeated_share": pa.array(share, pa.float64()), "repeated_at": pa.array(at, pa.string())}
        return GlobalResult(rejections, rewritten, facts)

    def _repeated(
        self, candidates: Sequence[RepeatedSpan], corpus: Corpus
    ) -> Iterator[tuple[int, Mapping[str, Any], "_Repeated"]]:
        """Yields every row with repeated words, its record, and its repeated parts."""
        owner = np.array([_row_of(repeat.text) for repeat in candidates], dtype=np.int64)
        blocks = np.unique(owner, return_inverse=True)[1] // _ROWS_A_BLOCK
        for block in np.split(np.arange(len(candidates)), np.flatnonzero(np.diff(blocks)) + 1) if candidates else []:
            here = [candidates[index] for index in block.tolist()]
            rows = np.unique([_row_of(code) for repeat in here for code in (repeat.text, repeat.source)])
            table = corpus.take(rows)
            texts = {
                _code(rows[_row_of(code)].item(), _part_of(code)): text
                for code, text in _parts(table, self.field).items()
            }
            words_by_text = {code: comparable_words(text) for code, text in texts.items()}
            where = dict(zip(rows.tolist(), locations(table), strict=True))
            ids = dict(zip(rows.tolist(), table["id"].to_pylist(), strict=True))
            counts: dict[int, int] = {}
            for code, own in words_by_text.items():
                counts[_row_of(code)] = counts.get(_row_of(code), 0) + len(own)
            records = dict(zip(rows.tolist(), table.to_pylist(), strict=True))
            by_row: dict[int, list[RepeatedSpan]] = {}
            for repeat in here:
                # Equal fingerprints are only candidates: nothing is cut before its words are compared.
                if own_spans := verify_span(
                    repeat, words_by_text[repeat.text], words_by_text[repeat.source], self.length
                ):
                    by_row.setdefault(_row_of(repeat.text), []).extend(own_spans)
            for row, own_spans in by_row.items():
                cuts = _joined_spans(own_spans)
                repeated_words = sum(end - begin for spans in cuts.values() for begin, end in spans)
                words = {repeat.text: texts[repeat.text].split() for repeat in own_spans}
                details = [
                    f"words {repeat.begin + 1} to {repeat.end} of {_NAMES.get(_part_of(repeat.text), 'the prompt')} "
                    f"({repeat.end - repeat.begin} words, `{_sample(words[repeat.text], repeat.begin)}`) stand at "
                    f"{where[_row_of(repeat.source)]}"
                    for repeat in own_spans
                ]
                yield (
                    row,
                    records[row],
                    _Repeated(
                        repeated_words / counts[row],
                        {_part_of(code): _spans(texts[code], spans) for code, spans in cuts.items()},
                        details,
                        ids[_row_of(own_spans[0].source)],
                    ),
                )


class _Repeated(NamedTuple):
    """The repeated parts of one record.

    Attributes:
        share: Share of its words that are repeated.
        cuts: The ranges of repeated characters, by text.
        details: One line for each repeat, as the rejection shows it.
        first_id: Id of the record that holds the first of them.
    """

    share: float
    cuts: Mapping[int, Sequence[tuple[int, int]]]
    details: Sequence[str]
    first_id: str


# The texts of a record in reading order: its turns by their number, then these.
_PARTS_PER_ROW = 1 << 20
_ANSWER, _TEXT = _PARTS_PER_ROW - 2, _PARTS_PER_ROW - 1
_NAMES = {_ANSWER: "the answer", _TEXT: "the text"}


def _code(row: Any, part: Any) -> Any:
    """Encodes row and part of a text as one integer that sorts in reading order."""
    # One integer, so that the search over all texts sorts and compares plain int64 arrays.
    return row * _PARTS_PER_ROW + part


def _row_of(code: Any) -> Any:
    return code // _PARTS_PER_ROW


def _part_of(code: Any) -> Any:
    return code % _PARTS_PER_ROW


def _parts(table: pa.Table, field: TextField) -> dict[int, str]:
    """Returns the texts of a RECORD table that are read, by their code."""
    parts: dict[int, str] = {}
    columns = (table[name].to_pylist() for name in ("prompt", "completion", "text"))
    for row, (prompt, completion, text) in enumerate(zip(*columns, strict=True)):
        if field != "answer":
            for part, turn in enumerate(prompt or []):
                if turn["role"] != "system":
                    parts[_code(row, part)] = turn["content"]
        if field != "input" and completion is not None:
            parts[_code(row, _ANSWER)] = completion
        if field != "answer" and text is not None:
            parts[_code(row, _TEXT)] = text
    return parts


def _suspects(corpus: Corpus) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Returns the rows that may hold or repeat a repeated run, and the fingerprints that occur twice."""
    lists = corpus.sketches()["fingerprints"].combine_chunks()
    sizes = np.diff(lists.offsets.to_numpy())
    values = np.asarray(lists.flatten().to_numpy(), dtype=np.uint64)
    row = np.repeat(np.arange(corpus.rows), sizes)
    living = corpus.alive[row]
    # A run that only a rejected record repeats is not repeated in the dataset.
    row, values = row[living], values[living]
    shared = repeated_values(values)
    return np.unique(row[is_member(values, shared)]), shared


def _windows(table: pa.Table, field: TextField, length: int, shared: npt.NDArray[np.uint64]) -> WordWindows:
    parts = _parts(table, field)
    result = windows(list(parts.values()), length, shared)
    return result._replace(text=np.array(list(parts), dtype=np.int64)[result.text])


def _sample(words: Sequence[str], begin: int) -> str:
    """Returns the first words of a run, for a message."""
    return shorten(" ".join([*words[begin : begin + _SAMPLE_WORDS], "…"]), _SAMPLE_LENGTH)


def _joined_spans(repeats: Sequence[RepeatedSpan]) -> dict[int, list[tuple[int, int]]]:
    """Merges the repeats of each text, which are in order, to spans of words that do not overlap."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for repeat in repeats:
        own = spans.setdefault(repeat.text, [])
        if own and repeat.begin <= own[-1][1]:
            own[-1] = (own[-1][0], max(own[-1][1], repeat.end))
        else:
            own.append((repeat.begin, repeat.end))
    return spans


def _spans(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Converts spans of words to spans of characters, with the whitespace after each word."""
    starts = [match.start() for match in _WORD.finditer(text)]
    return [(starts[begin], starts[end] if end < len(starts) else len(text)) for begin, end in spans]


def _without(record: Mapping[str, Any], cuts: Mapping[int, Sequence[tuple[int, int]]]) -> dict[str, Any] | None:
    """Returns the columns of a record without the cut characters; None if a text is left empty."""
    values: dict[str, Any] = {}
    for part, spans in cuts.items():
        turn = None if part in _NAMES else record["prompt"][part]
        name = {_ANSWER: "completion", _TEXT: "text"}.get(part, "prompt")
        old = record[name] if turn is None else turn["content"]
        edges = [0, *(edge for span in spans for edge in span), len(old)]
        new = "".join(old[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)).rstrip()
        if not new.strip():
            return None  # an empty turn or answer would be a broken record, so the whole record goes
        if turn is None:
            values[name] = new
        else:
            turns = values.get("prompt", record["prompt"])
            values["prompt"] = [{**item, "content": new} if at == part else item for at, item in enumerate(turns)]
    return values
