"""Decides what becomes of an item: by its answers, or by a reviewer; and measures annotators by gold items."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from posttrain.label.accounts import Accounts
from posttrain.label.answer_kinds import KINDS, AnswerKind, Question
from posttrain.label.queue_batches import (
    COUNTS,
    IS_GOLD,
    LABELLERS,
    BatchQueries,
    given_answer,
    newest_guideline,
)
from posttrain.label.queue_rows import GivenAnswer, Item
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError
from posttrain.store.label_tables import accounts, audit, label_answers, label_batches, label_items, label_leases

ACTOR = "queue"
"""Name of the queue in the audit log."""

DECIDERS = ("owner", "reviewer")
"""Roles that decide items in review."""

SKIPS = 3
"""An item that so many annotators skip goes to review."""

GOLD_MINIMUM = 10
"""Gold items that annotators answer before they may be paused."""


@dataclass(frozen=True)
class Outcome:
    """An item's status, the number of answers that it wants, and its resolution, as its answers decide."""

    status: str
    wanted: int
    resolution: Mapping[str, Any] | None = None


def settle(
    given: Sequence[GivenAnswer],
    kind: AnswerKind,
    *,
    base: int,
    at_least: int = 0,
    nobody_left: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Decides an item by its answers.

    Args:
        given: The answers, skips and flags that count, in the order in which they were given.
        kind: Their kind.
        base: Answers wanted before there is a disagreement.
        at_least: Answers wanted at least, as others are answering the item right now.
        nobody_left: Returns True if every person with an account has answered or skipped it.
    """
    answers = [answer for answer in given if answer.status == "answered"]
    skipped = sum(answer.status == "skipped" for answer in given)
    count, more = len(answers), base + 1
    if any(answer.status == "flagged" for answer in given):
        return Outcome("review", max(base, count))
    keys = [kind.key(answer.answer) for answer in answers]
    (top, votes), *_ = Counter(keys).most_common(1) or [("", 0)]
    agreed = [answer for answer, key in zip(answers, keys, strict=True) if key == top]
    if count >= base and votes == count:
        return Outcome("done", max(base, count), _resolution(agreed, "single" if count == 1 else "majority"))
    if count >= base:
        # One more annotator is asked, where another answer can make a majority and somebody is there to give it.
        if count < more and kind.votes and not nobody_left():
            return Outcome("open", more)
        if 2 * votes > count and kind.votes:
            return Outcome("done", count, _resolution(agreed, "majority"))
        return Outcome("review", count)
    if skipped >= SKIPS or (skipped and nobody_left()):
        return Outcome("review", base)
    # More than the base after an undo: those who were asked because of a disagreement may still answer.
    return Outcome("open", max(base, at_least))


class ReviewQueries(BatchQueries):
    """Disagreements and their decisions, and the accuracy on gold items."""

    def review_list(self, batch: str | None = None) -> list[Item]:
        """Returns the items in review of open batches (of one batch), each with its answers side by side.

        `Item.cause` says why each is there.
        """
        names = [each.name for each in self.batches("open")] if batch is None else [batch]
        condition = (label_items.c.status == "review") & label_items.c.batch.in_(names) & ~IS_GOLD
        return self._items(condition)

    def resolve(self, item: int, by: str, answer: Any, note: str | None = None, *, how: str = "review") -> Item:
        """Decides an item of an open batch for good, whatever was answered; a later decision replaces an earlier one.

        Args:
            item: Id of the item.
            by: The reviewer; the model's name where ``how`` is ``model``.
            answer: The final answer.
            note: Why, in words.
            how: ``review``, ``posterior`` or ``model``.

        Raises:
            NotFound: there is no such item.
            Conflict: its batch is closed, or see `may_decide`.
            UserError: the answer does not fit it.
        """
        with self.metadata.transaction() as connection:
            row = self._locked_item(connection, item)
            _require_open(row)
            self._check_decider(item, by, how)
            checked = KINDS[row["kind"]].check(answer, Question(row["content"], row["labels"]))
            self._decide(connection, item, "done", {"answer": checked, "how": how, "by": [by], "note": note})
            return self.item(item)

    def drop(self, item: int, by: str, note: str | None = None, *, how: str = "review") -> Item:
        """Takes an item of an open batch out of the result, such as a text that nobody can label.

        Args:
            item: Id of the item.
            by: Who decides it.
            note: Why, in words.
            how: ``review``, or ``skip`` for a row that the file skips.

        Raises:
            NotFound: there is no such item.
            Conflict: its batch is closed, or see `may_decide`.
        """
        with self.metadata.transaction() as connection:
            _require_open(self._locked_item(connection, item))
            self._check_decider(item, by, how)
            self._decide(connection, item, "dropped", {"answer": None, "how": how, "by": [by], "note": note})
            return self.item(item)

    def may_decide(self, item: Item, by: str) -> bool:
        """Returns whether a reviewer may decide an item: not a dispute about their own answer, if another one can."""
        answers = [given for given in item.answers if given.status in ("answered", "flagged")]
        who = {given.annotator for given in answers}
        keys = {KINDS[item.kind].key(given.answer) for given in answers if given.answer is not None}
        is_dispute = len(who) > 1 and (item.status == "review" or len(keys) > 1)
        if by not in who or not is_dispute:
            return True
        query = select(accounts.c.name).where(accounts.c.role.in_(DECIDERS), accounts.c.closed_at.is_(None))
        with self.metadata.reading() as connection:
            return not set(connection.scalars(query)) - who

    def _check_decider(self, item: int, by: str, how: str) -> None:
        if how == "review" and not self.may_decide(self.item(item), by):
            raise Conflict("you have answered this item yourself", fix="another reviewer or an owner decides it")

    def undrop(self, item: int) -> None:
        """Takes a drop in an open batch back: the answers that are there decide the item again.

        Raises:
            NotFound: there is no such item.
            Conflict: its batch is closed.
        """
        with self.metadata.transaction() as connection:
            row = self._locked_item(connection, item)
            _require_open(row)
            self._settle(connection, row, self._given(connection, item), others_hold=False)

    def drop_rest(self, batch: str, by: str) -> int:
        """Drops all items of an open batch that are not decided; returns how many.

        Raises:
            NotFound: there is no such batch.
            Conflict: it is closed.
        """
        with self.metadata.transaction() as connection:
            if self._locked_batch(connection, batch).status != "open":
                raise Conflict(f"the batch `{batch}` is closed, and its answers are in use")
            rest = (label_items.c.batch == batch) & label_items.c.status.in_(("open", "review")) & ~IS_GOLD
            resolution = {"answer": None, "how": "review", "by": [by], "note": None}
            return self.metadata.update_rows(label_items, rest, {"status": "dropped", "resolution": resolution})

    def gold_score(self, annotator: str) -> tuple[int, int]:
        """Returns how many gold items an annotator has right, and how many were answered, since the last resumption."""
        with self.metadata.reading() as connection:
            resumed = select(func.max(audit.c.at)).where(audit.c.action == "resume", audit.c.target == annotator)
            since = connection.scalar(resumed)
            query = (
                select(label_answers.c.answer, label_items.c.expected, label_batches.c.kind)
                .join(label_items, label_answers.c.item == label_items.c.id)
                .join(label_batches, label_items.c.batch == label_batches.c.name)
                .where(IS_GOLD, COUNTS, label_answers.c.annotator == annotator, label_answers.c.status == "answered")
            )
            if since is not None:
                query = query.where(label_answers.c.created_at > since)
            rows = connection.execute(query).all()
        right = sum(KINDS[kind].key(answer) == KINDS[kind].key(expected) for answer, expected, kind in rows)
        return right, len(rows)

    def _pause_for_gold(self, annotator: str, settings: Mapping[str, Any]) -> str | None:
        """Pauses an annotator whose accuracy on gold items is too low; returns the sentence, or None."""
        right, count = self.gold_score(annotator)
        if count < GOLD_MINIMUM or right >= settings["gold_threshold"] * count:
            return None
        sentence = (
            f"Thank you for your work so far. {right} of your last {count} answers to items that were checked before "
            "are as we expected, so let us talk the guideline over before you continue; an owner will resume your "
            "account."
        )
        try:
            Accounts(self.metadata).pause(annotator, sentence, ACTOR)
        except NotFound:
            return None  # the answers of a file, say, which nobody is shown
        return sentence

    def _item_row(self, connection: Connection, id: int, *, locked: bool = False) -> Mapping[str, Any]:
        """Returns an item's row, its batch's ``kind, labels, settings`` and ``batch_status``, and the ``guideline``.

        Args:
            connection: A transaction's.
            id: Id of the item.
            locked: True keeps other transactions from changing the item until this one ends.

        Raises:
            NotFound: there is none.
        """
        query = (
            select(
                label_items,
                *(label_batches.c.kind, label_batches.c.labels, label_batches.c.settings),
                label_batches.c.status.label("batch_status"),
                newest_guideline().scalar_subquery().label("guideline"),
            )
            .join(label_batches)
            .where(label_items.c.id == id)
        )
        row = connection.execute(query.with_for_update(of=label_items) if locked else query).mappings().first()
        if row is None:
            raise NotFound(f"there is no item {id}")
        return dict(row)

    def _locked_item(self, connection: Connection, id: int) -> Mapping[str, Any]:
        return self._item_row(connection, id, locked=True)

    def _settle(
        self, connection: Connection, row: Mapping[str, Any], given: Sequence[GivenAnswer], *, others_hold: bool
    ) -> str:
        """Brings a locked item in line with its answers; returns its status."""
        id, answered = row["id"], sum(answer.status == "answered" for answer in given)
        if row["expected"] is not None:
            self.metadata.update_rows(label_items, label_items.c.id == id, {"answered": answered})
            return str(row["status"])
        settings = row["settings"]
        outcome = settle(
            given,
            KINDS[row["kind"]],
            base=settings["overlap"] + row["checked"],
            at_least=row["wanted"] if others_hold else 0,
            nobody_left=lambda: _nobody_left(connection, [answer.annotator for answer in given]),
        )
        values = {
            "answered": answered,
            "wanted": outcome.wanted,
            "status": outcome.status,
            "resolution": None if outcome.resolution is None else dict(outcome.resolution),
        }
        self.metadata.update_rows(label_items, label_items.c.id == id, values)
        return outcome.status

    def _given(self, connection: Connection, item: int) -> list[GivenAnswer]:
        query = select(label_answers).where(label_answers.c.item == item, COUNTS).order_by(label_answers.c.id)
        return [given_answer(row) for row in connection.execute(query).mappings()]

    def _decide(self, connection: Connection, item: int, status: str, resolution: Mapping[str, Any]) -> None:
        values = {"status": status, "resolution": dict(resolution)}
        self.metadata.update_rows(label_items, label_items.c.id == item, values)
        connection.execute(label_leases.delete().where(label_leases.c.item == item))


def _require_open(row: Mapping[str, Any]) -> None:
    if row["batch_status"] != "open":
        raise Conflict(f"the batch `{row['batch']}` is closed, and its answers are in use")
    if row["expected"] is not None:
        raise UserError("a gold item has its answer already")


def _nobody_left(connection: Connection, answered: Sequence[str]) -> bool:
    people = select(accounts.c.name).where(accounts.c.role.in_(LABELLERS), accounts.c.closed_at.is_(None))
    names = set(connection.scalars(people))
    # Without accounts the answers come from files, and nobody knows how many people there are.
    return bool(names) and not names - set(answered)


def _resolution(agreed: Sequence[GivenAnswer], how: str) -> dict[str, Any]:
    return {"answer": agreed[0].answer, "how": how, "by": [answer.annotator for answer in agreed], "note": None}
