"""Finds the records of a version whose label is likely wrong, and writes them for people to decide about."""

import csv
import importlib.util
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from posttrain.data.records.record import input_texts
from posttrain.data.steps.apply import TableCorpus
from posttrain.data.steps.label_errors import LabelErrors
from posttrain.label.formats.files import escape_cell
from posttrain.models.embedder_source import MINILM_PACKAGE
from posttrain.store.files import check_new_file, write_atomically

_COLUMNS = ["id", "prompt", "given", "confidence", "suggestion", "label"]


@dataclass(frozen=True)
class Suspect:
    """A record whose label is more likely wrong than right.

    Args:
        id: The record's id.
        input: Its input as text.
        given: Its label.
        suggested: The likelier label.
        confidence: The probability that the given label is wrong.
        source, line: The place that it was read from.
    """

    id: str
    input: str
    given: str
    suggested: str
    confidence: float
    source: str
    line: int

    def to_json(self) -> dict[str, Any]:
        """Returns the suspect as JSON values."""
        return asdict(self)


def find_suspects(records: pa.Table) -> list[Suspect]:
    """Returns the likely label errors by confident learning, the most certain first.

    The classifiers see sentence embeddings by MiniLM where it is installed, else n-grams, as the step `label_errors`.

    Args:
        records: RECORD table.

    Raises:
        UserError: the answers are not labels, since none has several inputs.
    """
    step = LabelErrors(features="embedding" if importlib.util.find_spec(MINILM_PACKAGE) else "ngrams")
    table = records.combine_chunks()
    facts = step.decide(TableCorpus(table, step)).facts
    rows = table.append_column("suggested", facts["suggested_label"]).append_column("quality", facts["label_quality"])
    rows = rows.filter(pa.compute.is_valid(facts["suggested_label"]))
    texts = input_texts(rows)
    suspects = [
        Suspect(
            row["id"], text, row["completion"], row["suggested"], 1 - row["quality"], row["source"], int(row["line"])
        )
        for row, text in zip(rows.to_pylist(), texts, strict=True)
    ]
    return sorted(suspects, key=lambda suspect: (-suspect.confidence, suspect.id))


def export_suspects(suspects: list[Suspect], path: Path) -> None:
    """Writes suspects to a new CSV that `posttrain label import` reads: its column ``label`` waits to be filled in.

    Raises:
        UserError: the file exists, or its suffix is not .csv.
    """
    check_new_file(path, [".csv"])
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for suspect in suspects:
        row = {
            **{"id": suspect.id, "prompt": suspect.input, "given": suspect.given, "suggestion": suspect.suggested},
            "confidence": f"{suspect.confidence:.3f}",
        }
        writer.writerow([escape_cell(row.get(name, "")) for name in _COLUMNS])
    write_atomically(path, text.getvalue().encode())
