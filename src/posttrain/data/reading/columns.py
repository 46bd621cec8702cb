"""Detects which columns of a file hold prompts and answers, by the shape of its rows, by names, and by content."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from posttrain.data.reading.conversion import Shape, shape_of
from posttrain.data.reading.data_files import DataPath, has_fixed_columns
from posttrain.data.reading.formats import read_rows
from posttrain.data.reading.rows import Row, join_names
from posttrain.store.errors import UserError, suggest

PROMPT_NAMES = ("text", "message", "utterance", "query", "question", "sentence", "input", "prompt")
"""Usual names of the column of prompts, the most usual first."""

ANSWER_NAMES = ("intent", "label", "category", "class", "target", "completion", "output", "answer", "response")
"""Usual names of the column of answers, the most usual first."""

_SAMPLE = 2_000  # rows by which columns are judged

_CLOSED_SET = 200
"""Different answers up to which a file may hold labels of a closed set."""

_RECORDS_PER_LABEL = 3
"""Records an answer, on average, from which answers are taken for labels."""

_ANSWERLESS = ("text", "prompt", "Alpaca")
"""Shapes that rows have with or without an answer."""

_ANSWERS = {"prompt": "completion", "Alpaca": "output"}


@dataclass(frozen=True)
class Columns:
    """The columns of a file, and which of them hold what.

    Args:
        names: All columns of the first row.
        shape: The shape that the columns have by their own names; None if they have to be mapped.
        mapping: The columns of ``prompt`` and ``completion``, as `data.columns` has them; None where the columns count
            by their own names.
    """

    names: list[str]
    shape: Shape | None
    mapping: dict[str, str] | None


def detect_columns(path: DataPath, name: str, fix: str, user_columns: Mapping[str, str] | None = None) -> Columns:
    """Detects the columns of prompts and answers in a file of answered records.

    In this order: columns of a shape that has answers count by their own names; then the usual names count; then, of
    the columns with text, the only one with few different values holds the labels, and the only other one the prompts.

    Args:
        path: The file.
        name: Its name in errors.
        fix: How the user can name the columns, for the error.
        user_columns: Columns that the user named: of ``prompt``, ``completion`` or both.

    Raises:
        UserError: the file cannot be read, a named column is missing, or the columns could mean several things.
    """
    rows, first_line = _sample(path, name)
    names = list(rows[0])
    user_columns = dict(user_columns or {})
    where = f"{name}:{1 if has_fixed_columns(path) else first_line}"
    for column in user_columns.values():
        if column not in names:
            raise _missing_column(column, names, where)
    shape = shape_of(names)
    if not user_columns and shape is not None and (shape.name not in _ANSWERLESS or _ANSWERS.get(shape.name) in names):
        return Columns(names, shape, None)
    prompt = user_columns.get("prompt") or _by_name(names, PROMPT_NAMES, user_columns.values())
    answer = user_columns.get("completion") or _by_name(names, ANSWER_NAMES, user_columns.values())
    if prompt is None or answer is None:
        prompt, answer = _by_content(rows, prompt, answer)
    if len(names) == 1:
        raise UserError(f"there are no answers: `{names[0]}` is the only column", where=where, fix="name another file")
    if prompt is None or answer is None:
        what = f"cannot tell prompts and answers apart in the columns {join_names(names)}"
        raise UserError(what, where=where, fix=fix)
    return Columns(names, None, {"prompt": prompt, "completion": answer})


def require_column(path: DataPath, name: str, column: str) -> None:
    """Checks that a record among the first ones has a column that other files may lack.

    Raises:
        UserError: none has it, or the file cannot be read.
    """
    rows, first_line = _sample(path, name)
    names = list(dict.fromkeys(column for row in rows for column in row))
    if column not in names:
        raise _missing_column(column, names, f"{name}:{1 if has_fixed_columns(path) else first_line}")


def _sample(path: DataPath, name: str) -> tuple[list[dict[str, Any]], int]:
    """Returns the first rows of a file, and the line of the first.

    Raises:
        UserError: there are none, or the file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    first_line = 1
    for row in islice(read_rows(path, name), _SAMPLE):
        if isinstance(row, Row):
            first_line = first_line if rows else row.line
            rows.append(row.values)
        elif not rows or row.line is None:
            raise row.error()
    if not rows:
        raise UserError("the file holds no records", where=name, fix="put records into it, or name another file")
    return rows, first_line


def _missing_column(column: str, names: Collection[str], where: str) -> UserError:
    what = f"there is no column `{column}`; the columns are {join_names(names)}"
    return UserError(what, where=where, fix=suggest(column, names, listed=False))


def is_closed_set(answers: Counter[str]) -> bool:
    """Returns whether answers look like labels of a closed set: few, and each in several records on average."""
    return 2 <= len(answers) <= _CLOSED_SET and answers.total() >= _RECORDS_PER_LABEL * len(answers)


def _by_name(names: Collection[str], usual: Collection[str], taken: Collection[str]) -> str | None:
    """Returns the only column with a usual name, whatever its case; None if there is none, or more than one."""
    matches = [name for name in names if name.strip().lower() in usual and name not in taken]
    return matches[0] if len(matches) == 1 else None


def _by_content(rows: list[dict[str, Any]], prompt: str | None, answer: str | None) -> tuple[str | None, str | None]:
    """Returns the columns of prompts and answers; None for one that is not the only column that could be it."""
    free, closed = [], []
    for name in rows[0]:
        texts = [str(row[name]) for row in rows if isinstance(row.get(name), str)]
        values = Counter(text for text in texts if text.strip())
        if name in (prompt, answer) or not values:
            continue
        if is_closed_set(values):
            closed.append(name)
        # Ids and dates are one word; a prompt that is one word stands in a column with a usual name.
        elif sum(" " in value.strip() for value in values) > len(values) / 2:
            free.append(name)
    if prompt is None:
        prompt = free[0] if len(free) == 1 else None
        free = []
    if answer is None:
        others = closed or free
        answer = others[0] if len(others) == 1 else None
    return prompt, answer
