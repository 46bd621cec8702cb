"""The records of a suite as the scorers take them."""

import hashlib
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from posttrain.models.request import request
from posttrain.models.task import Turns
from posttrain.store.errors import UserError


@dataclass(frozen=True)
class Examples:
    """N records.

    Args:
        ids: record ids.
        prompts: turns before the answer; empty for a plain text.
        expected: the right answer; None where the record has none.
        meta: the record's other columns, as JSON text.
        places: ``file:line`` of each record, for messages.
    """

    ids: list[str]
    prompts: list[Turns]
    expected: list[str | None]
    meta: list[str | None]
    places: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def check_prompts(self, where: str) -> None:
        """Raise a UserError that names the first record without a prompt."""
        for prompt, place in zip(self.prompts, self.places, strict=True):
            if not prompt:
                raise UserError(f"{place} has no prompt to answer", where=where)

    def answers(self, where: str) -> list[str]:
        """The expected answers.

        Raises:
            UserError: naming the first record without one.
        """
        answers: list[str] = []
        for answer, place in zip(self.expected, self.places, strict=True):
            if answer is None:
                raise UserError(f"{place} has no answer to compare with", where=where, fix="add the right answer")
            answers.append(answer)
        return answers


def examples(records: pa.Table, where: str) -> Examples:
    """Read the records of a suite.

    A plain text is scored as a whole: it has no prompt and is itself the expected answer.

    Args:
        records: table by the record schema; ``source``, ``line`` and ``meta`` may be missing.
        where: the suite's config key, named in errors.

    Raises:
        UserError: if there are no records.
    """
    if records.num_rows == 0:
        raise UserError("the suite has no records", where=where, fix="check its `data`")
    names = set(records.column_names)
    found = Examples([], [], [], [], [])
    for row in records.select([name for name in _COLUMNS if name in names]).to_pylist():
        found.ids.append(row["id"])
        found.prompts.append([] if _is_text(row) else request({"text": None, **row}))
        found.expected.append(row.get("text") if _is_text(row) else row["completion"])
        found.meta.append(row.get("meta"))
        found.places.append(_place(row))
    return found


def sample_records(records: pa.Table, n: int | None) -> pa.Table:
    """A fixed sample: the ``n`` records with the smallest hash of their id, in input order.

    The same records are drawn in every round, whatever the order or the seed, so that rounds can be compared.
    """
    if n is None or records.num_rows <= n:
        return records
    digests = [hashlib.sha256(id.encode()).digest() for id in records["id"].to_pylist()]
    drawn = sorted(sorted(range(len(digests)), key=lambda row: (digests[row], row))[:n])
    return records.take(pa.array(drawn))


_COLUMNS = ("id", "prompt", "completion", "text", "source", "line", "meta")


def _is_text(row: dict[str, Any]) -> bool:
    return not row.get("prompt") and row["completion"] is None and row.get("text") is not None


def _place(row: dict[str, Any]) -> str:
    if row.get("source") and row.get("line"):
        return f"{row['source']}:{row['line']}"
    return f"record {row['id']}"
