"""doccano's JSONL and CSV, and the CSV of posttrain: one record a line, with its answer but not who gave it."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from posttrain.label.formats.codec import (
    EXTENSION,
    TEXT_KEYS,
    Codec,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    foreign_parts,
    own_meta,
    shown_text,
    text_key,
    user_prompt,
    with_foreign,
)
from posttrain.label.formats.files import to_json

_LABEL_KEYS = ("label", "labels", "entities", "cats")
_FOREIGN_KEYS = ("Comments", "relations")
_NO_TEXT = (*_LABEL_KEYS, "id", "answer", EXTENSION, "suggestion", "annotator", "gold")
_COLUMN = re.compile(r"\w(?:[\w .:-]{0,58}\w)?")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Doccano(Codec):
    """JSON lines: ``text`` and ``label``, a list of labels, of ``[start, end, label]`` or of texts."""

    name = "doccano"
    key = "doccano"
    text_name = "text"
    kinds: ClassVar[tuple[str, ...]] = ("choice", "choices", "text", "spans", "rewrite", "rating")
    names_annotators = False

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        for question in _LABEL_KEYS:
            values = record.get(question)
            values = [values] if isinstance(values, str) else values
            if not isinstance(values, list) or not values:
                continue
            spans = [_read_span(value) for value in values]
            if all(span is not None for span in spans):
                survey.add(question, "spans", tuple(str(span["label"]) for span in spans if span))
            elif all(isinstance(value, str) for value in values):
                kind = "label or text" if len(values) == 1 else "choices"
                survey.add(question, kind, tuple(values))

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]) -> PortableItem:
        texts = [name for name, value in record.items() if isinstance(value, str) and name not in _NO_TEXT]
        key = text_key([*(name for name in ("data",) if name in texts)] or texts, shape, "the record", where)
        question = shape.question or "label"
        content: dict[str, Any] = {"prompt": user_prompt(record[key])}
        if isinstance(record.get("answer"), str):
            content["answer"] = record["answer"]
        parts: dict[str, Any] = {"text_key": key if key != self.text_name else None}
        if not isinstance(record.get("id"), str):
            parts["id"] = record.get("id")
        raw = record.get(question)
        answer = self._read_label(raw, shape)
        if answer is None and raw not in (None, [], ""):
            parts["label"] = raw
        elif answer is not None and raw != self._write_label(answer, shape):
            # Such as a text in place of a list, or spans as objects with ids; only while the answer is the same.
            parts["label_as"] = raw
        own = {"id", key, question, EXTENSION, "answer"}
        other = {name: value for name, value in record.items() if name not in own}
        foreign_keys = (*_FOREIGN_KEYS, *(name for name in _LABEL_KEYS if name != question))
        parts |= {name: other.pop(name) for name in foreign_keys if name in other and other[name] != []}
        foreign.update(name for name in foreign_keys if name in parts)
        foreign["label"] += "label" in parts
        other = {name: value for name, value in other.items() if name not in foreign_keys}
        if other:
            content["meta"] = other
        answers = () if answer is None else (PortableAnswer("", answer),)
        return PortableItem(
            record=None if record.get("id") is None else str(record["id"]),
            content=with_foreign(content, self.key, parts),
            answers=answers,
        )

    def write(self, item: PortableItem, shape: Shape) -> dict[str, Any]:
        parts = foreign_parts(item.content, self.key)
        question = shape.question or "label"
        identity = parts.get("id", item.record)
        record: dict[str, Any] = {} if item.record is None else {"id": identity}
        record[parts.get("text_key", self.text_name)] = shown_text(item.content, last_turn=shape.kind == "spans")
        if item.content.get("answer") is not None:
            record["answer"] = item.content["answer"]
        answer = _final_answer(item)
        label = self._write_label(answer, shape)
        if "label" in parts and answer is None:
            label = parts["label"]
        elif "label_as" in parts and self._read_label(parts["label_as"], shape) == answer:
            label = parts["label_as"]
        record[question] = label
        own = {name: value for name, value in own_meta(item.content, self.key).items() if name not in record}
        rest = {name: value for name, value in parts.items() if name not in ("id", "text_key", "label", "label_as")}
        reserved = {*_LABEL_KEYS, *_FOREIGN_KEYS, EXTENSION, "id", "answer", "data", *TEXT_KEYS}
        return {**record, **{name: value for name, value in own.items() if name not in reserved}, **rest}

    def extension(self, record: Mapping[str, Any]) -> Any:
        return record.get(EXTENSION)

    def extend(self, record: dict[str, Any], extension: dict[str, Any]) -> None:
        record[EXTENSION] = extension

    def _read_label(self, raw: Any, shape: Shape) -> Any:
        """Returns the answer of a label column; None if there is none that this kind can hold."""
        values = [raw] if isinstance(raw, str) and raw else raw
        if not isinstance(values, list) or not values:
            return None
        if shape.kind == "spans":
            spans = [_read_span(value) for value in values]
            known = [span for span in spans if span is not None]
            return sorted(known, key=_span_order) if len(known) == len(spans) else None
        if not all(isinstance(value, str) for value in values):
            return None
        if shape.kind == "choices":
            return list(values)
        if len(values) != 1:
            return None
        if shape.kind == "rating":
            return int(values[0]) if values[0] in ("1", "2", "3", "4", "5") else None
        return values[0]

    def _write_label(self, answer: Any, shape: Shape) -> Any:
        if answer is None:
            return []
        if shape.kind == "spans":
            return [[span["start"], span["end"], span["label"]] for span in answer]
        if shape.kind == "choices":
            return list(answer)
        return [str(answer)]


class DoccanoCsv(Doccano):
    """CSV of doccano: ``id,text,label``; several labels are joined by ``#``."""

    name = "doccano-csv"
    columns: ClassVar[tuple[str, ...]] = ("id", "answer")
    kinds: ClassVar[tuple[str, ...]] = ("choice", "choices", "text", "rewrite", "rating")

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        if label := _plain_row(record).get("label"):
            parts = label.split("#")
            several = len(parts) > 1 and all(parts)
            survey.add("label", "choices" if several else "label or text", tuple(parts) if several else (label,))

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]) -> PortableItem:
        row = {name: value for name, value in _plain_row(record).items() if value or name in (*TEXT_KEYS, "data")}
        return super().read(row, shape, where, foreign)

    def write(self, item: PortableItem, shape: Shape) -> dict[str, Any]:
        record = super().write(item, shape)
        columns = {*self.columns, "label", foreign_parts(item.content, self.key).get("text_key", self.text_name)}
        return {name: value for name, value in record.items() if name in columns or _fits_cell(name, value)}

    def extension(self, record: Mapping[str, Any]) -> Any:
        extension = _parsed(record.get(EXTENSION))
        if not isinstance(extension, dict):
            return extension
        return {name: value for name, value in extension.items() if name != "escaped"} or None

    def extend(self, record: dict[str, Any], extension: dict[str, Any]) -> None:
        record[EXTENSION] = to_json(extension)

    def _read_label(self, raw: Any, shape: Shape) -> Any:
        if shape.kind == "choices" and isinstance(raw, str) and raw:
            return raw.split("#")
        return super()._read_label(raw, shape)

    def _write_label(self, answer: Any, shape: Shape) -> Any:
        if answer is None:
            return ""
        return "#".join(answer) if shape.kind == "choices" else str(answer)


