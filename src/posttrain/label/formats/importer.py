"""Imports a file of another tool as a batch of the queue, or its answers into one."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select

from posttrain.label.answer_kinds import KINDS
from posttrain.label.formats.checks import checked_item
from posttrain.label.formats.codec import (
    ANSWER_COLUMNS,
    Codec,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    import_record,
)
from posttrain.label.formats.doccano import DoccanoCsv
from posttrain.label.formats.exporter import CODECS
from posttrain.label.formats.files import FileRecord, read_csv_header, read_csv_records, read_json_records
from posttrain.label.queue import Queue
from posttrain.label.queue_batches import COUNTS, given_answer
from posttrain.label.queue_review import settle
from posttrain.label.queue_rows import Batch, GivenAnswer, hash_fraction
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError, shorten
from posttrain.store.label_tables import label_answers, label_batches, label_items
from posttrain.store.progress import Advance, progress_bar

_CHUNK = 1000


@dataclass
class ImportResult:
    """Counts of an import.

    Attributes:
        created: True if the batch is new.
        repeated: Answers that were in the batch already.
        foreign: Parts without a meaning here, by name; they are kept for an export in the same format.
    """

    batch: str
    format: str
    kind: str
    created: bool
    items: int = 0
    answers: int = 0
    gold: int = 0
    repeated: int = 0
    foreign: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class ImportOptions:
    """How a file is imported.

    Attributes:
        format: Name of its format; None: seen from its content.
        batch: Name of the batch; None: of the file. If there is one of this name, answers are added to its items.
        kind: Kind of its answers; None: seen from its content.
        question: Which of several questions is the one; None: that with the most answers.
        annotator: Who answered, in a file that does not say so; None: the file's name.
        field: Name of the text to label; None: one of `posttrain.label.formats.codec.TEXT_KEYS`.
        gold: True if its answers are those that annotators are measured by.
        labels: The config's label set.
    """

    format: str | None = None
    batch: str | None = None
    kind: str | None = None
    question: str | None = None
    annotator: str | None = None
    field: str | None = None
    gold: bool = False
    labels: tuple[str, ...] | None = None


def import_queue(queue: Queue, path: Path, options: ImportOptions) -> ImportResult:
    """Reads a file into a new batch, or its answers into the batch that is named; all of it or nothing.

    Raises:
        UserError: the file cannot be read as this format, or an answer does not fit, with the record's place.
    """
    name = str(path)
    codec = CODECS[options.format or detect_format(path, name)]
    survey, total = Survey(), 0
    for record in _records(codec, path, name):
        codec.survey(record.value, survey)
        extension = codec.extension(record.value)
        if survey.batch is None and isinstance(extension, Mapping) and isinstance(extension.get("batch"), Mapping):
            survey.batch = extension["batch"]
        total += 1
    if not total:
        raise UserError("the file has no records", where=name)
    existing = queue.batch(options.batch) if options.batch is not None else None
    kind = options.kind or (existing.kind if existing else None)
    shape = survey.shape(kind, options.question, options.labels, options.annotator or path.stem)
    if existing:
        shape = replace(shape, labels=None if existing.labels is None else tuple(existing.labels))
    shape = replace(shape, field=options.field)
    batch = options.batch or path.stem
    result = ImportResult(batch, codec.name, shape.kind, created=existing is None)
    with progress_bar(f"import {path.name}", total) as advance, queue.metadata.transaction():
        items = _read_file(codec, path, shape, options, result, advance)
        if existing is None:
            _add_batch(queue, batch, shape, items, result)
            if shape.question is not None:
                _note_question(queue, batch, codec.name, shape.question)
        else:
            _add_answers(queue, existing, items, result)
    # Without those that were looked for and not there.
    result.foreign = +result.foreign
    return result


def detect_format(path: Path, name: str) -> str:
    """Returns the name of a file's format, by its first record.

    Raises:
        UserError: it is none of them.
    """
    if path.suffix.lower() in (".csv", ".tsv"):
        header = set(read_csv_header(path, name))
        return (
            "csv" if header & {"prompt", "suggestion", "annotator", "gold"} or "text" not in header else "doccano-csv"
        )
    first = next(read_json_records(path, name), None)
    if first is None:
        raise UserError("the file has no records", where=name)
    if isinstance(first.value.get("data"), Mapping):
        return "label-studio"
    if isinstance(first.value.get("fields"), Mapping):
        return "argilla"
    if any(isinstance(value, str) for value in first.value.values()):
        return "doccano"
    raise UserError("is a file of no known tool", where=name, fix=f"--format: {', '.join(CODECS)}")


def _records(codec: Codec, path: Path, name: str) -> Iterator[FileRecord]:
    return read_csv_records(path, name) if isinstance(codec, DoccanoCsv) else read_json_records(path, name)


def _read_file(
    codec: Codec, path: Path, shape: Shape, options: ImportOptions, result: ImportResult, advance: Advance
) -> Iterator[tuple[str, PortableItem]]:
    """Yields the items of a file, checked, each with its place in errors."""
    for record in _records(codec, path, str(path)):
        item = _read_item(codec, record, shape, options, result)
        yield record.where, checked_item(item, shape, record.where)
        advance(1)


def _read_item(
    codec: Codec, record: FileRecord, shape: Shape, options: ImportOptions, result: ImportResult
) -> PortableItem:
    item = import_record(codec, record.value, shape, record.where, result.foreign)
    if options.gold and item.expected is None:
        answers = {KINDS[shape.kind].key(each.answer): each for each in item.answers if each.status == "answered"}
        if len(answers) != 1:
            what = "has no answer" if not answers else "has several answers"
            raise UserError(f"{what}, and a gold item needs one", where=record.where)
        expected = next(iter(answers.values())).answer
        item = replace(item, expected=expected, answers=(), details={})
    return item


def _add_batch(
    queue: Queue, name: str, shape: Shape, items: Iterable[tuple[str, PortableItem]], result: ImportResult
) -> None:
    batch = queue.add_batch(name, shape.kind, [], labels=shape.labels)
    seen: dict[str, str] = {}
    for start, chunk in enumerate(_chunks(items)):
        rows = []
        for number, (where, item) in enumerate(chunk, start * _CHUNK):
            record = str(item.record)
            if record in seen:
                raise UserError(f"the record `{shorten(record)}` is in {seen[record]} already", where=where)
            seen[record] = where.rpartition("/")[2]
            rows.append(_item_row(batch, item, number))
        keys = queue.metadata.insert_rows(label_items, rows)
        given = [
            _answer_row(key["id"], answer)
            for key, (where, item) in zip(keys, chunk, strict=True)
            for answer in item.answers
        ]
        queue.metadata.insert_rows(label_answers, given)
        result.items += len(rows)
        result.answers += len(given)
        result.gold += sum(item.expected is not None for _, item in chunk)
    settings = {**batch.settings, "gold": result.gold}
    queue.metadata.update_rows(label_batches, label_batches.c.name == name, {"settings": settings})


def _note_question(queue: Queue, batch: str, format: str, name: str) -> None:
    """Keeps the tool's name for what is answered, for an export to the same tool."""
    row = queue.batch(batch)
    settings = {**(row.settings if row else {}), "question": {"format": format, "name": name}}
    queue.metadata.update_rows(label_batches, label_batches.c.name == batch, {"settings": settings})


