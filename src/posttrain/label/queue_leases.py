"""Leases: gives each annotator the next item, for a time in which others are given other items."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, select, update

from posttrain.label.answer_kinds import KINDS
from posttrain.label.queue_batches import COUNTS, IS_GOLD, newest_guideline
from posttrain.label.queue_review import ReviewQueries
from posttrain.label.queue_rows import Batch, PausedError, QueueConfig, Task, hash_fraction, is_drawn_evenly
from posttrain.label.tokens import Conflict
from posttrain.store.commit_group import CommitGroup
from posttrain.store.database import insert_or_update, utc_now
from posttrain.store.label_tables import accounts, label_answers, label_items, label_leases
from posttrain.store.metadata import Metadata

LEASE_MINUTES = 10.0
"""For so long an item is one annotator's; then others may be given it."""


class LeaseQueries(ReviewQueries):
    """Items on loan to annotators."""

    def __init__(
        self, metadata: Metadata, config: QueueConfig | None = None, now: Callable[[], datetime] = utc_now
    ) -> None:
        super().__init__(metadata, config, now)
        self._commits = CommitGroup(metadata)

    def next(self, annotator: str, batch: str | None = None, besides: Sequence[int] = ()) -> Task | None:
        """Leases the annotator the next item, or returns the item that they have a lease of, with a new end.

        Never an item that they have answered, skipped or flagged, and never one that others are answering already as
        often as it is wanted. The oldest open batch comes first, and in it the highest priority; at the batch's rate,
        decided by the annotator's name and the count of their answers, a gold item comes in between.

        Args:
            annotator: Name of the account.
            batch: Only items of this batch; None: of every open one.
            besides: Items that they have a lease of: a page fetches the next one while the present one is shown.

        Returns:
            None if there is nothing for them to answer at the moment.

        Raises:
            PausedError: the account is paused; the message is the sentence to its person.
        """
        return self._commits.run(lambda: self._next(annotator, batch, besides))

    def renew(self, item: int, annotator: str) -> datetime:
        """Extends the lease of an item that somebody works on for long; returns its new end.

        Raises:
            Conflict: the lease has ended and others may be answering the item.
        """

        def work() -> datetime:
            with self.metadata.transaction() as connection:
                self._item_row(connection, item, locked=True)
                lease, _ = self._leases(connection, item, annotator)
                if lease is None or lease["ends_at"] <= self.now():
                    raise Conflict("your time for this item has ended", fix="ask for the next one")
                return self._renew(connection, item, annotator)

        return self._commits.run(work, order=item)

    def give_back(self, item: int, annotator: str) -> None:
        """Ends the lease of an item unanswered, so that others are given it at once, or the annotator again."""
        with self.metadata.transaction() as connection:
            connection.execute(delete(label_leases).where(lease_of(item, annotator)))

    def _next(self, annotator: str, batch: str | None, besides: Sequence[int]) -> Task | None:
        with self.metadata.transaction() as connection:
            paused = select(accounts.c.paused).where(accounts.c.name == annotator).scalar_subquery()
            sentence, guideline = connection.execute(select(paused, newest_guideline().scalar_subquery())).one()
            if sentence is not None:
                raise PausedError(sentence)
            row = self._held_item(connection, annotator, batch, besides)
            if row is not None:
                return task_of(row, annotator, self._renew(connection, row["id"], annotator))
            for each in self.batches("open"):
                if batch not in (None, each.name):
                    continue
                row = self._free_item(connection, each, annotator, besides)
                if row is not None:
                    row = self._gold_item(connection, each, annotator, besides) or row
                    of_batch = {"kind": each.kind, "labels": each.labels, "settings": each.settings}
                    row = {**row, **of_batch, "guideline": guideline}
                    return task_of(row, annotator, self._lease(connection, row["id"], annotator))
        return None

    def _held_item(
        self, connection: Connection, annotator: str, batch: str | None, besides: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Returns the item, none of ``besides``, that the annotator has a lease of and may still answer."""
        lease = label_leases.c
        query = select(lease.item).where(lease.annotator == annotator, lease.ends_at > self.now())
        # Not joined with the items: a database without statistics would read all of them.
        for id in connection.scalars(query.order_by(lease.started_at, lease.item)).all():
            if id not in besides:
                row = self._item_row(connection, id)
                if row["status"] == row["batch_status"] == "open" and batch in (None, row["batch"]):
                    return row
        return None

    def _free_item(
        self, connection: Connection, batch: Batch, annotator: str, besides: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Locks and returns the item of the highest priority that is free for the annotator."""
        item, lease = label_items.c, label_leases.c
        others = (lease.item == item.id) & (lease.annotator != annotator) & (lease.ends_at > self.now())
        held = select(func.count()).select_from(label_leases).where(others).scalar_subquery()
        query = (
            select(label_items)
            .where(item.status == "open", item.batch == batch.name, ~IS_GOLD, item.answered + held < item.wanted)
            .where(~_has_answered(item.id, annotator))
            .order_by(item.priority.desc(), item.id)
            .limit(1)
            .with_for_update(skip_locked=True, of=label_items)
        )
        taken = list(besides)
        while True:
            first = connection.execute(query.where(item.id.not_in(taken)) if taken else query).mappings().first()
            row = None if first is None else dict(first)
            # PostgreSQL locks the row that the query saw: another transaction may have leased it since, and ended.
            if row is None or connection.dialect.name == "sqlite" or self._is_free(connection, row, annotator):
                return row
            taken.append(row["id"])

    def _is_free(self, connection: Connection, row: Mapping[str, Any], annotator: str) -> bool:
        """Returns whether an open item that is locked may be leased to the annotator."""
        _, others = self._leases(connection, row["id"], annotator)
        is_wanted = row["expected"] is not None or row["answered"] + others < row["wanted"]
        return is_wanted and not connection.scalar(select(_has_answered(row["id"], annotator)))

    def _leases(self, connection: Connection, item: int, annotator: str) -> tuple[Mapping[str, Any] | None, int]:
        """Returns the annotator's lease of an item, ended or not, and the number of those of others that have not."""
        query = select(label_leases).where(label_leases.c.item == item)
        rows: dict[str, dict[str, Any]] = {row["annotator"]: dict(row) for row in connection.execute(query).mappings()}
        own = rows.pop(annotator, None)
        return own, sum(row["ends_at"] > self.now() for row in rows.values())

    def _gold_item(
        self, connection: Connection, batch: Batch, annotator: str, besides: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Returns a gold item that the annotator has never seen, if it is time for one."""
        if not batch.settings["gold"]:
            return None
        item, answer = label_items.c, label_answers.c
        of_batch = select(func.count()).select_from(label_answers).join(label_items).where(item.batch == batch.name)
        # Items fetched ahead count as answered: else the same draw would decide several of them.
        count = (connection.scalar(of_batch.where(COUNTS, answer.annotator == annotator)) or 0) + len(besides)
        if not is_drawn_evenly(batch.settings["gold_rate"], count, batch.settings["seed"], batch.name, annotator):
            return None
        # By record: the same gold items come with every batch.
        seen = (
            select(item.record)
            .join(label_answers, answer.item == item.id)
            .where(COUNTS, answer.annotator == annotator, IS_GOLD)
        )
        ahead = select(item.record).where(item.id.in_(besides))
        unseen = (item.batch == batch.name) & IS_GOLD & (item.status == "open")
        unseen &= item.record.not_in(seen) & item.record.not_in(ahead)
        ids = list(connection.scalars(select(item.id).where(unseen).order_by(item.id)))
        # Not in one order for everybody, so that nobody can tell others which ones they are.
        draw = hash_fraction(batch.settings["seed"], "which gold", annotator, count)
        return self._item_row(connection, ids[int(draw * len(ids))]) if ids else None

    def _lease(self, connection: Connection, item: int, annotator: str) -> datetime:
        """Begins a lease; returns its end."""
        now = self.now()
        end = now + timedelta(minutes=LEASE_MINUTES)
        # Not journaled: after a loss of the database people are given items afresh.
        row = {"item": item, "annotator": annotator, "started_at": now, "ends_at": end}
        insert_or_update(connection, label_leases, row)
        return end

    def _renew(self, connection: Connection, item: int, annotator: str) -> datetime:
        """Extends a lease; returns its end."""
        end = self.now() + timedelta(minutes=LEASE_MINUTES)
        connection.execute(update(label_leases).where(lease_of(item, annotator)).values(ends_at=end))
        return end


def task_of(row: Mapping[str, Any], annotator: str, ends_at: datetime) -> Task:
    """Returns an item, by a row as `ReviewQueries` reads it, as its annotator sees it."""
    shown = shown_suggestion(row, annotator)
    return Task(
        # The file that a record is from would tell which items are gold.
        content={name: value for name, value in row["content"].items() if name != "source"},
        labels=row["labels"],
        item=row["id"],
        batch=row["batch"],
        kind=row["kind"],
        suggestion=None if shown is None else {name: shown[name] for name in shown if name != "planted"},
        reason=row["reason"],
        guideline=row["guideline"],
        ends_at=ends_at,
    )


def lease_of(item: int, annotator: str) -> ColumnElement[bool]:
    """Returns the condition for an annotator's lease of an item."""
    return (label_leases.c.item == item) & (label_leases.c.annotator == annotator)


def _has_answered(item: Any, annotator: str) -> ColumnElement[bool]:
    by_annotator = (label_answers.c.item == item) & (label_answers.c.annotator == annotator) & COUNTS
    return select(label_answers.c.id).where(by_annotator).exists()


def shown_suggestion(row: Mapping[str, Any], annotator: str) -> dict[str, Any] | None:
    """Returns the suggestion that an annotator is shown; with ``planted`` if it is a wrong one."""
    suggestion, settings = row["suggestion"], row["settings"]
    if suggestion is None:
        return None
    draw = hash_fraction(settings["seed"], "planted", row["record"], annotator)
    wrong = KINDS[row["kind"]].others(suggestion["answer"], row["labels"] or ())
    others = [answer for answer in wrong if answer != row["expected"]]
    if draw >= settings["planted_rate"] or not others:
        return dict(suggestion)
    which = hash_fraction(settings["seed"], "which label", row["record"], annotator)
    return {**suggestion, "answer": others[int(which * len(others))], "planted": True}