class Csv(DoccanoCsv):
    """CSV with the columns of a waiting batch: ``id,prompt,suggestion,label``, and who gave the label.

    Read are also ``text`` for ``prompt``, ``annotator``, and ``gold`` with the right answer of a gold item. Answers
    that are no text are JSON.
    """

    name = "csv"
    key = "csv"
    text_name = "prompt"
    kinds: ClassVar[tuple[str, ...]] = Codec.kinds

    def survey(self, record: Mapping[str, Any], survey: Survey) -> None:
        row = _plain_row(record)
        for name in ("label", "gold", "suggestion"):
            if label := row.get(name):
                values = _parsed(label)
                if isinstance(values, list) and all(isinstance(value, str) for value in values):
                    survey.add("label", "choices", tuple(values))
                elif isinstance(values, list) and all(isinstance(v, dict) and "label" in v for v in values):
                    survey.add("label", "spans", tuple(str(value["label"]) for value in values))
                else:
                    survey.add("label", "label or text", (label,))

    def read(self, record: Mapping[str, Any], shape: Shape, where: str, foreign: Counter[str]) -> PortableItem:
        row = _plain_row(record)
        special = {name: row.pop(name, "") for name in ("suggestion", "annotator", "gold")}
        item = Doccano.read(self, {n: v for n, v in row.items() if v or n in TEXT_KEYS}, shape, where, foreign)
        answers = tuple(PortableAnswer(special["annotator"].strip(), each.answer) for each in item.answers)
        suggested, expected = (self._read_label(special[name], shape) for name in ("suggestion", "gold"))
        suggestion = {"answer": suggested, "confidence": None, "annotator": None} if suggested is not None else None
        return PortableItem(item.record, item.content, suggestion, expected, answers)

    def write(self, item: PortableItem, shape: Shape) -> dict[str, Any]:
        record = super().write(item, shape)
        label, text_name = record.pop("label"), foreign_parts(item.content, self.key).get("text_key", self.text_name)
        proposed = None if item.suggestion is None else item.suggestion.get("answer")
        answerers = {answer.annotator for answer in item.answers if answer.status == "answered"}
        first = {"id": record.pop("id", ""), text_name: record.pop(text_name)}
        columns = {
            "suggestion": self._write_label(proposed, shape),
            "label": label,
            "annotator": next(iter(answerers)) if len(answerers) == 1 else "",
            "gold": self._write_label(item.expected, shape),
        }
        return {**first, **columns, **record}

    def _read_label(self, raw: Any, shape: Shape) -> Any:
        if not isinstance(raw, str) or not raw:
            return None
        if shape.kind in ("choice", "text", "rewrite"):
            return raw
        value = _parsed(raw)
        if shape.kind == "preference" and raw == "tie":
            return raw
        # A label alone is a list of one.
        return [raw] if shape.kind == "choices" and not isinstance(value, list) else value

    def _write_label(self, answer: Any, shape: Shape) -> Any:
        if answer is None:
            return ""
        return answer if isinstance(answer, str) else to_json(answer)