def _add_answers(queue: Queue, batch: Batch, items: Iterable[tuple[str, PortableItem]], result: ImportResult) -> None:
    """Adds the answers of a file to the items of a batch, and decides the items anew."""
    if batch.status != "open":
        raise UserError(f"the batch `{batch.name}` is closed, and its answers are in use", fix="name another batch")
    kind = KINDS[batch.kind]
    for chunk in _chunks(items):
        records = [str(item.record) for _, item in chunk]
        query = select(label_items).where(label_items.c.batch == batch.name, label_items.c.record.in_(records))
        with queue.metadata.transaction() as connection:
            # Locked: on PostgreSQL annotators answer meanwhile.
            rows = {row["record"]: row for row in connection.execute(query.with_for_update()).mappings()}
            of_item: dict[int, list[GivenAnswer]] = {row["id"]: [] for row in rows.values()}
            answers = (
                select(label_answers).where(label_answers.c.item.in_(of_item), COUNTS).order_by(label_answers.c.id)
            )
            for row in connection.execute(answers).mappings():
                of_item[row["item"]].append(given_answer(row))
        for where, item in chunk:
            result.items += 1
            if (stored := rows.get(str(item.record))) is None:
                what = f"no record of the batch `{batch.name}` has the id `{shorten(str(item.record))}`"
                raise UserError(what, where=where)
            given = of_item[stored["id"]]
            new = []
            for answer in item.answers:
                before = next((each for each in given if each.annotator == answer.annotator), None)
                if before is None:
                    new.append(_answer_row(stored["id"], answer))
                elif (before.status, before.answer) == (answer.status, answer.answer):
                    result.repeated += 1
                else:
                    raise UserError(f"`{answer.annotator}` has answered this item otherwise already", where=where)
            keys = queue.metadata.insert_rows(label_answers, new)
            result.answers += len(new)
            if not new:
                continue
            internal = ("item", "position")
            given += [
                GivenAnswer(id=key["id"], **{name: value for name, value in row.items() if name not in internal})
                for key, row in zip(keys, new, strict=True)
            ]
            values: dict[str, Any] = {"answered": sum(each.status == "answered" for each in given)}
            if stored["expected"] is None and stored["status"] in ("open", "review"):
                base = batch.settings["overlap"] + stored["checked"]
                outcome = settle(given, kind, base=base, skips=batch.settings["skips"])
                values |= {"status": outcome.status, "wanted": outcome.wanted, "resolution": outcome.resolution}
            queue.metadata.update_rows(label_items, label_items.c.id == stored["id"], values)


