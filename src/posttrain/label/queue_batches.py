"""The queue's batches: adding items, progress, the answers as a table, and the versions of the guideline."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from sqlalchemy import ColumnElement, Connection, RowMapping, and_, func, select

from posttrain.label.answer_kinds import KINDS, Question, answer_kind
from posttrain.label.answers import ANSWERS, mark_deciding
from posttrain.label.queue_rows import (
    Batch,
    GivenAnswer,
    Item,
    NewItem,
    Progress,
    QueueConfig,
    check_confidence,
    hash_fraction,
)
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.database import lock_table, utc_now
from posttrain.store.errors import UserError
from posttrain.store.label_tables import (
    accounts,
    guidelines,
    label_answers,
    label_batches,
    label_items,
    label_leases,
)
from posttrain.store.message import Message
from posttrain.store.metadata import Metadata

LABELLERS = ("owner", "reviewer", "annotator")
"""Roles of the people who answer."""

_TEAM_CHECK = 0.05  # share of checked items where two people have accounts

# Columns of the table of answers that are read as they are.
_PLAIN_COLUMNS = (
    *("item", "record", "batch", "annotator", "seconds", "confidence", "checked", "guideline"),
    "created_at",
)

COUNTS = label_answers.c.undone_at.is_(None)
IS_GOLD = label_items.c.expected.is_not(None)


class BatchQueries:
    """Batches and what became of them.

    Args:
        metadata: The workspace's database.
        config: The config section ``label.queue``, for batches that are added.
        now: Returns the time in UTC.
    """

    def __init__(
        self, metadata: Metadata, config: QueueConfig | None = None, now: Callable[[], datetime] = utc_now
    ) -> None:
        self.metadata, self.config, self.now = metadata, config or QueueConfig(), now

    def add_batch(
        self,
        name: str,
        kind: str,
        items: Sequence[NewItem],
        *,
        labels: Sequence[str] | None = None,
        gold: Sequence[NewItem] = (),
        round: int | None = None,
        selection: str | None = None,
        seed: int = 0,
    ) -> Batch:
        """Adds a batch in one transaction.

        Args:
            name: Its name, such as ``round-3``.
            kind: One of `posttrain.label.answer_kinds.KINDS`.
            items: The items; without priorities the first is shown first.
            labels: The closed label set; None for open-ended answers.
            gold: Items with ``expected``, which are mixed in and do not belong to the result.
            round: The round that waits for the batch.
            selection: The artifact that the items are from.
            seed: Decides which items are checked, which gold items are shown when, and which suggestions are planted.

        Raises:
            Conflict: there is a batch of this name.
            UserError: an item does not fit, or a record is there twice.
        """
        rows = self._item_rows(name, kind, items, gold, labels, seed)
        settings = {**self.config.model_dump(mode="json"), "seed": seed, "gold": len(gold), "check": self._check()}
        row = {
            "name": name,
            "round": round,
            "selection": selection,
            "kind": kind,
            "labels": None if labels is None else list(labels),
            "settings": settings,
            "status": "open",
            "created_at": self.now(),
        }
        with self.metadata.transaction() as connection:
            lock_table(connection, label_batches)
            if self.batch(name) is not None:
                raise Conflict(f"there is a batch `{name}` already", fix="give another name")
            self.metadata.insert_row(label_batches, row)
            self.metadata.insert_rows(label_items, rows)
            return self._batch(name)

    def batch(self, name: str) -> Batch | None:
        """Returns the batch, or None."""
        return next(iter(self._batches(label_batches.c.name == name)), None)

    def batches(self, status: str | None = None) -> list[Batch]:
        """Returns all batches (of a status, ``open`` or ``done``), oldest first."""
        return self._batches() if status is None else self._batches(label_batches.c.status == status)

    def finish_batch(self, name: str, *, partial: bool = False) -> None:
        """Closes a batch: its answers are taken up, and nothing in it changes any more. A closed batch stays as it is.

        Args:
            name: Its name.
            partial: True leaves items that are open or in review undecided for good.

        Raises:
            NotFound: there is no such batch.
            Conflict: items are still open or in review.
        """
        with self.metadata.transaction() as connection:
            batch = self._locked_batch(connection, name)
            if batch.status == "done":
                return
            progress = self.progress(name)
            if progress.undecided and not partial:
                message = Message("{count} items of `{name}` are not answered yet", count=progress.undecided, name=name)
                raise Conflict(message, fix="answer, resolve or drop them")
            self.metadata.update_rows(
                label_batches, label_batches.c.name == name, {"status": "done", "finished_at": self.now()}
            )
            items = select(label_items.c.id).where(label_items.c.batch == name)
            connection.execute(label_leases.delete().where(label_leases.c.item.in_(items)))

    def progress(self, name: str) -> Progress:
        """Returns the progress of a batch.

        Raises:
            NotFound: there is no such batch.
        """
        with self.metadata.reading() as connection:
            batch = self._batch(name)
            asked = (label_items.c.batch == name) & ~IS_GOLD
            wanted, answered = func.sum(label_items.c.wanted), func.sum(label_items.c.answered)
            query = select(label_items.c.status, func.count(), wanted, answered).where(asked)
            rows = connection.execute(query.group_by(label_items.c.status)).all()
            rate = self._rate(connection, name)
        counts = {status: count for status, count, _, _ in rows}
        is_open = batch.status == "open"
        left = sum(wanted - answered for status, _, wanted, answered in rows if is_open and status == "open")
        return Progress(
            batch=name,
            status=batch.status,
            items=sum(counts.values()),
            **{status: counts.get(status, 0) for status in ("open", "review", "done", "dropped")},
            answers=sum(answered for _, _, _, answered in rows),
            left=left,
            rate=rate,
            done_at=self.now() + timedelta(hours=left / rate) if left and rate else None,
        )

    def count_answers(self, batch: str, annotator: str) -> int:
        """Counts the answers of an annotator in a batch, those to gold items among them."""
        query = select(func.count()).select_from(label_answers).join(label_items)
        by_annotator = (label_items.c.batch == batch) & (label_answers.c.annotator == annotator)
        with self.metadata.reading() as connection:
            return connection.scalar(query.where(by_annotator, COUNTS, label_answers.c.status == "answered")) or 0

    def count_people(self) -> int:
        """Counts the people with accounts who may answer."""
        query = select(func.count()).where(accounts.c.role.in_(LABELLERS), accounts.c.closed_at.is_(None))
        with self.metadata.reading() as connection:
            return connection.scalar(query) or 0

    def item(self, id: int) -> Item:
        """Returns an item with its answers.

        Raises:
            NotFound: there is none.
        """
        for item in self._items(label_items.c.id == id):
            return item
        raise NotFound(f"there is no item {id}")

    def items(self, batch: str, status: str | None = None, *, gold: bool = False) -> list[Item]:
        """Returns the items of a batch (of a status) with their answers, the highest priority first.

        Args:
            batch: Name of the batch.
            status: ``open``, ``review``, ``done`` or ``dropped``; None: all.
            gold: True: the gold items, False: the others.
        """
        of_batch = (label_items.c.batch == batch) & (IS_GOLD if gold else ~IS_GOLD)
        return self._items(of_batch if status is None else of_batch & (label_items.c.status == status))

    def dropped_records(self, until_round: int) -> list[str]:
        """Returns the ids of the records that people took out of closed batches up to a round's, sorted."""
        query = (
            select(label_items.c.record)
            .join(label_batches)
            .where(label_items.c.status == "dropped", label_batches.c.status == "done")
            .where(label_batches.c.round <= until_round)
            .order_by(label_items.c.record)
        )
        with self.metadata.reading() as connection:
            return sorted(set(connection.scalars(query)))

    def answers(self, batch: str | None = None) -> pa.Table:
        """Returns the answers of a batch, or of all, by the schema `posttrain.label.answers.ANSWERS`."""
        answer, item = label_answers.c, label_items.c
        query = (
            select(
                *(answer.item, item.record, item.batch, answer.annotator, answer.answer, item.expected),
                *(item.resolution, answer.suggestion, answer.seconds, answer.confidence),
                *(item.checked, answer.guideline, answer.created_at, label_batches.c.kind, label_batches.c.settings),
            )
            .join(label_items, answer.item == item.id)
            .join(label_batches, item.batch == label_batches.c.name)
            .where(COUNTS, answer.status == "answered")
            .order_by(answer.id)
        )
        if batch is not None:
            query = query.where(item.batch == batch)
        with self.metadata.reading() as connection:
            rows = connection.execute(query).mappings().all()
        wanted = {row["item"]: row["settings"]["overlap"] + row["checked"] for row in rows if row["expected"] is None}
        deciding = mark_deciding([row["item"] for row in rows], wanted)
        values = [{**_answer_row(row), "deciding": mark} for row, mark in zip(rows, deciding, strict=True)]
        return pa.Table.from_pylist(values, schema=ANSWERS)

    def add_guideline(self, text: str, author: str, note: str | None = None) -> int:
        """Adds a version of the guideline in Markdown, which counts from now on; returns its number, from 1.

        A text that is the newest version's adds no version.
        """
        with self.metadata.transaction() as connection:
            lock_table(connection, guidelines)
            newest = self.guideline()
            if newest is not None and newest["text"] == text:
                return int(newest["version"])
            version = 1 + (newest["version"] if newest is not None else 0)
            row = {"version": version, "text": text, "author": author, "note": note, "created_at": self.now()}
            self.metadata.insert_row(guidelines, row)
            return int(version)

    def guideline(self, version: int | None = None) -> dict[str, Any] | None:
        """Returns a version of the guideline, or the newest: ``version, text, author, note, created_at``; or None."""
        return next((row for row in reversed(self.guidelines()) if version in (None, row["version"])), None)

    def guidelines(self) -> list[dict[str, Any]]:
        """Returns all versions of the guideline, oldest first."""
        with self.metadata.reading() as connection:
            rows = connection.execute(select(guidelines).order_by(guidelines.c.version)).mappings()
            return [dict(row) for row in rows]

    def outdated_answers(self, version: int | None = None, batch: str | None = None) -> list[dict[str, Any]]:
        """Returns answers that were given under an earlier guideline than ``version`` (None: the newest).

        Returns:
            ``answer_id, item, record, batch, annotator, answer, guideline``, in the order in which they were given.
        """
        with self.metadata.reading() as connection:
            newest = connection.scalar(newest_guideline()) if version is None else version
            query = (
                select(
                    label_answers.c.id.label("answer_id"),
                    *(label_answers.c.item, label_items.c.record, label_items.c.batch),
                    *(label_answers.c.annotator, label_answers.c.answer, label_answers.c.guideline),
                )
                .join(label_items, label_answers.c.item == label_items.c.id)
                .where(COUNTS, label_answers.c.status == "answered", label_answers.c.guideline < newest)
                .where(label_items.c.status != "dropped", ~IS_GOLD)
                .order_by(label_answers.c.id)
            )
            if batch is not None:
                query = query.where(label_items.c.batch == batch)
            return [dict(row) for row in connection.execute(query).mappings()]

    def _check(self) -> float:
        """Returns the share of items to check."""
        if self.config.check is not None:
            return self.config.check
        # One person alone could never answer an item a second time, and the batch would never end.
        return _TEAM_CHECK if self.count_people() > 1 else 0.0

    def _item_rows(
        self,
        batch: str,
        kind: str,
        items: Sequence[NewItem],
        gold: Sequence[NewItem],
        labels: Sequence[str] | None,
        seed: int,
    ) -> list[dict[str, Any]]:
        checker, check, overlap = answer_kind(kind), self._check(), self.config.overlap
        if len({item.record for item in items}) < len(items):
            raise UserError(f"a record is twice in the batch `{batch}`", fix="leave the second one out")
        rows = []
        for number, item in enumerate(items):
            # Without a second answer wanted anyway: overlap is a check already.
            checked = overlap == 1 and hash_fraction(seed, "check", item.record) < check
            row = _item_row(batch, item, -float(number), overlap + checked)
            rows.append(row | {"checked": checked, "expected": None})
        for item in gold:
            expected = checker.check(item.expected, Question(item.content, labels))
            like = items[int(hash_fraction(seed, "like", item.record) * len(items))] if items else item
            row = _item_row(batch, _like(item, expected, like, checker.others(expected, labels or ()), seed), 0.0, 0)
            rows.append(row | {"checked": False, "expected": expected})
        # Between the others, as annotators see ids: behind all others, they would tell which items are gold.
        positions = [number / max(len(items), 1) for number in range(len(items))]
        positions += [hash_fraction(seed, "place", item.record) for item in gold]
        return [rows[at] for at in sorted(range(len(rows)), key=positions.__getitem__)]

    def _rate(self, connection: Connection, batch: str) -> float | None:
        at = label_answers.c.created_at
        of_batch = and_(COUNTS, label_answers.c.status == "answered", label_items.c.batch == batch, ~IS_GOLD)
        joined = label_answers.join(label_items, label_answers.c.item == label_items.c.id)
        last: datetime | None = connection.scalar(select(func.max(at)).select_from(joined).where(of_batch))
        if last is None:
            return None
        recent = of_batch & (at >= last - timedelta(hours=1))
        count, first = connection.execute(select(func.count(), func.min(at)).select_from(joined).where(recent)).one()
        span = (last - first).total_seconds() / 3600
        # One answer begins the time that the others are counted in.
        return (count - 1) / span if count > 1 and span > 0 else None

    def _batch(self, name: str) -> Batch:
        batch = self.batch(name)
        if batch is None:
            raise NotFound(f"there is no batch `{name}`")
        return batch

    def _locked_batch(self, connection: Connection, name: str) -> Batch:
        connection.execute(select(label_batches.c.name).where(label_batches.c.name == name).with_for_update())
        return self._batch(name)

    def _batches(self, *conditions: ColumnElement[bool]) -> list[Batch]:
        query = select(label_batches).where(*conditions).order_by(label_batches.c.created_at, label_batches.c.name)
        with self.metadata.reading() as connection:
            return [Batch(**row) for row in connection.execute(query).mappings()]

    def _items(self, condition: ColumnElement[bool]) -> list[Item]:
        query = select(label_items, label_batches.c.kind, label_batches.c.labels).join(label_batches).where(condition)
        given = select(label_answers).join(label_items).where(condition, COUNTS).order_by(label_answers.c.id)
        with self.metadata.reading() as connection:
            rows = connection.execute(query.order_by(label_items.c.priority.desc(), label_items.c.id)).mappings().all()
            answers_of: dict[int, list[GivenAnswer]] = {}
            for row in connection.execute(given).mappings():
                answers_of.setdefault(row["item"], []).append(given_answer(row))
        return [Item(**row, answers=answers_of.get(row["id"], ())) for row in rows]


