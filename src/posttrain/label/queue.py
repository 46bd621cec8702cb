"""The queue of items to label: gives each annotator the next item, and stores what is answered.

    queue = Queue(workspace.metadata, config.label.queue)
    queue.add_batch("round-1", "choice", items, labels=["card", "cash"])
    task = queue.next("anna")
    queue.answer(task.item, "anna", "card")

Every change is one transaction, right with many threads and processes at once: on SQLite writers exclude each other, on
PostgreSQL an item's row is locked while it is given out or answered.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, select

from posttrain.label.answer_kinds import KINDS, Question
from posttrain.label.queue_batches import COUNTS
from posttrain.label.queue_leases import LeaseQueries, lease_of, shown_suggestion, task_of
from posttrain.label.queue_rows import GivenAnswer, Receipt, Task, check_confidence
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError
from posttrain.store.label_tables import label_answers, label_batches, label_items, label_leases

_LONGEST_NOTE = 2000  # characters


class Queue(LeaseQueries):
    """The queue; its methods may be called from many threads at once.

    Args:
        metadata: The workspace's database.
        config: The config section ``label.queue``. It counts for batches that are added; for open ones the
            length of leases does, and what `lower_overlap` takes over.
        now: Returns the time in UTC.
    """

    def answer(
        self,
        item: int,
        annotator: str,
        answer: Any,
        *,
        note: str | None = None,
        seconds: float | None = None,
        confidence: float | None = None,
    ) -> Receipt:
        """Stores an answer, and decides the item if it was the last one wanted.

        The same answer sent again, after a lost reply, is acknowledged again and changes nothing.

        Args:
            item: Id of the item.
            annotator: Name of the account.
            answer: The answer, as its kind takes it.
            note: A remark.
            seconds: Time from showing the item to the answer; None: since its lease began, if there is one.
            confidence: Confidence of a model's answer, 0 to 1; None for people.

        Raises:
            NotFound: there is no such item.
            Conflict: the annotator has answered it differently, or it was decided or given to others meanwhile.
            UserError: the answer does not fit the item.
        """
        values = {"status": "answered", "answer": answer, "note": note, "seconds": seconds}
        return self._submit(item, annotator, values | {"confidence": confidence})

    def skip(self, item: int, annotator: str, reason: str | None = None, *, seconds: float | None = None) -> Receipt:
        """Skips an item: it is not offered to this annotator again. An item that many skip goes to review.

        Raises:
            NotFound, Conflict: as `answer`.
        """
        return self._submit(item, annotator, {"status": "skipped", "note": reason, "seconds": seconds})

    def flag(
        self, item: int, annotator: str, note: str, answer: Any = None, *, seconds: float | None = None
    ) -> Receipt:
        """Sends an item to review, with a note that says what is wrong with it, and an answer if the annotator has one.

        Raises:
            NotFound, Conflict: as `answer`.
            UserError: the answer does not fit the item.
        """
        return self._submit(item, annotator, {"status": "flagged", "note": note, "answer": answer, "seconds": seconds})

    def undo(self, annotator: str, item: int | None = None) -> Task | None:
        """Takes back the annotator's last answer, skip or flag in an open batch, and leases them the item again.

        Args:
            annotator: Name of the account.
            item: The item that it is expected to be of: sent twice, it undoes one answer and not two.

        Returns:
            The item as they see it; None if others are answering a skipped one meanwhile.

        Raises:
            NotFound: there is nothing to undo.
            Conflict: a reviewer has decided the item, or its batch was closed meanwhile.
        """
        with self.metadata.transaction() as connection:
            last = self._last_answer(connection, annotator)
            if item is not None and (last is None or last["item"] != item):
                row = self._item_row(connection, item, locked=True)
                lease, _ = self._leases(connection, item, annotator)
                if (
                    lease is not None
                    and lease["ends_at"] > self.now()
                    and self._was_undone(connection, item, annotator)
                ):
                    return task_of(row, annotator, lease["ends_at"])  # the same request came twice
                raise Conflict("this is not your last answer", fix="undo later ones first")
            if last is None:
                raise NotFound("there is no answer of yours to undo")
            row = self._withdraw(connection, last["item"], last["id"], annotator)
            if row["status"] != "open" or not self._is_free(connection, row, annotator):
                return None
            return task_of(row, annotator, self._lease(connection, row["id"], annotator))

    def set_answer(self, item: int, annotator: str, answer: Any, note: str | None = None) -> bool:
        """Sets the annotator's answer, replacing any earlier one; None withdraws it.

        For answers in a file, which people edit until the batch is closed.

        Returns:
            False if the answer does not count, as the item was decided or is being answered by others.

        Raises:
            NotFound, UserError: as `answer`.
        """
        with self.metadata.transaction() as connection:
            row = self._locked_item(connection, item)
            given = self._given(connection, item)
            before = next((each for each in given if each.annotator == annotator), None)
            if before is not None and answer is not None:
                checked = KINDS[row["kind"]].check(answer, Question(row["content"], row["labels"]))
                if before.answer == checked:
                    return True
            try:
                with self.metadata.savepoint():
                    if before is not None:
                        self._withdraw(connection, item, before.id, annotator)
                    if answer is not None:
                        self._store(item, annotator, {"status": "answered", "answer": answer, "note": note})
            except Conflict:
                return False
            return True

    def lower_overlap(self, batch: str) -> bool:
        """Takes a lower ``overlap`` of the config, or a ``check`` of 0, over into an open batch.

        Returns:
            True if the batch has changed; its undecided items are decided again.

        Raises:
            NotFound: there is no such batch.
        """
        with self.metadata.transaction() as connection:
            row = self._locked_batch(connection, batch)
            overlap = min(self.config.overlap, row.settings["overlap"])
            check = 0.0 if self.config.check == 0 else row.settings["check"]
            lowered = {**row.settings, "overlap": overlap, "check": check}
            if row.status != "open" or lowered == row.settings:
                return False
            self.metadata.update_rows(label_batches, label_batches.c.name == batch, {"settings": lowered})
            for each in self.items(batch):
                if each.status in ("open", "review"):
                    if not check:
                        self.metadata.update_rows(label_items, label_items.c.id == each.id, {"checked": False})
                    _, others = self._leases(connection, each.id, "")
                    item = self._locked_item(connection, each.id)
                    self._settle(connection, item, self._given(connection, each.id), others_hold=others > 0)
            return True

    def _withdraw(self, connection: Connection, item: int, answer_id: int, annotator: str) -> Mapping[str, Any]:
        """Undoes an answer and decides its item again; returns the item's row."""
        row = self._locked_item(connection, item)
        # Locked before its status is read: the loop may be taking the answers up.
        if self._locked_batch(connection, row["batch"]).status != "open":
            raise Conflict(f"the batch `{row['batch']}` is closed, and its answers are in use")
        if row["status"] == "dropped" or (row["resolution"] or {}).get("how") not in (None, "single", "majority"):
            raise Conflict("a reviewer has decided this item")
        if not self.metadata.update_rows(
            label_answers, (label_answers.c.id == answer_id) & COUNTS, {"undone_at": self.now()}
        ):
            raise Conflict("this answer was undone already")
        _, others = self._leases(connection, item, annotator)
        self._settle(connection, row, self._given(connection, item), others_hold=others > 0)
        return self._locked_item(connection, item)

    def _submit(self, item: int, annotator: str, values: Mapping[str, Any]) -> Receipt:
        for name in ("note", "seconds", "confidence"):
            _check_value(name, values.get(name))
        return self._commits.run(lambda: self._store(item, annotator, values), order=item)

    def _store(self, item: int, annotator: str, values: Mapping[str, Any]) -> Receipt:
        with self.metadata.transaction() as connection:
            row = self._locked_item(connection, item)
            kind = KINDS[row["kind"]]
            if values.get("answer") is not None or values["status"] == "answered":
                answer = kind.check(values["answer"], Question(row["content"], row["labels"]))
                values = {**values, "answer": answer}
            given = self._given(connection, item)
            for before in given:
                if before.annotator == annotator:
                    if (before.status, before.answer) != (values["status"], values.get("answer")):
                        raise Conflict("you have answered this item already", fix="undo that answer first")
                    return Receipt(before.id, True, row["status"])
            lease, others = self._leases(connection, item, annotator)
            _require_answerable(row, others, holds=lease is not None and lease["ends_at"] > self.now())
            answer = self._insert_answer(row, annotator, values, lease)
            if lease is not None:
                connection.execute(delete(label_leases).where(lease_of(item, annotator)))
            status = self._settle(connection, row, [*given, answer], others_hold=others > 0)
            paused = None
            if row["expected"] is not None and values["status"] == "answered":
                paused = self._pause_for_gold(annotator, row["settings"])
            return Receipt(answer.id, False, status, paused)

    def _insert_answer(
        self, row: Mapping[str, Any], annotator: str, values: Mapping[str, Any], lease: Mapping[str, Any] | None
    ) -> GivenAnswer:
        seconds, now, confidence = values.get("seconds"), self.now(), values.get("confidence")
        if seconds is None and lease is not None:
            seconds = max(0.0, (now - lease["started_at"]).total_seconds())
        # Without a lease it was answered in a file, which shows the suggestion as it is; a model is shown none.
        shown = shown_suggestion(row, annotator) if lease is not None else row["suggestion"]
        answer = {
            "annotator": annotator,
            "status": values["status"],
            "answer": values.get("answer"),
            "note": values.get("note"),
            "seconds": seconds,
            "suggestion": None if shown is None or confidence is not None else dict(shown),
            "confidence": confidence,
            "guideline": row["guideline"],
            "created_at": now,
        }
        return GivenAnswer(id=self.metadata.insert_row(label_answers, answer | {"item": row["id"]})["id"], **answer)

    def _was_undone(self, connection: Connection, item: int, annotator: str) -> bool:
        undone = label_answers.c.undone_at.is_not(None)
        by_annotator = (label_answers.c.item == item) & (label_answers.c.annotator == annotator) & undone
        return bool(connection.scalar(select(select(label_answers.c.id).where(by_annotator).exists())))

    def _last_answer(self, connection: Connection, annotator: str) -> RowMapping | None:
        query = (
            select(label_answers.c.id, label_answers.c.item)
            .join(label_items, label_answers.c.item == label_items.c.id)
            .join(label_batches, label_items.c.batch == label_batches.c.name)
            .where(COUNTS, label_answers.c.annotator == annotator, label_batches.c.status == "open")
            .order_by(label_answers.c.id.desc())
            .limit(1)
        )
        return connection.execute(query).mappings().first()


def _require_answerable(row: Mapping[str, Any], others: int, *, holds: bool) -> None:
    if row["batch_status"] != "open" and row["status"] in ("open", "review"):
        raise Conflict("the batch was closed without an answer to this item", fix="continue with the next one")
    if row["batch_status"] != "open" or row["status"] in ("done", "dropped"):
        raise Conflict("this item was decided meanwhile", fix="continue with the next one")
    if row["expected"] is None and not holds and row["answered"] + others >= row["wanted"]:
        raise Conflict("others are answering this item", fix="continue with the next one")


def _check_value(name: str, value: Any) -> None:
    if name == "note" and value is not None:
        if len(value) > _LONGEST_NOTE or "\x00" in value:
            raise UserError(f"a note has at most {_LONGEST_NOTE:,} characters, and no NUL among them")
    elif name == "confidence":
        check_confidence(value)
    elif value is not None and not 0 <= value <= 1e6:
        raise UserError(f"{value} is not a possible value of `{name}`")
