"""Batches as CSV files: written for people to fill in, and read back."""

import csv
import io
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from posttrain.label.formats.files import csv_rows, escape_cell, plain_cell
from posttrain.label.formats.items import shown_text
from posttrain.store.errors import UserError, suggest
from posttrain.store.text_files import read_text

# Cells of the column `skip`, as checkboxes of spreadsheets write them.
_NOT_SKIPPED, _NO_REASON = ("", "0", "false", "no"), ("1", "true", "yes", "x")


@dataclass(frozen=True)
class Skip:
    """A row that is left without a label on purpose; ``reason`` is "" where none is given."""

    reason: str = ""


def export_labels(
    batch: pa.Table,
    suggestions: Sequence[str | None] | None = None,
    candidates: Sequence[Sequence[str]] | None = None,
    answers: Mapping[str, str] | None = None,
) -> str:
    """Writes the batch as CSV text with the columns ``id, prompt, [suggestion,] [a, b,] skip, label``.

    The last two are empty, for people to fill in one of them.

    Args:
        batch: RECORD table of pool records.
        suggestions: The model's answers in the order of the batch; None where there is none.
        candidates: Two answers to choose between for each record; None for none.
        answers: Labels that are there already, by the record's id.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    shown = ([] if suggestions is None else ["suggestion"]) + ([] if candidates is None else ["a", "b"])
    writer.writerow(["id", "prompt", *shown, "skip", "label"])
    columns = (batch[column].to_pylist() for column in ("id", "prompt", "text"))
    for row, (identity, prompt, plain) in enumerate(zip(*columns, strict=True)):
        message = shown_text({"prompt": prompt, "text": plain})
        shown = [] if suggestions is None else [suggestions[row] or ""]
        shown += [] if candidates is None else candidates[row]
        label = (answers or {}).get(identity, "")
        writer.writerow([identity, *map(escape_cell, (message, *shown)), "", escape_cell(label)])
    return text.getvalue()


def import_labels(
    path: Path, batch: pa.Table, labels: Sequence[str] | None = None, *, name: str | None = None
) -> list[str | Skip | None]:
    """Reads the answers to ``batch``, in its order; None where a row has neither a label nor a mark that it is skipped.

    Rows may be in any order, columns may have been added, and the delimiter may be a semicolon or a tab. The column
    ``skip`` may be missing; its cells are reasons, or say yes or no.

    Raises:
        UserError: no ``id`` or ``label`` column, an id that is not in the batch or occurs twice, a label outside
            ``labels``, a label in a skipped row, or a record without a row; with file and line, and the number of
            further problems.
    """
    source = name or str(path)
    row_of = {identity: row for row, identity in enumerate(batch["id"].to_pylist())}
    answers: list[str | Skip | None] = [None] * batch.num_rows
    seen: dict[str, int] = {}
    problems: list[UserError] = []
    for line, values in _rows(read_text(path, source), source):
        fix: str | None
        where = f"{source}:{line}"
        identity, skip = (values.get(name, "").strip() for name in ("id", "skip"))
        label = _label(values, labels)
        skipped = skip.lower() not in _NOT_SKIPPED
        if identity not in row_of:
            fix = f"if the round's batch has changed, move {source} away and run again"
            problems.append(UserError(f"no record of the batch has the id `{identity}`", where=where, fix=fix))
        elif identity in seen:
            problems.append(UserError(f"`{identity}` is already on line {seen[identity]}", where=where))
        elif label and labels is not None and label not in labels:
            fix = suggest(label, labels)
            problems.append(UserError(f"label `{label}` is not in the label set", where=where, fix=fix))
        elif label and skipped:
            fix = "clear one of the two cells"
            problems.append(UserError(f"the row has the label `{label}` and is skipped", where=where, fix=fix))
        elif skipped and labels is not None and skip in labels:
            fix = "write it into the column `label`"
            problems.append(UserError(f"the column `skip` holds the label `{skip}`", where=where, fix=fix))
        elif skipped:
            answers[row_of[identity]] = Skip("" if skip.lower() in _NO_REASON else skip)
        else:
            answers[row_of[identity]] = label or None
        seen.setdefault(identity, line)
    missing = [identity for identity in row_of if identity not in seen]
    # Reported only by itself: a mistyped id is its own problem, and would count here a second time.
    if missing and not problems:
        message = f"{len(missing)} of {len(row_of)} records have no row, the first is `{missing[0]}`"
        problems.append(UserError(message, where=source, fix="put the rows back; a label may stay empty"))
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(first.what + more, where=first.where, fix=first.fix)
    return answers


def read_labels(path: Path, ids: Set[str], labels: Sequence[str] | None = None) -> dict[str, str]:
    """Reads the labels of some records, by their ids, of a batch that is closed; others, and unknown labels, are left.

    Raises:
        UserError: the file has no ``id`` or ``label`` column, or cannot be read; none if it is not there any more.
    """
    if not path.exists():
        return {}
    rows = [values for _, values in _rows(read_text(path, str(path)), str(path))]
    filled = {values["id"].strip(): _label(values, labels) for values in rows}
    return {id: label for id, label in filled.items() if id in ids and label and (labels is None or label in labels)}


def fill_labels(text: str, source: str, labels: Mapping[str, str]) -> str:
    """Writes labels into the rows of a batch's CSV text, by the record's id; all other cells stay.

    Args:
        text: The content of the file.
        source: Its name in errors.
        labels: The label of each record to fill in.

    Raises:
        UserError: the text has no column ``id`` or ``label``, or is not CSV.
    """
    rows = [values for _, values in _rows(text, source)]
    output = io.StringIO(newline="")
    writer = csv.DictWriter(output, list(rows[0]))
    writer.writeheader()
    new = {identity: escape_cell(label) for identity, label in labels.items()}
    writer.writerows({**row, "label": new.get(row["id"].strip(), row["label"])} for row in rows)
    return output.getvalue()


def _label(row: Mapping[str, str], labels: Sequence[str] | None) -> str:
    """Returns a row's label, without the apostrophe that keeps a spreadsheet from taking it for a formula."""
    cell = row["label"].strip()
    return cell if labels is not None and cell in labels else plain_cell(cell)


def _rows(text: str, source: str) -> list[tuple[int, dict[str, str]]]:
    # `skip` may be missing from a file made by hand.
    fix = "remove it and run again to get it afresh"
    return list(csv_rows(io.StringIO(text, newline=""), source, ("id", "label"), fix))
