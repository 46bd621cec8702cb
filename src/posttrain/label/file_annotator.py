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
        if not batch.num_rows:
            return batch
        if not path.exists():
            with disk_errors(path):
                path.parent.mkdir(exist_ok=True)
            write_atomically(path, export_labels(batch, request.suggestions).encode())
            raise Waiting(
                f"labels for round {request.round}: fill the label column of {name} "
                f"({batch.num_rows} records), then run again"
            )
        answers = import_labels(path, batch, request.labels, name=name)
        given = [answer for answer in answers if answer is not None]
        if len(given) < len(answers):
            raise Waiting(
                f"labels for round {request.round}: {len(given)} of {len(answers)} are filled in {name}; "
                "fill the rest, then run again"
            )
        return with_answers(batch, given, self.name, request.round)


def export_labels(batch: pa.Table, suggestions: Sequence[str] | None = None) -> str:
    """The batch as CSV text with the columns ``id, prompt, [suggestion,] label``, the labels empty.

    A text that a spreadsheet would run as a formula gets an apostrophe in front; it is never read back.

    Args:
        batch: RECORD table of pool records.
        suggestions: the model's answers in the order of the batch.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["id", "prompt", *([] if suggestions is None else ["suggestion"]), "label"])
    columns = (batch[column].to_pylist() for column in ("id", "prompt", "text"))
    for row, (identity, prompt, plain) in enumerate(zip(*columns, strict=True)):
        shown = plain if prompt is None else _prompt_text(prompt)
        suggested = [] if suggestions is None else [_escape_formula(suggestions[row])]
        writer.writerow([identity, _escape_formula(shown), *suggested, ""])
    return text.getvalue()


def import_labels(
    path: Path, batch: pa.Table, labels: Sequence[str] | None = None, *, name: str | None = None
) -> list[str | None]:
    """The answers to ``batch``, in its order; None where the label is still empty.

    Rows may stand in any order and columns may have been added; the delimiter may have become a semicolon or
    a tab, as spreadsheets write it.

    Raises:
        UserError: no ``id`` or ``label`` column, an id that was not asked for or stands there twice, a label
            outside ``labels``, or a record whose row is gone; with file and line, and how many more.
    """
    source = name or str(path)
    asked = {identity: row for row, identity in enumerate(batch["id"].to_pylist())}
    answers: list[str | None] = [None] * batch.num_rows
    seen: dict[str, int] = {}
    problems: list[UserError] = []
    for line, values in _rows(path, source):
        fix: str | None
        where = f"{source}:{line}"
        identity, label = values["id"].strip(), values["label"].strip()
        if identity not in asked:
            fix = f"if the round's batch has changed, move {source} away and run again"
            problems.append(UserError(f"no record with the id `{identity}` was asked for", where=where, fix=fix))
        elif identity in seen:
            problems.append(UserError(f"`{identity}` stands on line {seen[identity]} already", where=where))
        elif label and labels is not None and label not in labels:
            fix = suggest(label, labels)
            problems.append(UserError(f"label `{label}` is not in the label set", where=where, fix=fix))
        else:
            answers[asked[identity]] = label or None
        seen.setdefault(identity, line)
    missing = [identity for identity in asked if identity not in seen]
    if missing and not problems:
        message = f"{len(missing)} of {len(asked)} records have no row, the first is `{missing[0]}`"
        problems.append(UserError(message, where=source, fix="put the rows back; a label may stay empty"))
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(first.what + more, where=first.where, fix=first.fix)
    return answers


def _prompt_text(prompt: Sequence[Mapping[str, str]]) -> str:
    """A prompt as people read it: the bare text of a single user turn, else one paragraph a turn."""
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _escape_formula(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _rows(path: Path, source: str) -> list[tuple[int, dict[str, str]]]:
    text = read_text(path, source)
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
            how = "no" if column not in header else "more than one"
            raise UserError(
                f"there is {how} column `{column}`; the columns are {', '.join(header)}", where=f"{source}:1"
            )
