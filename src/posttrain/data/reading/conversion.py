"""Recognises the shape of a file's rows by their columns, and converts them to records."""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute

from posttrain.data.reading.messages import (
    Content,
    InvalidRecord,
    convert_alpaca,
    convert_export,
    convert_messages,
    convert_preference,
    convert_prompt,
    convert_sharegpt,
    convert_text,
    with_context,
)
from posttrain.data.reading.request_log import LOG_COLUMNS, parse_request_log
from posttrain.data.reading.rows import (
    MAX_COLUMNS,
    Problem,
    Row,
    join_names,
    list_command,
    parse_json,
    unknown_label_problem,
    with_count,
)
from posttrain.data.records.record import assign_ids, content_ids, image_name, records
from posttrain.models.task import labelled_text
from posttrain.store.errors import UserError, closest_match, shorten, suggest

Record = dict[str, Any]

BATCH_RECORDS = 8192  # of one table; bounds the memory of reading a file

_COUNTED_ROWS = 1_000_000  # after the first bad record, among which others like it are counted

OnSkipped = Callable[[Problem], None]

AnswerReader = Callable[[str, str], str | None]
"""Returns the answer that a file gives as text or JSON, by the text that is labelled; raises a UserError."""

# Texts that programs write for a missing value, such as pandas for an empty cell.
_NAN = ("nan", "NaN", "NAN")

_ID_LINE_BITS = 40


TARGETS = (
    "prompt", "completion", "chosen", "rejected", "text", "messages", "conversations", "system", "history", "group",
)  # fmt: skip
"""The names to which the config can map a column."""


@dataclass(frozen=True)
class Shape:
    """A shape of records: recognised by the columns ``needs``, reading the columns ``uses``."""

    name: str
    needs: Collection[str]
    uses: Collection[str]
    convert: Callable[[Mapping[str, Any]], Content]


def shape_of(columns: Collection[str]) -> Shape | None:
    """Returns the first shape that these columns satisfy, or None."""
    return next((shape for shape in SHAPES if all(name in columns for name in shape.needs)), None)


SHAPES = (
    Shape(
        "record",
        ("id", "input_id", "prompt", "completion", "rejected", "text"),
        ("id", "input_id", "prompt", "completion", "rejected", "text", "source", "line"),
        convert_export,
    ),
    *(
        Shape(
            "preference",
            (*question[:1], "chosen", "rejected"),
            (*question, "chosen", "rejected", "system", "history"),
            with_context(convert_preference),
        )
        for question in (["prompt"], ["instruction", "input"], [])
    ),
    *(Shape("request log", ("messages", answer), LOG_COLUMNS, parse_request_log) for answer in ("choices", "error")),
    Shape("messages", ("messages",), ("messages", "system"), with_context(convert_messages)),
    Shape("ShareGPT", ("conversations",), ("conversations", "system"), with_context(convert_sharegpt)),
    Shape(
        "Alpaca",
        ("instruction",),
        ("instruction", "input", "output", "system", "history"),
        with_context(convert_alpaca),
    ),
    Shape("prompt", ("prompt",), ("prompt", "completion", "system", "history"), with_context(convert_prompt)),
    Shape("text", ("text",), ("text",), convert_text),
    *(
        Shape("request log", (request, answer), LOG_COLUMNS, parse_request_log)
        for request in ("request", "body", "custom_id")
        for answer in ("response", "choices", "error")
    ),
    Shape("request log", ("custom_id", "body"), LOG_COLUMNS, parse_request_log),
)