def _item_row(batch: Batch, item: PortableItem, number: int) -> dict[str, Any]:
    details, settings = dict(item.details), batch.settings
    given = [_given(answer) for answer in item.answers]
    answered = sum(answer.status == "answered" for answer in item.answers)
    draw = (
        settings["overlap"] == 1
        and not given
        and hash_fraction(settings["seed"], "check", item.record) < settings["check"]
    )
    checked = bool(details.get("checked", draw and item.expected is None))
    row = {
        "batch": batch.name,
        "record": item.record,
        "priority": float(details.get("priority", -float(number) if item.expected is None else 0.0)),
        "content": dict(item.content),
        "suggestion": None if item.suggestion is None else dict(item.suggestion),
        "reason": details.get("reason"),
        "expected": item.expected,
        "checked": checked,
        "answered": answered,
    }
    if item.expected is not None:
        return row | {"wanted": 0, "status": "open", "resolution": None}
    if "status" in details:
        return row | {name: details.get(name) for name in ("status", "wanted", "resolution")}
    outcome = settle(given, KINDS[batch.kind], base=settings["overlap"] + checked, skips=settings["skips"])
    return row | {"wanted": outcome.wanted, "status": outcome.status, "resolution": outcome.resolution}


def _answer_row(item: int, answer: PortableAnswer) -> dict[str, Any]:
    created = answer.details.get("created_at")
    row = {name: answer.details.get(name) for name in ANSWER_COLUMNS}
    stored = {"item": item, "annotator": answer.annotator, "status": answer.status, "answer": answer.answer}
    time = utc_now() if created is None else datetime.fromisoformat(created)
    return {**stored, **row, "guideline": answer.details.get("guideline", 0), "created_at": time}


def _given(answer: PortableAnswer) -> GivenAnswer:
    """Returns an answer as `settle` reads it."""
    return GivenAnswer(
        id=0,
        annotator=answer.annotator,
        status=answer.status,
        answer=answer.answer,
        note=None,
        seconds=None,
        suggestion=None,
        confidence=None,
        guideline=0,
        created_at=utc_now(),
    )


def _chunks(items: Iterable[tuple[str, PortableItem]]) -> Iterator[list[tuple[str, PortableItem]]]:
    chunk: list[tuple[str, PortableItem]] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
