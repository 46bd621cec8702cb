"""An annotator that writes a CSV for people to fill in and reads it back."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from posttrain.label.annotator import AnnotationRequest, Annotator, with_answers
from posttrain.store.errors import UserError, Waiting, suggest
from posttrain.store.files import disk_errors, write_atomically
from posttrain.store.text_files import read_delimited, read_text

_DELIMITERS = ",;\t"


class FileAnnotator(Annotator):
    """Writes ``labels/round-N.csv`` once, waits until every label is filled in, and never writes over it."""

    name = "file"

    def annotate(self, batch: pa.Table, request: AnnotationRequest) -> pa.Table:
        name = f"labels/round-{request.round}.csv"
        path = request.folder / name
        # No file for an empty batch: nobody could fill it in, and the round would wait for ever.
        if not batch.num_rows:
            return batch
        # Never written over: people may have filled in half of it.
        if not path.exists():
            with disk_errors(path):
                path.parent.mkdir(exist_ok=True)
            write_atomically(path, export_labels(batch, request.suggestions).encode())
            raise Waiting(
                f"labels for round {request.round}: fill the label column of {name} "
                f"({batch.num_rows} records), then run again"
            )
        answers = import_labels(path, batch, request.labels, name=name)
        filled = [answer for answer in answers if answer is not None]
        if len(filled) < len(answers):
            raise Waiting(
                f"labels for round {request.round}: {len(filled)} of {len(answers)} are filled in {name}; "
                "fill the rest, then run again"
            )
        return with_answers(batch, filled, self.name, request.round)


def export_labels(batch: pa.Table, suggestions: Sequence[str | None] | None = None) -> str:
    """Writes the batch as CSV text with the columns ``id, prompt, [suggestion,] label``, the labels empty.

    Args:
        batch: RECORD table of pool records.
        suggestions: The model's answers in the order of the batch; None where there is none.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["id", "prompt", *([] if suggestions is None else ["suggestion"]), "label"])
    columns = (batch[column].to_pylist() for column in ("id", "prompt", "text"))
    for row, (identity, prompt, plain) in enumerate(zip(*columns, strict=True)):
        message = plain if prompt is None else _prompt_text(prompt)
        suggested = [] if suggestions is None else [_escape_formula(suggestions[row] or "")]
        writer.writerow([identity, _escape_formula(message), *suggested, ""])
    return text.getvalue()


def import_labels(
    path: Path, batch: pa.Table, labels: Sequence[str] | None = None, *, name: str | None = None
) -> list[str | None]:
    """Reads the answers to ``batch``, in its order; None where the label is still empty.

    Rows may be in any order, columns may have been added, and the delimiter may be a semicolon or a tab.

    Raises:
        UserError: no ``id`` or ``label`` column, an id that is not in the batch or occurs twice, a label outside
            ``labels``, or a record without a row; with file and line, and the number of further problems.
    """
    source = name or str(path)
    row_of = {identity: row for row, identity in enumerate(batch["id"].to_pylist())}
    answers: list[str | None] = [None] * batch.num_rows
    seen: dict[str, int] = {}
    problems: list[UserError] = []
    for line, values in _rows(path, source):
        fix: str | None
        where = f"{source}:{line}"
        identity, label = values["id"].strip(), values["label"].strip()
        if identity not in row_of:
            fix = f"if the round's batch has changed, move {source} away and run again"
            problems.append(UserError(f"no record of the batch has the id `{identity}`", where=where, fix=fix))
        elif identity in seen:
            problems.append(UserError(f"`{identity}` is already on line {seen[identity]}", where=where))
        elif label and labels is not None and label not in labels:
            fix = suggest(label, labels)
            problems.append(UserError(f"label `{label}` is not in the label set", where=where, fix=fix))
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


def _prompt_text(prompt: Sequence[Mapping[str, str]]) -> str:
    """Returns a prompt as people read it: the bare text of a single user turn, else one paragraph a turn."""
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _escape_formula(text: str) -> str:
    # A spreadsheet would run such a text as a formula. The column is never read back, so the apostrophe does no harm.
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _rows(path: Path, source: str) -> list[tuple[int, dict[str, str]]]:
    text = read_text(path, source)
    # Spreadsheets save with a semicolon or a tab in many locales; the header has no text that could hold one by chance.
    header_line = text.split("\n", 1)[0]
    delimiter = max(_DELIMITERS, key=header_line.count)
    rows: list[tuple[int, dict[str, str]]] = []
    header: list[str] | None = None
    for line, cells in read_delimited(io.StringIO(text, newline=""), delimiter, blank=False):
        if isinstance(cells, str):
            raise UserError(cells, where=f"{source}:{line}")
        if header is None:
            header = [cell.strip() for cell in cells]
            _check_header(header, source)
        else:
            rows.append((line, dict(zip(header, cells, strict=True))))
    if header is None:
        raise UserError("the file is empty", where=source, fix="remove it and run again to get it afresh")
    return rows


def _check_header(header: Sequence[str], source: str) -> None:
    for column in ("id", "label"):
        if header.count(column) != 1:
            number = "no" if column not in header else "more than one"
            raise UserError(
                f"there is {number} column `{column}`; the columns are {', '.join(header)}", where=f"{source}:1"
            )