class RecordConverter:
    """Converts rows to records, and checks that the rows of one file agree.

    Args:
        source: the name of the file in records and problems.
        columns: column of each field, such as ``{"prompt": "text", "completion": "category"}``. Where these make no
            record, as with ``{"group": "user"}``, the other columns count by their own names.
        answers: whether a mapped ``completion`` column is required (a pool may lack it).
        cells: whether values are cells of a CSV file, which hold lists of turns as JSON text.
        same_columns: whether all rows have the same columns, so that a problem with them is reported once.
        read_answer: reads an answer, which may be a list or a number then; None: answers are texts as they are.
        locate: names another row in a message by its line.

    Attributes:
        shape: the shape of the records so far; None before the first.
        records: the number of records so far.
        unused: the columns that only ``meta`` keeps, without ``id`` and ``meta`` itself.
        user_ids: the ids that the file gives to its records.
    """

    def __init__(
        self,
        source: str,
        columns: Mapping[str, str] | None = None,
        *,
        answers: bool = True,
        cells: bool = False,
        same_columns: bool = False,
        read_answer: AnswerReader | None = None,
        locate: Callable[[int], str] = "line {}".format,
    ) -> None:
        self.source = source
        self.shape: Shape | None = None
        self.records = 0
        self._columns, self._answers, self._cells, self._same_columns = columns, answers, cells, same_columns
        self._locate, self._read_answer = locate, read_answer
        self._others_count = bool(columns) and shape_of(columns or ()) is None
        self._line = 0
        self._names: tuple[str, ...] | None = None
        self._others: list[str] = []
        self.unused: dict[str, None] = {}
        self.user_ids = UserIds()

    def __call__(self, rows: Iterable[Row | Problem]) -> Iterator[Record | Problem]:
        """Yields a record for every row, or a problem for a bad one."""
        for row in rows:
            if isinstance(row, Problem):
                yield row
                continue
            try:
                values = self._renamed(row.values)
                # Determining the shape costs more than converting a row; nearly all rows have the same columns.
                if tuple(row.values) != self._names:
                    self._determine_shape(row, values)
            except InvalidRecord as bad:
                yield self._problem(bad, 1 if self._same_columns else row.line)
                if self._same_columns:
                    return
                continue
            try:
                yield self._record(row, values)
            except InvalidRecord as bad:
                yield self._problem(bad, row.line)

    def _problem(self, bad: InvalidRecord, line: int) -> Problem:
        return Problem(self.source, line, bad.kind, bad.message, bad.fix, bad.blocking)

    def _renamed(self, values: Record) -> Record:
        """Renames columns to the names of shapes."""
        if not self._columns:
            return values
        try:
            mapped = {target: values[column] for target, column in self._columns.items()}
        except KeyError:
            mapped = self._without_answers(values)
        if not self._others_count:
            return mapped
        names = {*self._columns, *self._columns.values()}
        return {**{column: value for column, value in values.items() if column not in names}, **mapped}

    def _without_answers(self, values: Record) -> Record:
        columns = self._columns or {}
        for target, column in columns.items():
            if column not in values and (self._answers or target != "completion"):
                message = f"there is no column `{shorten(column)}`; the columns are {join_names(values) or '(none)'}"
                raise InvalidRecord("missing column", message, suggest(column[:100], [*values][:1000], listed=False))
        return {target: values[column] for target, column in columns.items() if column in values}

    def _determine_shape(self, row: Row, values: Record) -> None:
        """Determines the shape of a row whose columns differ from those of the row before."""
        if len(row.values) > MAX_COLUMNS:
            message = f"there are {len(row.values):,} columns; the most that are read are {MAX_COLUMNS:,}"
            raise InvalidRecord("too many columns", message, "keep those that the records are made of")
        shape = self._shape_of(values) or self._unknown(row.values)
        if self.shape is None:
            self.shape, self._line = shape, row.line
        elif shape.name != self.shape.name:
            message = f"has the shape `{shape.name}`, but {self._locate(self._line)} has the shape `{self.shape.name}`"
            raise InvalidRecord("mixed shapes", message, "keep one shape in one file")
        columns = self._columns or {}
        names = [name for name in (*shape.uses, "group") if name in values]
        used = {columns.get(name, name) for name in names}
        self._others = [column for column in row.values if column not in used]
        self.unused.update(dict.fromkeys(column for column in self._others if column not in ("id", "meta")))
        self._names = tuple(row.values)

    def _shape_of(self, values: Record) -> Shape | None:
        """Returns the shape; None if there is none, or if it does not use a mapped column."""
        shape = shape_of(values)
        if shape is None or not self._others_count:
            return shape
        mapped = [target for target in self._columns or () if target in values]
        return shape if all(target == "group" or target in shape.uses for target in mapped) else None

    def _unknown(self, columns: Record) -> Shape:
        message = f"the columns {join_names(columns) or '(none)'} are not a shape that we know"
        if self._columns:
            fix = "map `prompt`, `messages`, `conversations`, `chosen` and `rejected`, or `text`"
            raise InvalidRecord("unknown shape", f"`columns` maps only {', '.join(self._columns)}, and {message}", fix)
        needs = {need for shape in SHAPES for need in shape.needs}
        raise InvalidRecord("unknown shape", message, _suggestion([*columns][:100], needs))

    def _record(self, row: Row, values: Record) -> Record:
        if self.shape is None:
            raise AssertionError("no row was looked at")
        content = self._convert(self.shape, _parse_json_turns(values) if self._cells else values)
        # As an answer it would be learnt like any other label. Other formats have a null of their own.
        for answer in (content.completion, content.rejected) if self._cells else ():
            if answer in _NAN:
                fix = "fill it in, leave it empty for a record without an answer, or write JSON lines if it is meant"
                raise InvalidRecord("NaN", f"the answer is {answer}, which is not text but a missing number", fix)
        group = _group(values["group"]) if "group" in values else None
        others = {column: row.values[column] for column in self._others}
        user_id = others.get("id")
        others.update(content.extra)
        meta = _meta(others) if others else "{}"
        id, input_id = content_ids(content.prompt, content.completion, content.rejected, content.text, image_name(meta))
        # In Python a bool is an int, but a column of True and False names no records.
        if isinstance(user_id, str | int) and not isinstance(user_id, bool) and user_id != "":
            first = self.user_ids.clash(user_id, id, row.line)
            if first is not None:
                other = self._locate(first)
                message = f"the id `{shorten(str(user_id))}` also occurs on {other}, with other content"
                raise InvalidRecord("duplicate id", message, "give every record an id of its own")
        self.records += 1
        return {
            "id": id,
            "input_id": input_id,
            "prompt": content.prompt,
            "completion": content.completion,
            "rejected": content.rejected,
            "text": content.text,
            "group": group,
            "source": self.source,
            "line": row.line,
            "meta": meta,
        }

    def _convert(self, shape: Shape, values: Record) -> Content:
        """Converts a row, and reads its answer."""
        if self._read_answer is None:
            return shape.convert(values)
        answer = values.get("completion")
        is_turns = isinstance(answer, list) and any(isinstance(part, dict) and "role" in part for part in answer)
        if type(answer) in (list, int) and not is_turns:
            values = {**values, "completion": json.dumps(answer, ensure_ascii=False)}
        content = shape.convert(values)
        if content.completion is None:
            return content
        try:
            text = labelled_text(content.prompt, content.text)
            return replace(content, completion=self._read_answer(content.completion, text))
        except UserError as error:
            raise InvalidRecord("unknown label", error.what, error.fix) from None


