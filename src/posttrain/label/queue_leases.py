"""Leases: gives each annotator the next item, for a time in which others are given other items."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from posttrain.label.queue_batches import COUNTS, IS_GOLD, newest_guideline
from posttrain.label.queue_review import ReviewQueries
from posttrain.label.queue_rows import Batch, PausedError, QueueConfig, Task, hash_fraction
from posttrain.label.tokens import Conflict
from posttrain.store.commit_group import CommitGroup
from posttrain.store.database import utc_now
from posttrain.store.label_tables import accounts, label_answers, label_batches, label_items, label_leases
from posttrain.store.metadata import Metadata


class LeaseQueries(ReviewQueries):
    """Items on loan to annotators."""

    def __init__(
        self, metadata: Metadata, config: QueueConfig | None = None, now: Callable[[], datetime] = utc_now
    ) -> None:
        super().__init__(metadata, config, now)
        self._commits = CommitGroup(metadata)

    def next(self, annotator: str, batch: str | None = None, besides: Sequence[int] = ()) -> Task | None:
        """Leases the annotator the next item, or returns the item that he has a lease of, with a new end.

        Never an item that he has answered, skipped or flagged, and never one that others are answering already as often
        as it is wanted. The oldest open batch comes first, and in it the highest priority; at the batch's rate, decided
        by the annotator's name and his count, a gold item comes in between.

        Args:
            annotator: Name of the account.
            batch: Only items of this batch; None: of every open one.
            besides: Items that he has a lease of already: a page fetches the next one while the present one is shown.

        Returns:
            None if there is nothing for him to answer at the moment.

        Raises:
            PausedError: his account is paused; the message is the sentence to him.
        """
        return self._commits.run(lambda: self._next(annotator, batch, besides))

    def renew(self, item: int, annotator: str) -> datetime:
        """Extends the lease of an item that somebody works on for long; returns its new end.

        Raises:
            Conflict: the lease has ended and others may be answering the item.
        """

        def work() -> datetime:
            with self.metadata.transaction() as connection:
                row = self._locked_item(connection, item)
                if not self._holds(connection, row, annotator):
                    raise Conflict("your time for this item has ended", fix="ask for the next one")
                return self._lease(connection, item, annotator)

        return self._commits.run(work, order=item)

    def give_back(self, item: int, annotator: str) -> None:
        """Ends the lease of an item unanswered, so that others are given it at once; he may be given it again."""
        with self.metadata.transaction() as connection:
            connection.execute(delete(label_leases).where(lease_of(item, annotator)))

    def _next(self, annotator: str, batch: str | None, besides: Sequence[int]) -> Task | None:
        with self.metadata.transaction() as connection:
            paused = connection.scalar(select(accounts.c.paused).where(accounts.c.name == annotator))
            if paused is not None:
                raise PausedError(paused)
            held = self._held_item(connection, annotator, batch, besides)
            if held is not None:
                self._lease(connection, held, annotator)
                return self._task(connection, self._item_row(connection, held), annotator)
            for each in self.batches("open"):
                if batch not in (None, each.name):
                    continue
                id = self._free_item(connection, each, annotator, besides)
                if id is not None:
                    id = self._gold_item(connection, each, annotator, besides) or id
                    self._lease(connection, id, annotator, started=True)
                    return self._task(connection, self._locked_item(connection, id), annotator)
        return None

    def _held_item(
        self, connection: Connection, annotator: str, batch: str | None, besides: Sequence[int]
    ) -> int | None:
        """Returns the item, none of ``besides``, that the annotator has a lease of and may still answer."""
        query = (
            select(label_items.c.id)
            .join(label_leases, label_leases.c.item == label_items.c.id)
            .join(label_batches, label_items.c.batch == label_batches.c.name)
            .where(label_leases.c.annotator == annotator, label_leases.c.ends_at > self.now())
            .where(label_items.c.status == "open", label_batches.c.status == "open", label_items.c.id.not_in(besides))
            .order_by(label_leases.c.started_at, label_items.c.id)
            .limit(1)
        )
        return connection.scalar(query if batch is None else query.where(label_items.c.batch == batch))

    def _free_item(self, connection: Connection, batch: Batch, annotator: str, besides: Sequence[int]) -> int | None:
        """Locks and returns the item of the highest priority that is free for the annotator."""
        item, lease = label_items.c, label_leases.c
        others = (lease.item == item.id) & (lease.annotator != annotator) & (lease.ends_at > self.now())
        held = select(func.count()).select_from(label_leases).where(others).scalar_subquery()
        query = (
            select(item.id)
            .where(item.status == "open", item.batch == batch.name, ~IS_GOLD, item.answered + held < item.wanted)
            .where(~_has_answered(item.id, annotator))
            .order_by(item.priority.desc(), item.id)
            .limit(1)
            .with_for_update(skip_locked=True, of=label_items)
        )
        taken = list(besides)
        while True:
            id: int | None = connection.scalar(query.where(item.id.not_in(taken)) if taken else query)
            # PostgreSQL locks the row that the query saw: another transaction may have leased it since, and ended.
            if id is None or self._is_free(connection, self._locked_item(connection, id), annotator):
                return id
            taken.append(id)

    def _is_free(self, connection: Connection, row: Mapping[str, Any], annotator: str) -> bool:
        """Returns whether a locked item may be leased to the annotator."""
        if row["status"] != "open" or row["batch_status"] != "open":
            return False
        if connection.scalar(select(_has_answered(row["id"], annotator))):
            return False
        return row["expected"] is not None or row["answered"] + self._others(connection, row, annotator) < row["wanted"]

    def _others(self, connection: Connection, row: Mapping[str, Any], annotator: str) -> int:
        """Counts the leases that others have of an item."""
        lease = label_leases.c
        live = (lease.item == row["id"]) & (lease.annotator != annotator) & (lease.ends_at > self.now())
        return connection.scalar(select(func.count()).select_from(label_leases).where(live)) or 0

    def _gold_item(self, connection: Connection, batch: Batch, annotator: str, besides: Sequence[int]) -> int | None:
        """Returns a gold item that the annotator has never seen, if it is time for one."""
        if not batch.settings["gold"]:
            return None
        item, answer = label_items.c, label_answers.c
        of_batch = select(func.count()).select_from(label_answers).join(label_items).where(item.batch == batch.name)
        # Items fetched ahead count as answered: else the same draw would decide several of them.
        count = (connection.scalar(of_batch.where(COUNTS, answer.annotator == annotator)) or 0) + len(besides)
        if hash_fraction(batch.settings["seed"], "gold", batch.name, annotator, count) >= batch.settings["gold_rate"]:
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
        return ids[int(draw * len(ids))] if ids else None

    def _lease(self, connection: Connection, item: int, annotator: str, *, started: bool = False) -> datetime:
        """Begins a lease, or renews it; returns its end."""
        now = self.now()
        end = now + timedelta(minutes=self.config.lease_minutes)
        # Not journaled: after a loss of the database people are given items afresh.
        if started:
            connection.execute(delete(label_leases).where(lease_of(item, annotator)))
            row = {"item": item, "annotator": annotator, "started_at": now, "ends_at": end}
            connection.execute(insert(label_leases).values(row))
        else:
            connection.execute(update(label_leases).where(lease_of(item, annotator)).values(ends_at=end))
        return end

    def _holds(self, connection: Connection, row: Mapping[str, Any], annotator: str) -> bool:
        """Returns whether the annotator's lease of an item has not ended."""
        ends_at = connection.scalar(select(label_leases.c.ends_at).where(lease_of(row["id"], annotator)))
        return ends_at is not None and ends_at > self.now()

    def _task(self, connection: Connection, row: Mapping[str, Any], annotator: str) -> Task:
        shown = shown_suggestion(row, annotator)
        return Task(
            content=row["content"],
            labels=row["labels"],
            item=row["id"],
            batch=row["batch"],
            kind=row["kind"],
            suggestion=None if shown is None else {name: shown[name] for name in shown if name != "planted"},
            reason=row["reason"],
            guideline=connection.scalar(newest_guideline()) or 0,
            ends_at=connection.scalar(select(label_leases.c.ends_at).where(lease_of(row["id"], annotator))),
        )


def lease_of(item: int, annotator: str) -> ColumnElement[bool]:
    """Returns the condition for an annotator's lease of an item."""
    return (label_leases.c.item == item) & (label_leases.c.annotator == annotator)


def _has_answered(item: Any, annotator: str) -> ColumnElement[bool]:
    mine = (label_answers.c.item == item) & (label_answers.c.annotator == annotator) & COUNTS
    return select(label_answers.c.id).where(mine).exists()


def shown_suggestion(row: Mapping[str, Any], annotator: str) -> dict[str, Any] | None:
    """Returns the suggestion that an annotator is shown; with ``planted`` if it is a wrong one."""
    suggestion, settings = row["suggestion"], row["settings"]
    if suggestion is None:
        return None
    draw = hash_fraction(settings["seed"], "planted", row["record"], annotator)
    others = [label for label in row["labels"] or () if label not in (suggestion["answer"], row["expected"])]
    if draw >= settings["planted_rate"] or not others:
        return dict(suggestion)
    which = hash_fraction(settings["seed"], "which label", row["record"], annotator)
    return {**suggestion, "answer": others[int(which * len(others))], "planted": True}