def escape_row(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Returns a row's cells, where no spreadsheet takes a text for a formula; `_plain_row` undoes it."""
    cells = {name: _cell(row.get(name)) for name in columns}
    escaped = [name for name, cell in cells.items() if cell.startswith(_FORMULA)]
    if escaped:
        # Named, as a text of its own may begin with an apostrophe, too.
        extension = {**(_parsed(cells.get(EXTENSION)) or {}), "escaped": escaped}
        cells |= {name: f"'{cells[name]}" for name in escaped} | {EXTENSION: to_json(extension)}
    return [cells[name] for name in columns]


def _plain_row(row: Mapping[str, Any]) -> dict[str, str]:
    extension = _parsed(row.get(EXTENSION))
    escaped = extension.get("escaped", ()) if isinstance(extension, dict) else ()
    return {name: cell[1:] if name in escaped and cell.startswith("'") else cell for name, cell in row.items()}


def _fits_cell(name: str, value: Any) -> bool:
    # A cell is a text, and one that is empty cannot be told from none. A name that a reader would cut, or take for a
    # delimiter, stays in the extension.
    return isinstance(value, str) and value != "" and _COLUMN.fullmatch(name) is not None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else to_json(value)
    # Half a surrogate pair, which no file of text can hold.
    return text.encode("utf-8", "replace").decode()


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, TypeError, RecursionError):
        return text


def _read_span(value: Any) -> dict[str, Any] | None:
    if isinstance(value, list) and len(value) == 3:
        return {"start": value[0], "end": value[1], "label": value[2]} if isinstance(value[2], str) else None
    if isinstance(value, Mapping) and {"start_offset", "end_offset", "label"} <= set(value):
        return {"start": value["start_offset"], "end": value["end_offset"], "label": value["label"]}
    return None


def _span_order(span: Mapping[str, Any]) -> tuple[Any, Any, str]:
    return span["start"], span["end"], str(span["label"])


def _final_answer(item: PortableItem) -> Any:
    """Returns what became of an item, or the only answer to it."""
    resolution = item.details.get("resolution")
    if resolution is not None:
        return resolution.get("answer")
    answers = [answer.answer for answer in item.answers if answer.status == "answered"]
    return answers[0] if len(answers) == 1 else None