def turns_from_json(text: str) -> list[Mapping[str, Any]] | None:
    """Parses the turns that a CSV cell holds as JSON text; returns None for any other text."""
    # Nearly every cell ends here, before it is parsed.
    if not text.startswith("["):
        return None
    value = parse_json(text)
    if not isinstance(value, list) or not value:
        return None
    return value if all(isinstance(turn, dict) and {"role", "from"} & set(turn) for turn in value) else None


def _suggestion(columns: Collection[str], needs: Collection[str]) -> str:
    for column in columns:
        # A column that has its name already is not a mistake; what else the shape needs is missing.
        if column not in needs and (near := closest_match(column[:100], needs, cutoff=0.75)):
            return f"did you mean `{near}` by `{shorten(column)}`?"
    return "say in `columns` which column holds what, such as {prompt: question, completion: answer}"


def _parse_json_turns(values: Record) -> Record:
    """Parses the cells of a CSV row that hold lists of turns as JSON text."""
    packed = {column for column in ("prompt", "messages", "conversations") if column in values}
    parsed: Record = {column: turns_from_json(values[column]) or values[column] for column in packed}
    if values.get("history", "").startswith("["):
        parsed["history"] = parse_json(values["history"])
    return {**values, **parsed}


def _group(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return _number(value)
    raise InvalidRecord("not text", f"the group `{shorten(str(value))}` is neither text nor a whole number")


def _number(value: int) -> str:
    try:
        return str(value)
    except ValueError:
        raise InvalidRecord("not text", "the group is a number of thousands of digits") from None


def _meta(others: Record) -> str:
    """Returns canonical JSON of ``others``; the object in a column ``meta`` is merged in."""
    meta = others.get("meta")
    if isinstance(meta, str):
        meta = parse_json(meta)
    if isinstance(meta, dict):
        others = {**meta, **{column: value for column, value in others.items() if column != "meta"}}
    # Sorted keys: the same row gives the same bytes, whatever the order of its columns.
    return json.dumps(_json_value(others), ensure_ascii=False, sort_keys=True)


def _json_value(value: Any) -> Any:
    """Converts a value to JSON types; times, numbers that are not finite and bytes (base64 if no text) become text."""
    if isinstance(value, dict):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        return base64.b64encode(value).decode() if "\0" in text else text
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


class UserIds:
    """Checks that each id of the user's stands for one content, in about 200 bytes an id."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def clash(self, user_id: str | int, record_id: str, line: int) -> int | None:
        """Returns the line of an earlier record with this id and another content, or None."""
        key = int.from_bytes(hashlib.blake2b(str(user_id).encode(), digest_size=12).digest())
        content = int(record_id, 16)
        # Content and line in one integer, which takes half the memory of a pair.
        first = self._seen.setdefault(key, content << _ID_LINE_BITS | line)
        return None if first >> _ID_LINE_BITS == content else first & ((1 << _ID_LINE_BITS) - 1)

    def __len__(self) -> int:
        return len(self._seen)

    def table(self) -> pa.Table:
        """Returns all ids: ``key`` (hash of the id, 12 bytes), ``content`` (the record's id, 10 bytes) and ``line``."""
        keys = [key.to_bytes(12) for key in self._seen]
        contents = [(first >> _ID_LINE_BITS).to_bytes(10) for first in self._seen.values()]
        lines = [first & ((1 << _ID_LINE_BITS) - 1) for first in self._seen.values()]
        columns = (pa.array(keys, pa.binary(12)), pa.array(contents, pa.binary(10)), pa.array(lines, pa.int64()))
        return pa.table(columns, names=["key", "content", "line"])


def record_tables(
    items: Iterable[Record | Problem],
    batch: int = BATCH_RECORDS,
    skipped: OnSkipped | None = None,
    skippable: Callable[[Problem], bool] | None = None,
) -> Iterator[pa.Table]:
    """Collects records in tables of RECORD with up to ``batch`` rows.

    Args:
        skipped: called with the problem of each record that is skipped.
        skippable: returns whether a record with this blocking problem is skipped; None: none is.

    Raises:
        UserError: on the first bad record, with file and line, and the number of others with its kind of problem.
    """
    waiting: list[Record] = []
    items = iter(items)
    for item in items:
        if isinstance(item, Problem):
            if item.blocking and not (skippable and skippable(item)):
                others = (other for other in islice(items, _COUNTED_ROWS) if isinstance(other, Problem))
                same = (other.message == item.message for other in others if other.kind == item.kind)
                raise with_count(item, same, list_command(item.file)).error()
            if skipped is not None:
                skipped(item)
            continue
        waiting.append(item)
        if len(waiting) == batch:
            yield records(waiting)
            waiting = []
    if waiting:
        yield records(waiting)


def hide_answer(answer: str, text: str) -> None:
    """Reads no answer, of a pool for example, whatever it is."""


def read_answers(table: pa.Table, read_answer: AnswerReader) -> pa.Table:
    """Returns a RECORD table with its answers read; raises a UserError with file and line for the first bad one."""
    answers: list[str | None] = []
    for row in table.select(["prompt", "text", "completion", "source", "line"]).to_pylist():
        answer = row["completion"]
        try:
            answers.append(None if answer is None else read_answer(answer, labelled_text(row["prompt"], row["text"])))
        except UserError as error:
            raise UserError(error.what, where=f"{row['source']}:{row['line']}", fix=error.fix) from None
    column = table.schema.get_field_index("completion")
    return assign_ids(table.set_column(column, "completion", pa.array(answers, pa.string())))


def require_known_labels(table: pa.Table, labels: Collection[str]) -> None:
    """Raises a UserError for the first answer outside the closed label set, with the number of others in its file.

    Args:
        table: RECORD table; records without an answer are not wrong.
    """
    # Compared by Arrow, as nearly all tables have no wrong answer.
    known = pa.array([None, *labels], pa.string())
    wrong = table.filter(pa.compute.invert(pa.compute.is_in(table["completion"], value_set=known)))
    if not wrong.num_rows:
        return
    answers, files, lines = (wrong[column].to_pylist() for column in ("completion", "source", "line"))
    same = (answer == answers[0] for answer, file in zip(answers[1:], files[1:], strict=True) if file == files[0])
    problem = unknown_label_problem(answers[0], labels, files[0], lines[0])
    raise with_count(problem, same, list_command(files[0])).error()
