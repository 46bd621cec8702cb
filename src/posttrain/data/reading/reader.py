"""Reads a file in any accepted format and shape as RECORD tables, or finds all its problems."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa

from posttrain.data.reading.conversion import (
    BATCH_RECORDS,
    AnswerReader,
    OnSkipped,
    Record,
    RecordConverter,
    hide_answer,
    record_tables,
)
from posttrain.data.reading.data_files import (
    DELIMITERS,
    DataPath,
    access_problem,
    file_format,
    has_fixed_columns,
    to_data_path,
)
from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.rows import Problem, Row, join_names, unknown_label_problem
from posttrain.data.records.record import exact_record_ids
from posttrain.store.message import counted

_LINE_BITS = 40

_SAMPLE_ROWS = 20

_CONTEXT = ("system", "history")
"""Fields that many files have under a longer name, such as ``system_prompt``."""


def read(
    path: str | Path | DataPath,
    columns: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
    read_answer: AnswerReader | None = None,
    batch: int = BATCH_RECORDS,
    skipped: OnSkipped | None = None,
    unused: Callable[[list[str]], None] | None = None,
) -> Iterator[pa.Table]:
    """Streams a file as tables of RECORD with up to ``batch`` rows, in file order.

    Args:
        path: .jsonl, .json, .csv, .tsv (each also as .gz or .zst) or .parquet, local or behind a URL such as
            ``s3://bucket/key``, or a local Hugging Face dataset folder.
        columns: column of each field, such as ``{"prompt": "text", "completion": "category"}``.
        name: the name of the file in ``source`` and errors; None: ``path`` as given.
        answers: whether a mapped ``completion`` column is required (a pool may lack it).
        read_answer: reads answers, which may be lists or numbers then; None: they are texts as they are.
        skipped: called with the problem of each record that is skipped, such as a failed request of a log.
        unused: called at the end with the columns that only ``meta`` keeps.

    Raises:
        UserError: at once if there is no such file; on the first bad record, with file and line; the file holds no
            records.
    """
    # Checked here, not in the generator, which would raise only when it is first read.
    if problem := access_problem(to_data_path(path), str(path) if name is None else name):
        raise problem.error()
    items = scan_records(path, columns, name=name, answers=answers, read_answer=read_answer, unused=unused)
    return record_tables(items, batch, skipped)


def scan_records(
    path: str | Path | DataPath,
    columns: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
    read_answer: AnswerReader | None = None,
    unused: Callable[[list[str]], None] | None = None,
) -> Iterator[Record | Problem]:
    """Yields every record of a file, and a problem for each bad one; takes the arguments of `read`."""
    source = str(path) if name is None else name
    where = to_data_path(path)
    cells = file_format(where) in DELIMITERS
    conversion = RecordConverter(
        *(source, columns),
        answers=answers,
        cells=cells,
        same_columns=has_fixed_columns(where),
        read_answer=read_answer,
    )
    refused = left_out = 0
    first = ""
    for item in conversion(read_rows(where, source)):
        if isinstance(item, Problem):
            refused += item.blocking
            left_out += not item.blocking
            first = first or item.message
        yield item
    if unused is not None:
        unused(list(conversion.unused))
    if conversion.records or refused:
        return
    if left_out:
        message, fix = (
            f"none of the {counted(left_out, 'record')} can be used (the first: {first})",
            "name another file",
        )
    else:
        message, fix = "the file holds no records", "put records into it, or name another file"
    yield Problem(source, None, "empty file", message, fix)


def check_file(
    path: str | Path | DataPath,
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
    read_answer: AnswerReader | None = None,
) -> list[Problem]:
    """Returns all problems of a file, in line order."""
    return list(find_problems(path, columns, labels, name=name, answers=answers, read_answer=read_answer))


def find_problems(
    path: str | Path | DataPath,
    columns: Mapping[str, str] | None = None,
    labels: Sequence[str] | None = None,
    *,
    name: str | None = None,
    answers: bool = True,
    read_answer: AnswerReader | None = None,
) -> Iterator[Problem]:
    """Yields the problems of a file in one pass, in about 200 bytes of memory a record.

    ``labels`` is None for open-ended answers, and for a pool, whose answers are hidden.

    Besides what `read` refuses or skips: answers outside ``labels``, records that occur in the file twice (the later
    one is the problem), where ``labels`` is given, inputs with two answers, and at the end records without an answer
    among others that have one. The last three, and what is skipped, do not block: steps deal with them when a version
    is built.
    """
    read_answer = hide_answer if read_answer is not None and labels is None else read_answer
    seen: dict[int, int] = {}
    answered: dict[int, int] = {}
    indices = {label: number for number, label in enumerate(labels)} if labels is not None else None
    names = list(labels or ())
    # Answers outside the label set get numbers of their own, so that conflicts among them are reported, too.
    numbers = dict(indices or {})
    unanswered: list[int] = []
    for item in scan_records(path, columns, name=name, answers=answers, read_answer=read_answer):
        if isinstance(item, Problem):
            yield item
            continue
        file, line, answer = item["source"], item["line"], item["completion"]
        if answer is None and item["prompt"]:
            unanswered.append(line)
        # What reads answers has checked them.
        if indices is not None and read_answer is None and answer is not None and answer not in indices:
            yield unknown_label_problem(answer, indices, file, line)
        distinct = len(seen)
        id, input_id = exact_record_ids(item)
        # As integers ids take half the memory that their texts take.
        first = seen.setdefault(int(id, 16), line)
        if len(seen) == distinct:
            message = f"the same record as line {first}"
            yield Problem(file, line, "duplicate", message, "only the first is used", blocking=False)
            continue
        if indices is None or answer is None:
            continue
        number = numbers.setdefault(answer, len(names))
        if number == len(names):
            names.append(answer)
        # Answer and line in one integer: a tuple would take twice the memory.
        entry = answered.setdefault(int(input_id, 16), number << _LINE_BITS | line)
        other, where = names[entry >> _LINE_BITS], entry & ((1 << _LINE_BITS) - 1)
        if other != answer:
            message = f"the same input is `{answer}` here and `{other}` on line {where}"
            yield Problem(file, line, "conflicting labels", message, "keep the right one", blocking=False)
    # In a file of inputs alone, such as a pool, none is missing.
    if len(unanswered) < len(seen):
        for line in unanswered:
            yield Problem(file, line, "no answer", "has an input and no answer", "training takes none", blocking=False)


def unused_columns(path: DataPath, name: str, columns: Mapping[str, str] | None) -> list[str]:
    """Returns the columns that only ``meta`` keeps, judged by the first rows; none if they make no record."""
    conversion = RecordConverter(
        name, columns, answers=False, cells=file_format(path) in DELIMITERS, same_columns=has_fixed_columns(path)
    )
    rows = islice(read_rows(path, name), 1 if has_fixed_columns(path) else _SAMPLE_ROWS)
    for _ in conversion(row for row in rows if isinstance(row, Row)):
        pass
    return list(conversion.unused)


def unused_columns_note(
    name: str,
    unused: list[str],
    columns: Mapping[str, str] | None,
    setting: str = "`data.columns` or --column NAME=COLUMN",
) -> str:
    """Returns a line that says that columns are unused, and how to use one with a setting."""
    verb = "is" if len(unused) == 1 else "are"
    if role := next((role for role in _CONTEXT if any(role in column.lower() for column in unused)), None):
        example = f"{role}={next(column for column in unused if role in column.lower())}"
    elif columns and "prompt" not in columns:
        example = f"prompt={unused[0]}"
    else:
        example = f"prompt=question, completion={unused[0]}"
    how = f"{setting}, such as {example}"
    return f"{name}: {join_names(unused)} {verb} not used, only kept in `meta`; name what is with {how}"