def newest_guideline() -> Any:
    """Returns the query for the number of the newest guideline, 0 before there is one."""
    return select(func.coalesce(func.max(guidelines.c.version), 0))


def given_answer(row: RowMapping) -> GivenAnswer:
    """Returns an answer from its row."""
    internal = ("item", "undone_at")
    return GivenAnswer(**{name: value for name, value in row.items() if name not in internal})


def _item_row(batch: str, item: NewItem, priority: float, wanted: int) -> dict[str, Any]:
    if item.suggestion is not None:
        check_confidence(item.suggestion.get("confidence"), f"the suggestion for record {item.record}")
    return {
        "batch": batch,
        "record": item.record,
        "priority": priority if item.priority is None else float(item.priority),
        "content": dict(item.content),
        "suggestion": None if item.suggestion is None else dict(item.suggestion),
        "reason": item.reason,
        "wanted": wanted,
        "answered": 0,
        "status": "open",
    }


def _like(gold: NewItem, expected: Any, other: NewItem, wrong: Sequence[Any], seed: int) -> NewItem:
    """Returns a gold item with a reason and a suggestion like those of another item, or their absence would show it."""
    suggestion = gold.suggestion
    if suggestion is None and other.suggestion is not None and wrong:
        # As often right as the model says that it is: a suggestion that is always right would teach people to accept.
        confidence = other.suggestion.get("confidence")
        is_right = hash_fraction(seed, "right", gold.record) < (0.5 if confidence is None else confidence)
        answer = expected if is_right else wrong[int(hash_fraction(seed, "wrong", gold.record) * len(wrong))]
        suggestion = {**other.suggestion, "answer": answer}
    return replace(gold, suggestion=suggestion, reason=gold.reason or other.reason)


def _answer_row(row: RowMapping) -> dict[str, Any]:
    kind, resolution, suggestion = KINDS[row["kind"]], row["resolution"] or {}, row["suggestion"] or {}
    answers = {
        **{"answer": row["answer"], "expected": row["expected"]},
        **{"resolution": resolution.get("answer"), "suggestion": suggestion.get("answer")},
    }
    return {
        **{name: row[name] for name in _PLAIN_COLUMNS},
        **{name: None if answer is None else kind.key(answer) for name, answer in answers.items()},
        "resolved_by": resolution.get("how"),
        "planted": suggestion.get("planted", False),
    }
