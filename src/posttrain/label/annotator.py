"""The one interface behind which people, files and teacher models answer."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

Read = Callable[[Path, Mapping[str, str] | None], Iterable[pa.Table]]
"""Reads a file of records with its column mapping, as ``posttrain.data.reading.tables.read`` does."""


@dataclass(frozen=True)
class Request:
    """What comes with a batch.

    Attributes:
        round: the round that asks, from 1.
        seed: fixes every choice of the annotator.
        folder: the workspace's root; what people are to fill in lies below it.
        labels: the closed label set; None for open-ended answers.
        suggestions: the model's answer to every record of the batch; None for none.
    """

    round: int
    seed: int
    folder: Path
    labels: Sequence[str] | None = None
    suggestions: Sequence[str] | None = None


class Annotator(ABC):
    """Answers batches of pool records."""

    name: str

    @abstractmethod
    def annotate(self, batch: pa.Table, request: Request) -> pa.Table:
        """The records of ``batch``, in its order, with ``completion`` filled.

        ``id`` stays the pool record's, so that a label leads back to what was asked; the dataset that takes
        the labels in computes the labelled records' own. ``meta`` gains ``labelled_by``: the annotator, the
        round and the seconds spent on the record (null where unknown).

        Raises:
            Waiting: answers are still missing; ask again with the same arguments later.
            UserError: the answers that are there cannot be used.
        """


def answered(
    batch: pa.Table,
    answers: Sequence[str],
    annotator: str,
    round: int,
    seconds: Sequence[float | None] | None = None,
) -> pa.Table:
    """``batch`` with the answers and where they come from."""
    spent = seconds if seconds is not None else [None] * batch.num_rows
    meta = [
        _with(given, {"annotator": annotator, "round": round, "seconds": time})
        for given, time in zip(batch["meta"].to_pylist(), spent, strict=True)
    ]
    filled = _replace(batch, "completion", list(answers))
    return _replace(filled, "meta", meta)


def _with(meta: str | None, provenance: Mapping[str, Any]) -> str:
    return json.dumps({**json.loads(meta or "{}"), "labelled_by": provenance}, ensure_ascii=False, sort_keys=True)


def _replace(table: pa.Table, column: str, values: list[str]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(column), column, pa.array(values, pa.string()))
