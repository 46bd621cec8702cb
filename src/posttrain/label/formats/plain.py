"""Our own formats: JSON lines, which hold everything that the queue knows of an item, and CSV for spreadsheets."""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from posttrain.label.formats.files import (
    FileRecord,
    escape_cell,
    plain_cell,
    read_csv_records,
    read_json_records,
    to_json,
)
from posttrain.label.formats.items import (
    TEXT_KEYS,
    Format,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    are_strings,
    is_dialogue,
    shown_text,
    text_key,
    user_prompt,
)
from posttrain.label.formats.positions import CODE_POINTS
from posttrain.store.errors import UserError

_QUESTION = "label"
_TEXTUAL = ("choice", "text", "rewrite")


class JsonLines(Format):
    """A JSON object a line: ``id``, ``prompt`` or ``text``, ``label``; a JSON array of such objects is read too.

    An export has all answers in ``answers`` and the queue's own state in ``queue``, so that another workspace gets the
    same batch.
    """

    name = "jsonl"

    def records(self, path: Path, name: str) -> Iterator[FileRecord]:
        return read_json_records(path, name)

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        if not survey.batch and isinstance(batch := _state(record).get("batch"), Mapping):
            survey.batch = batch
        suggestion, given = record.get("suggestion"), record.get("answers")
        if isinstance(suggestion, Mapping):
            suggestion = suggestion.get("answer")
        for answer in (record.get(_QUESTION), record.get("gold"), suggestion):
            _survey_answer(answer, survey)
        for each in given if isinstance(given, list) else ():
            _survey_answer(each.get("answer") if isinstance(each, Mapping) else None, survey)

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, left_out: Counter[str]) -> PortableItem:
        return _read_item(record, shape, where)

    def write(self, file: IO[str], items: Iterable[PortableItem], shape: Shape) -> int:
        count = 0
        for item in items:
            answers = [
                {"annotator": a.annotator, "answer": a.answer, "status": a.status, **a.details} for a in item.answers
            ]
            state = dict(item.details)
            if item.positions not in (None, CODE_POINTS):
                state["positions"] = item.positions
            if not count:
                state["batch"] = {"kind": shape.kind, "labels": shape.labels and list(shape.labels)}
            own = {"suggestion": item.suggestion, "gold": item.expected, "answers": answers or None, "queue": state}
            own = {name: value for name, value in own.items() if value is not None}
            file.write(to_json({"id": item.record, **item.content, **own}) + "\n")
            count += 1
        return count


class Csv(Format):
    """CSV with ``id,prompt,suggestion,label,annotator``: a row for each answer, and one for an item without any.

    Also read are ``gold`` with the right answer, and ``text`` for ``prompt``; other columns are the item's ``meta``.
    Answers that are not texts are JSON. Skips, notes and decisions stay in the queue.
    """

    name = "csv"

    def records(self, path: Path, name: str) -> Iterator[FileRecord]:
        rows = read_csv_records(path, name)
        # Rows of one item follow each other; a row without an id is an item of its own.
        for _, group in groupby(rows, key=lambda row: row.value.get("id") or row.where):
            first, *others = group
            values = [{name: plain_cell(cell) for name, cell in row.value.items()} for row in (first, *others)]
            yield FileRecord(first.where, {"rows": values})

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        for row in record["rows"]:
            for name in (_QUESTION, "gold", "suggestion"):
                if cell := row.get(name):
                    parsed = _parsed(cell)
                    _survey_answer(parsed if isinstance(parsed, list) else cell, survey)

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, left_out: Counter[str]) -> PortableItem:
        rows = record["rows"]
        fields: dict[str, Any] = {name: cell for name, cell in rows[0].items() if cell or name in TEXT_KEYS}
        for name in (_QUESTION, "annotator"):
            fields.pop(name, None)
        for name in ("suggestion", "gold"):
            if name in fields:
                fields[name] = _read_cell(fields[name], shape)
        for name in ("candidates", "meta"):
            if name in fields:
                fields[name] = _parsed(fields[name])
        answers = [
            {"annotator": row.get("annotator", "").strip(), "answer": _read_cell(row[_QUESTION], shape)}
            for row in rows
            if row.get(_QUESTION)
        ]
        return _read_item({**fields, "answers": answers}, shape, where)

    def write(self, file: IO[str], items: Iterable[PortableItem], shape: Shape) -> int:
        shown = {"rewrite": ["answer"], "rating": ["answer"], "preference": ["candidates"], "ranking": ["candidates"]}
        columns = ["id", "prompt", *shown.get(shape.kind, ()), "suggestion", _QUESTION, "annotator", "gold", "meta"]
        # With CRLF between rows, the default: only then is each kind of line end in a text quoted.
        writer = csv.writer(file)
        writer.writerow(columns)
        count = 0
        for item in items:
            content = {name: item.content.get(name) for name in ("answer", "candidates", "meta")}
            fields = {"id": item.record, "prompt": shown_text(item.content, last_turn=shape.kind == "spans"), **content}
            fields |= {"suggestion": (item.suggestion or {}).get("answer"), "gold": item.expected}
            answers = [answer for answer in item.answers if answer.status == "answered"]
            for answer in answers or [PortableAnswer("")]:
                row = {**fields, _QUESTION: answer.answer, "annotator": answer.annotator}
                writer.writerow([escape_cell(_cell(row[name])) for name in columns])
            count += 1
        return count


