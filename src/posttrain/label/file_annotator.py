"""Batches as CSV files: written for people to fill in, and read back."""

import csv
import io
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from posttrain.label.formats.files import csv_rows, escape_cell, plain_cell
from posttrain.label.formats.items import shown_text
from posttrain.models.answer_form import AnswerForm
from posttrain.models.task import labelled_text
from posttrain.store.errors import UserError, suggest
from posttrain.store.text_files import read_text

FILE = "file"
"""Name of the annotator of rows that do not say who has answered."""

_LONGEST_NAME = 80

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
    *,
    named: bool = False,
) -> str:
    """Writes the batch as CSV text with the columns ``id, prompt, [suggestion,] [a, b,] skip, label[, annotator]``.

    ``skip`` and ``label`` are empty, for people to fill in one of them.

    Args:
        batch: RECORD table of pool records.
        suggestions: The model's answers in the order of the batch; None where there is none.
        candidates: Two answers to choose between for each record; None for none.
        answers: Labels that are there already, by the record's id.
        named: True for a column in which people say who has answered.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    shown = ([] if suggestions is None else ["suggestion"]) + ([] if candidates is None else ["a", "b"])
    writer.writerow(["id", "prompt", *shown, "skip", "label", *["annotator"] * named])
    columns = (batch[column].to_pylist() for column in ("id", "prompt", "text"))
    for row, (identity, prompt, plain) in enumerate(zip(*columns, strict=True)):
        message = shown_text({"prompt": prompt, "text": plain})
        shown = [] if suggestions is None else [suggestions[row] or ""]
        shown += [] if candidates is None else candidates[row]
        label = (answers or {}).get(identity, "")
        writer.writerow([identity, *map(escape_cell, (message, *shown)), "", escape_cell(label), *[""] * named])
    return text.getvalue()


def import_labels(
    path: Path,
    batch: pa.Table,
    labels: Sequence[str] | None = None,
    form: AnswerForm | None = None,
    *,
    name: str | None = None,
) -> list[str | Skip | None]:
    """Reads the answers to ``batch``, in its order; None where a row has neither a label nor a mark that it is skipped.

    Of a record with rows of several people it is the first answer.

    Raises:
        UserError: as `import_answers`.
    """
    return [next(iter(given.values()), None) for given in import_answers(path, batch, labels, form, name=name)]


def import_answers(
    path: Path,
    batch: pa.Table,
    labels: Sequence[str] | None = None,
    form: AnswerForm | None = None,
    *,
    name: str | None = None,
    annotator: str = FILE,
) -> list[dict[str, str | Skip]]:
    """Reads the answers to each record of ``batch``, in its order, by who gave them.

    Rows may be in any order, columns may have been added, and the delimiter may be a semicolon or a tab. The column
    ``skip`` may be missing; its cells are reasons, or say yes or no. So may the column ``annotator``, with which a
    record has a row for each person.

    Args:
        path: The file.
        batch: RECORD table of pool records.
        labels: The closed label set; None for any text.
        form: The form of answers with several parts, which a cell must keep to.
        name: The file's name in errors.
        annotator: Who answers in rows that do not say so.

    Raises:
        UserError: no ``id`` or ``label`` column, an id that is not in the batch or occurs twice for one person, a label
            outside ``labels``, a label in a skipped row, or a record without a row in a file of nobody's own; with file
            and line, and the number of further problems.
    """
    source = name or str(path)
    row_of = {identity: row for row, identity in enumerate(batch["id"].to_pylist())}
    texts = [labelled_text(*pair) for pair in zip(batch["prompt"].to_pylist(), batch["text"].to_pylist(), strict=True)]
    answers: list[dict[str, str | Skip]] = [{} for _ in row_of]
    seen: dict[tuple[str, str], int] = {}
    problems: list[UserError] = []
    for line, values in _rows(read_text(path, source), source):
        fix: str | None
        where = f"{source}:{line}"
        identity, skip = (values.get(name, "").strip() for name in ("id", "skip"))
        label, who = _label(values, labels), values.get("annotator", "").strip() or annotator
        skipped = skip.lower() not in _NOT_SKIPPED
        if identity not in row_of:
            fix = f"if the round's batch has changed, move {source} away and run again"
            problems.append(UserError(f"no record of the batch has the id `{identity}`", where=where, fix=fix))
        elif (identity, who) in seen:
            fix = None if who == annotator else f"`{who}` answers it once"
            problems.append(UserError(f"`{identity}` is already on line {seen[identity, who]}", where=where, fix=fix))
        elif len(who) > _LONGEST_NAME:
            problems.append(UserError(f"the annotator has more than {_LONGEST_NAME} characters", where=where))
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
            answers[row_of[identity]][who] = Skip("" if skip.lower() in _NO_REASON else skip)
        elif label:
            answers[row_of[identity]][who] = label
            try:
                form and form.checked_parts(label, texts[row_of[identity]])
            except UserError as error:
                problems.append(UserError(error.what, where=where, fix=error.fix))
        seen.setdefault((identity, who), line)
    present = {identity for identity, _ in seen}
    missing = [identity for identity in row_of if identity not in present]
    # Reported only by itself: a mistyped id is its own problem, and would count here a second time. A person's copy may
    # hold their part of the batch alone.
    if missing and not problems and annotator == FILE:
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

    A row that names an annotator is that person's, and stays too.

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
    own = {row["id"].strip() for row in rows if not row.get("annotator", "").strip()}
    for row in rows:
        identity, is_named = row["id"].strip(), bool(row.get("annotator", "").strip())
        writer.writerow(row if is_named else {**row, "label": new.get(identity, row["label"])})
        if identity in new and identity not in own:
            own.add(identity)
            writer.writerow({**row, "label": new[identity], "annotator": ""})
    return output.getvalue()


def _label(row: Mapping[str, str], labels: Sequence[str] | None) -> str:
    """Returns a row's label, without the apostrophe that keeps a spreadsheet from taking it for a formula."""
    cell = row["label"].strip()
    return cell if labels is not None and cell in labels else plain_cell(cell)


def _rows(text: str, source: str) -> list[tuple[int, dict[str, str]]]:
    # `skip` may be missing from a file made by hand.
    fix = "remove it and run again to get it afresh"
    return list(csv_rows(io.StringIO(text, newline=""), source, ("id", "label"), fix))
