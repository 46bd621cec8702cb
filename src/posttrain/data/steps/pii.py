"""Masks personal data, or rejects the records that hold it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from pydantic import Field, field_validator

from posttrain.data.pii.detect import HINT, KINDS, Kind, detect, mask
from posttrain.data.records.outcome import Outcome, Rejection, reject_rows, rewrite
from posttrain.data.records.record import TextField
from posttrain.data.steps.step import RowStep


class PersonalData(RowStep):
    """Masks e-mail addresses, telephone numbers and other personal data, or rejects the records that hold them.

    Facts: ``pii``, the number of matches in each record; ``pii_KIND``, those of a kind, null where there are none.
    """

    name: ClassVar[str] = "pii"
    evaluation: ClassVar[bool] = True

    action: Literal["mask", "reject", "report"] = Field(
        "mask",
        description="Replace personal data by a placeholder such as <EMAIL>, reject the record, or only report it.",
    )
    field: TextField = Field("all", description="Text of a record to search: the input, the answer, or all.")
    kinds: list[Kind] = Field(
        [kind for kind in KINDS if kind != "ssn"],
        min_length=1,
        description="Kinds to search for: email, phone, ip, card, iban, resident_id (of China) and ssn (of the USA).",
    )

    @field_validator("kinds")
    @classmethod
    def _each_once(cls, kinds: list[Kind]) -> list[Kind]:
        # In one order: the same kinds listed otherwise are the same step, with the same key.
        return [kind for kind in KINDS if kind in kinds]

    def apply(self, table: pa.Table) -> Outcome:
        counts: dict[int, Counter[Kind]] = {}
        values: dict[int, dict[str, Any]] = {}
        suspects = self._suspects(table)
        read = table.select([*self._columns(), "prompt"]).take(pa.array(suspects))
        for row, record in zip(suspects.tolist(), read.to_pylist(), strict=True):
            columns, tally = self._masked(record)
            if tally:
                counts[row], values[row] = tally, columns
        facts = self._facts(table.num_rows, counts)
        details = {
            row: ", ".join(f"{tally[kind]} {kind}" for kind in KINDS if tally[kind]) for row, tally in counts.items()
        }
        if self.action == "reject":
            rejections = {
                row: Rejection("personal data", details[row], float(tally.total())) for row, tally in counts.items()
            }
            return reject_rows(table, self.name, rejections, facts)
        if self.action == "report" or not counts:
            return reject_rows(table, self.name, {}, facts)
        table, changed = rewrite(table, values, self.name, details)
        return reject_rows(table, self.name, {}, facts)._replace(changed=changed)

    def _suspects(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """Returns the rows that may hold personal data."""
        # One expression over Arrow's buffers: most records need none of the slower patterns.
        suspect = np.zeros(table.num_rows, dtype=bool)
        for name in self._columns():
            suspect |= _may_hold_pii(table[name])
        if self.field != "answer":
            for start, chunk in _chunks(table["prompt"]):
                turns = pa.compute.struct_field(pa.compute.list_flatten(chunk), "content")
                rows = pa.compute.list_parent_indices(chunk).to_numpy(zero_copy_only=False)
                suspect[start + rows[_may_hold_pii(turns)]] = True
        return np.flatnonzero(suspect)

    def _columns(self) -> list[str]:
        inputs = ["text"] if self.field != "answer" else []
        return inputs + (["completion", "rejected"] if self.field != "input" else [])

    def _masked(self, record: dict[str, Any]) -> tuple[dict[str, Any], Counter[Kind]]:
        """Returns the columns that change, and the number of matches by kind."""
        tally: Counter[Kind] = Counter()
        changed: dict[str, Any] = {}
        for name in self._columns():
            text = record[name]
            if text is not None and (clean := self._clean(text, tally)) != text:
                changed[name] = clean
        if self.field != "answer" and record["prompt"] is not None:
            turns = [{**turn, "content": self._clean(turn["content"], tally)} for turn in record["prompt"]]
            if turns != record["prompt"]:
                changed["prompt"] = turns
        return changed, tally

    def _clean(self, text: str, tally: Counter[Kind]) -> str:
        if self.action == "mask":
            text, counts = mask(text, self.kinds)
            tally.update(counts)
        else:
            tally.update(span.kind for span in detect(text, self.kinds))
        return text

    def _facts(self, rows: int, counts: dict[int, Counter[Kind]]) -> dict[str, pa.Array]:
        total = np.zeros(rows)
        by_kind = {kind: np.full(rows, np.nan) for kind in self.kinds}
        for row, tally in counts.items():
            total[row] = tally.total()
            for kind, number in tally.items():
                by_kind[kind][row] = number
        facts = {"pii": pa.array(total, pa.float64())}
        for kind, numbers in by_kind.items():
            facts[f"pii_{kind}"] = pa.array(numbers, pa.float64(), from_pandas=True)  # NaN becomes null
        return facts


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, pa.Array]]:
    """Yields each chunk with its first row."""
    start = 0
    for chunk in column.chunks:
        yield start, chunk
        start += len(chunk)


def _may_hold_pii(texts: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Returns bool [N], the texts that match `HINT`, as every text with personal data does."""
    hit = pa.compute.match_substring_regex(texts, HINT)
    hit = hit.combine_chunks() if isinstance(hit, pa.ChunkedArray) else hit
    return np.asarray(pa.compute.fill_null(hit, False).to_numpy(zero_copy_only=False), dtype=bool)