def _read_item(record: Mapping[str, Any], shape: Shape, where: str) -> PortableItem:
    """Reads an item; keys without a meaning of their own are its ``meta``."""
    fields = dict(record)
    is_export = fields.pop("queue", None) is not None
    state = {name: value for name, value in _state(record).items() if name != "batch" and value is not None}
    positions = state.pop("positions", CODE_POINTS if is_export else None)
    identity, suggestion = fields.pop("id", None), fields.pop("suggestion", None)
    if suggestion is not None and not isinstance(suggestion, Mapping):
        suggestion = {"answer": _plain_answer(suggestion, shape), "confidence": None, "annotator": None}
    expected = _plain_answer(fields.pop("gold", None), shape)
    given = fields.pop("answers", None) or []
    if not isinstance(given, list):
        raise UserError("`answers` is a list", where=where)
    answers = [_read_answer(each, shape, where) for each in given]
    annotator = fields.pop("annotator", None) or shape.annotator
    if (label := fields.pop(_QUESTION, None)) not in (None, "", []):
        # Somebody has labelled an exported record: their answer counts, and the item is decided again.
        answers = [each for each in answers if each.annotator != annotator]
        answers.append(PortableAnswer(annotator, _plain_answer(label, shape)))
        state = {name: value for name, value in state.items() if name not in ("status", "wanted", "resolution")}
    content = _read_content(fields, shape, where, is_export=is_export)
    record_id = None if identity is None else str(identity)
    return PortableItem(record_id, content, suggestion, expected, tuple(answers), state, positions)


def _read_content(fields: dict[str, Any], shape: Shape, where: str, *, is_export: bool) -> dict[str, Any]:
    # In a file of somebody else's, `source` is a property of the record that annotators may see.
    names = {"candidates", "answer"} | ({"source"} if is_export else set())
    content = {name: value for name, value in fields.items() if name in names}
    rest = {name: value for name, value in fields.items() if name not in names}
    if is_dialogue(rest.get("prompt")):
        content["prompt"] = rest.pop("prompt")
    else:
        key = text_key([name for name, value in rest.items() if isinstance(value, str)], shape, "the record", where)
        text = rest.pop(key)
        content |= {"text": text} if key == "text" else {"prompt": user_prompt(text)}
    meta = rest.pop("meta", None)
    if meta is not None or rest:
        content["meta"] = {**(meta or {}), **rest} if isinstance(meta, Mapping | None) else meta
    # In the record's order, so that an export of the import is the same to the byte.
    return {name: content[name] for name in fields if name in content} | content


def _read_answer(value: Any, shape: Shape, where: str) -> PortableAnswer:
    if not isinstance(value, Mapping):
        raise UserError("each of `answers` is an object", where=where)
    own = ("annotator", "answer", "status")
    details = {name: part for name, part in value.items() if name not in own and part is not None}
    annotator = value.get("annotator") or shape.annotator
    return PortableAnswer(annotator, value.get("answer"), value.get("status", "answered"), details)


def _state(record: Mapping[str, Any]) -> Mapping[str, Any]:
    state = record.get("queue")
    return state if isinstance(state, Mapping) else {}


def _plain_answer(value: Any, shape: Shape) -> Any:
    """Returns an answer as its kind takes it."""
    if shape.kind == "choices" and isinstance(value, str):
        return [value]
    if shape.kind in _TEXTUAL and are_strings(value) and len(value) == 1:
        return value[0]
    if shape.kind == "spans" and isinstance(value, list):
        return [_span(part) for part in value]
    return value


def _span(value: Any) -> Any:
    return dict(zip(("start", "end", "label"), value, strict=True)) if _is_triple(value) else value


def _is_triple(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[2], str)


def _survey_answer(answer: Any, survey: Survey) -> None:
    if isinstance(answer, str) and answer:
        survey.add(_QUESTION, "label or text", (answer,))
    elif are_strings(answer) and answer:
        survey.add(_QUESTION, "choices" if len(answer) > 1 else "label or text", answer)
    elif isinstance(answer, list) and answer:
        spans = [part for part in map(_span, answer) if isinstance(part, Mapping) and "label" in part]
        if spans:
            survey.add(_QUESTION, "spans", [str(span["label"]) for span in spans])


def _read_cell(cell: str, shape: Shape) -> Any:
    if shape.kind in _TEXTUAL:
        return cell
    value = _parsed(cell)
    # A label alone is a list of one.
    return [cell] if shape.kind == "choices" and not isinstance(value, list) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else to_json(value)
    # Half a surrogate pair, which a file of text cannot hold.
    return text.encode("utf-8", "replace").decode()


def _parsed(cell: str) -> Any:
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell
