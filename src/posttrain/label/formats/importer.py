"""Imports a file as a batch of the queue, or its answers into a batch that is there."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import RowMapping, select

from posttrain.label.answer_kinds import KINDS
from posttrain.label.formats.checks import checked_item
from posttrain.label.formats.exporter import FORMATS
from posttrain.label.formats.files import read_json_records
from posttrain.label.formats.items import (
    ANSWER_COLUMNS,
    Format,
    PortableAnswer,
    PortableItem,
    Shape,
    Survey,
    shown_text,
)
from posttrain.label.formats.positions import UnitChoice, check_unit, move_positions
from posttrain.label.queue import Queue
from posttrain.label.queue_batches import COUNTS, given_answer
from posttrain.label.queue_review import settle
from posttrain.label.queue_rows import Batch, GivenAnswer, hash_fraction
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError, shorten
from posttrain.store.hashing import digest
from posttrain.store.label_tables import label_answers, label_batches, label_items
from posttrain.store.progress import Advance, progress_bar
from posttrain.store.text_files import normalise_text

_CHUNK = 1000


@dataclass
class ImportResult:
    """Counts of an import.

    Attributes:
        created: True if the batch is new.
        repeated: Answers that were in the batch already.
        left_out: Number of parts without a meaning here, by name.
        first_left_out: Place of the first of each of them.
        uncertain: Places of records with spans whose positions mean other words in another unit.
    """

    batch: str
    format: str
    kind: str
    created: bool
    items: int = 0
    answers: int = 0
    gold: int = 0
    repeated: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first_left_out: dict[str, str] = field(default_factory=dict)
    uncertain: Sequence[str] = ()


@dataclass(frozen=True)
class ImportOptions:
    """How a file is imported.

    Attributes:
        format: Name of its format; None: seen from its content.
        batch: Name of the batch; None: of the file. If there is one of this name, answers are added to its items.
        kind: Kind of its answers; None: seen from its content.
        question: Which of several questions is the one; None: that with the most answers.
        annotator: Who answered, in a file that does not say so; None: the file's name.
        field: Name of the text to label; None: one of `posttrain.label.formats.items.TEXT_KEYS`.
        gold: True if its answers are those that annotators are measured by.
        positions: Unit of the positions of spans; None: seen from the words of the spans.
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
    positions: str | None = None


def import_queue(queue: Queue, path: Path, options: ImportOptions) -> ImportResult:
    """Reads a file into a new batch, or its answers into the batch that is named; all of it or nothing.

    Raises:
        UserError: the file cannot be read as this format, or an answer does not fit, with the record's place.
    """
    name = str(path)
    format = FORMATS[options.format or detect_format(path, name)]
    survey, total = Survey(), 0
    for record in format.records(path, name):
        format.survey(record.value, survey)
        total += 1
    if not total:
        raise UserError("the file has no records", where=name)
    existing = queue.batch(options.batch or path.stem)
    if existing is not None and options.batch is None and (options.gold or existing.round is not None):
        existing = None  # only a batch of the file itself is meant without a name
    kind = options.kind or (existing.kind if existing else None)
    shape = survey.shape(kind, options.question, options.labels, options.annotator or path.stem, options.field)
    check_unit(options.positions, shape.kind)
    if existing:
        shape = replace(shape, labels=None if existing.labels is None else tuple(existing.labels))
    batch = options.batch or path.stem
    result = ImportResult(batch, format.name, shape.kind, created=existing is None)
    units = UnitChoice(options.positions) if shape.kind == "spans" else None
    if units is not None:
        for record in format.records(path, name):
            units.add(format.read(record.value, shape, record.where, Counter()))
    with progress_bar(f"import {path.name}", total) as advance, queue.metadata.transaction():
        items = _read_file(format, path, shape, options, result, units, advance)
        if existing is None:
            _add_batch(queue, batch, shape, items, result)
            _check_new(queue, batch, result, name)
        else:
            queue.lower_overlap(batch)
            _add_answers(queue, queue.batch(batch) or existing, items, result)
    result.uncertain = units.uncertain if units else ()
    return result


def detect_format(path: Path, name: str) -> str:
    """Returns the name of a file's format, by its suffix and its first record.

    Raises:
        UserError: the file cannot be read, or has no records.
    """
    if path.suffix.lower() in (".csv", ".tsv"):
        return "csv"
    first = next(read_json_records(path, name), None)
    if first is None:
        raise UserError("the file has no records", where=name)
    return "label-studio" if isinstance(first.value.get("data"), Mapping) else "jsonl"


def _read_file(
    format: Format,
    path: Path,
    shape: Shape,
    options: ImportOptions,
    result: ImportResult,
    units: UnitChoice | None,
    advance: Advance,
) -> Iterator[tuple[str, PortableItem]]:
    """Yields the items of a file, checked, each with its place in errors."""
    for record in format.records(path, str(path)):
        left_out: Counter[str] = Counter()
        item = format.read(record.value, shape, record.where, left_out)
        for part in +left_out:
            result.first_left_out.setdefault(part, record.where)
        result.left_out += left_out
        if units is not None:
            item = units.read(item, record.where)
        item = checked_item(_as_gold(item, shape, record.where) if options.gold else item, shape, record.where)
        yield record.where, item
        advance(1)


def _as_gold(item: PortableItem, shape: Shape, where: str) -> PortableItem:
    """Returns an item whose only answer is the right one."""
    if item.expected is not None:
        return item
    answers = {KINDS[shape.kind].key(each.answer): each for each in item.answers if each.status == "answered"}
    if len(answers) != 1:
        what = "has no answer" if not answers else "has several answers"
        raise UserError(f"{what}, and a gold item needs one", where=where)
    return replace(item, expected=next(iter(answers.values())).answer, answers=(), details={})


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
            for key, (_, item) in zip(keys, chunk, strict=True)
            for answer in item.answers
        ]
        queue.metadata.insert_rows(label_answers, given)
        result.items += len(rows)
        result.answers += len(given)
        result.gold += sum(item.expected is not None for _, item in chunk)
    settings = {**batch.settings, "gold": result.gold}
    queue.metadata.update_rows(label_batches, label_batches.c.name == name, {"settings": settings})


def _check_new(queue: Queue, name: str, result: ImportResult, where: str) -> None:
    """Checks that a new batch is not a copy of another one, whose answers would count twice.

    Raises:
        UserError: another batch of no round holds all of it.
    """

    def contents(batch: str) -> dict[str, Any]:
        return {
            item.record: (item.content, sorted((each.annotator, str(each.answer)) for each in item.answers))
            for item in queue.items(batch)
        }

    if not result.answers:
        return
    own = contents(name)
    others = [each.name for each in queue.batches() if each.round is None and each.kind == result.kind]
    for other in others:
        if other != name and queue.progress(other).items == len(own) and contents(other) == own:
            what = f"the batch `{other}` holds all of its items and answers already"
            raise UserError(what, where=where, fix=f"--batch {other} adds what is new")


def _add_answers(queue: Queue, batch: Batch, items: Iterable[tuple[str, PortableItem]], result: ImportResult) -> None:
    """Adds the answers of a file to the items of a batch, and decides the items again."""
    if batch.status != "open":
        raise UserError(f"the batch `{batch.name}` is closed, and its answers are in use", fix="name another batch")
    texts: dict[str, str | None] = {}
    for chunk in _chunks(items):
        records = [str(item.record) for _, item in chunk]
        stored, given = _stored_items(queue, batch, records)
        if len(stored) < len(set(records)):
            # Another tool's ids: its file tells the records by their texts.
            texts = texts or _records_by_text(queue, batch)
            records = [
                record if record in stored else texts.get(_text_key(item.content)) or record
                for record, (_, item) in zip(records, chunk, strict=True)
            ]
            stored, given = _stored_items(queue, batch, records)
        for record, (where, item) in zip(records, chunk, strict=True):
            result.items += 1
            if (row := stored.get(record)) is None:
                what = f"no record of the batch `{batch.name}` has the id `{shorten(record)}`, or this text alone"
                raise UserError(what, where=where, fix="--batch NEW makes a batch of the file, whose labels train too")
            if batch.kind == "spans":
                item = move_positions(item, row["content"], where)
            before = given[row["id"]]
            new = [_answer_row(row["id"], answer) for answer in _new_answers(item, before, where)]
            result.answers += len(new)
            result.repeated += len(item.answers) - len(new)
            if new:
                keys = queue.metadata.insert_rows(label_answers, new)
                before += [_given_answer(key["id"], answer) for key, answer in zip(keys, new, strict=True)]
                _decide(queue, batch, row, before)


def _records_by_text(queue: Queue, batch: Batch) -> dict[str, str | None]:
    """Returns the record of each text that a batch's items show; None where several show it."""
    query = select(label_items.c.record, label_items.c.content).where(label_items.c.batch == batch.name)
    records: dict[str, str | None] = {}
    with queue.metadata.transaction() as connection:
        for record, content in connection.execute(query):
            key = _text_key(content)
            records[key] = None if key in records else record
    return records


def _text_key(content: Mapping[str, Any]) -> str:
    return digest([normalise_text(shown_text(content)), content.get("candidates"), content.get("answer")])


def _stored_items(
    queue: Queue, batch: Batch, records: Sequence[str]
) -> tuple[dict[str, RowMapping], dict[int, list[GivenAnswer]]]:
    """Returns the rows of a batch's items by record, and the answers that count by item."""
    query = select(label_items).where(label_items.c.batch == batch.name, label_items.c.record.in_(records))
    with queue.metadata.transaction() as connection:
        # Locked: on PostgreSQL annotators answer meanwhile.
        rows = {row["record"]: row for row in connection.execute(query.with_for_update()).mappings()}
        given: dict[int, list[GivenAnswer]] = {row["id"]: [] for row in rows.values()}
        answers = select(label_answers).where(label_answers.c.item.in_(given), COUNTS).order_by(label_answers.c.id)
        for row in connection.execute(answers).mappings():
            given[row["item"]].append(given_answer(row))
    return rows, given


def _new_answers(item: PortableItem, given: Sequence[GivenAnswer], where: str) -> list[PortableAnswer]:
    """Returns the answers of a file's item that are not there yet.

    Raises:
        UserError: an annotator has given another answer to it.
    """
    before = {answer.annotator: (answer.status, answer.answer) for answer in given}
    for answer in item.answers:
        if before.get(answer.annotator, (answer.status, answer.answer)) != (answer.status, answer.answer):
            raise UserError(f"`{answer.annotator}` has answered this item otherwise already", where=where)
    return [answer for answer in item.answers if answer.annotator not in before]


def _decide(queue: Queue, batch: Batch, row: RowMapping, given: Sequence[GivenAnswer]) -> None:
    values: dict[str, Any] = {"answered": sum(answer.status == "answered" for answer in given)}
    if row["expected"] is None and row["status"] in ("open", "review"):
        base = batch.settings["overlap"] + row["checked"]
        outcome = settle(given, KINDS[batch.kind], base=base)
        values |= {"status": outcome.status, "wanted": outcome.wanted, "resolution": outcome.resolution}
    queue.metadata.update_rows(label_items, label_items.c.id == row["id"], values)


def _item_row(batch: Batch, item: PortableItem, number: int) -> dict[str, Any]:
    details, settings = dict(item.details), batch.settings
    draw = (
        settings["overlap"] == 1
        and not item.answers
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
        "answered": sum(answer.status == "answered" for answer in item.answers),
    }
    if item.expected is not None:
        return row | {"wanted": 0, "status": "open", "resolution": None}
    if "status" in details:
        return row | {name: details.get(name) for name in ("status", "wanted", "resolution")}
    given = [_given_answer(0, _answer_row(0, answer)) for answer in item.answers]
    outcome = settle(given, KINDS[batch.kind], base=settings["overlap"] + checked)
    return row | {"wanted": outcome.wanted, "status": outcome.status, "resolution": outcome.resolution}


def _answer_row(item: int, answer: PortableAnswer) -> dict[str, Any]:
    created = answer.details.get("created_at")
    row = {name: answer.details.get(name) for name in ANSWER_COLUMNS}
    stored = {"item": item, "annotator": answer.annotator, "status": answer.status, "answer": answer.answer}
    time = utc_now() if created is None else datetime.fromisoformat(created)
    return {**stored, **row, "guideline": answer.details.get("guideline", 0), "created_at": time}


def _given_answer(id: int, row: Mapping[str, Any]) -> GivenAnswer:
    return GivenAnswer(id=id, **{name: value for name, value in row.items() if name != "item"})


def _chunks(items: Iterable[tuple[str, PortableItem]]) -> Iterator[list[tuple[str, PortableItem]]]:
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, _CHUNK)), [])
