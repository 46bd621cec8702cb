"""The queue gives each item to as many annotators as wanted, and decides it by their answers."""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from queues import LABELS, Clock, Open, QueueFixtures, add_accounts, answer_all, gold_items, new_items

from posttrain.label.accounts import Accounts
from posttrain.label.queue_rows import NewItem
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError
from posttrain.store.metadata import Metadata

DECISIONS: list[tuple[int, list[str], str, str | None]] = [
    (1, ["card"], "done", "single"),
    (2, ["card"], "open", None),
    (2, ["card", "card"], "done", "majority"),
    (2, ["card", "cash"], "open", None),
    (2, ["card", "cash", "card"], "done", "majority"),
    (2, ["card", "cash", "loan"], "review", None),
    (3, ["card", "card", "cash"], "open", None),
    (3, ["card", "card", "cash", "card"], "done", "majority"),
    (3, ["card", "card", "cash", "cash"], "review", None),
]
"""An overlap and the answers to an item; its status, and how it was decided."""


class QueueContract(QueueFixtures):
    def test_items_come_by_priority_and_leased_ones_come_back(self, queue: Open, clock: Clock) -> None:
        q = queue()
        items = [NewItem(f"r{n}", {"text": "?"}, priority=p, reason="why") for n, p in enumerate((0.5, 2, 1))]
        q.add_batch("b", "choice", items, labels=LABELS, round=3, selection="selection-1")
        first = q.next("anna")
        assert first is not None
        assert (first.batch, first.kind, first.labels, first.reason, first.content) == (
            *("b", "choice", LABELS, "why"),
            {"text": "?"},
        )
        assert first.ends_at == clock() + timedelta(minutes=10)
        clock.forward(5)
        again = q.next("anna")
        assert again is not None
        assert (again.item, again.ends_at) == (first.item, clock() + timedelta(minutes=10))
        second = q.next("ben")
        assert second is not None
        assert second.item != first.item
        q.answer(first.item, "anna", "card")
        assert [q.item(id).record for id in (first.item, second.item)] == ["r1", "r2"]
        assert answer_all(q, "anna") == ["r0"]
        assert q.next("anna") is None

    def test_an_expired_lease_frees_its_item(self, queue: Open, clock: Clock) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(1), labels=LABELS)
        task = q.next("anna")
        assert task is not None
        clock.forward(9)
        assert q.next("ben") is None
        q.renew(task.item, "anna")
        clock.forward(9)
        assert q.next("ben") is None
        clock.forward(2)
        with pytest.raises(Conflict, match="your time for this item has ended"):
            q.renew(task.item, "anna")
        bens = q.next("ben")
        assert bens is not None
        assert bens.item == task.item
        with pytest.raises(Conflict, match="others are answering this item"):
            q.answer(task.item, "anna", "card")
        q.give_back(task.item, "ben")
        # Nobody else has it: the late answer is not a loss.
        assert q.answer(task.item, "anna", "card").status == "done"
        with pytest.raises(Conflict, match="decided meanwhile"):
            q.answer(task.item, "ben", "card")

    def test_an_answer_sent_twice_is_acknowledged_once(self, queue: Open, metadata: Metadata) -> None:
        q = queue(overlap=2)
        q.add_batch("b", "choices", new_items(2), labels=LABELS)
        task = q.next("anna")
        assert task is not None
        first = q.answer(task.item, "anna", ["cash", "card"], seconds=2)
        # The same set of labels is the same answer.
        second = q.answer(task.item, "anna", ["card", "cash"])
        assert (first.repeated, second.repeated, second.answer_id) == (False, True, first.answer_id)
        with pytest.raises(Conflict, match="you have answered this item already; undo that answer first"):
            q.answer(task.item, "anna", ["loan"])
        with pytest.raises(Conflict, match="answered this item already"):
            q.skip(task.item, "anna")
        assert q.item(task.item).answered == 1
        assert q.skip(q.next("anna").item, "anna", "unclear").repeated is False  # type: ignore[union-attr]
        assert q.progress("b").answers == 1

    def test_wrong_answers_and_unknown_items_are_refused(self, queue: Open) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(1), labels=LABELS)
        with pytest.raises(UserError, match="label `crad` is not in the label set; did you mean `card`"):
            q.answer(1, "anna", "crad")
        with pytest.raises(UserError, match="is not a possible value of `seconds`"):
            q.answer(1, "anna", "card", seconds=-1)
        for call in (lambda: q.answer(99, "anna", "card"), lambda: q.item(99), lambda: q.drop(99, "x")):
            with pytest.raises(NotFound, match="there is no item 99"):
                call()
        with pytest.raises(NotFound, match="no batch `c`"):
            q.progress("c")
        with pytest.raises(Conflict, match="there is a batch `b` already"):
            q.add_batch("b", "choice", new_items(1))
        with pytest.raises(UserError, match="a record is twice"):
            q.add_batch("c", "choice", new_items(1) * 2)
        with pytest.raises(UserError, match="`chioce` is not a kind of answers"):
            q.add_batch("c", "chioce", new_items(1))
        assert [batch.name for batch in q.batches()] == ["b"]
        assert q.progress("b").answers == 0

    @pytest.mark.parametrize("confidence", [math.nan, math.inf, 2.0, -1.0, 1.0001, "0.5", True])
    def test_a_confidence_is_a_probability(self, queue: Open, confidence: Any) -> None:
        q = queue()
        suggestion = {"answer": "card", "confidence": confidence, "annotator": "model:champion"}
        with pytest.raises(UserError, match=r"suggestion for record r0: .* is not a possible value of `confidence`"):
            q.add_batch("b", "choice", [NewItem("r0", {"text": "x"}, suggestion=suggestion)], labels=LABELS)
        for number, good in enumerate((None, 0, 0.5, 1.0)):
            item = NewItem("r0", {"text": "x"}, suggestion={**suggestion, "confidence": good})
            q.add_batch(f"b{number}", "choice", [item], labels=LABELS)
            assert q.items(f"b{number}")[0].suggestion == {**suggestion, "confidence": good}
        with pytest.raises(UserError, match="not a possible value of `confidence`"):
            q.answer(1, "model:champion", "card", confidence=confidence)
        assert q.progress("b0").answers == 0

    def test_answers_decide_an_item(self, queue: Open) -> None:
        for id, (overlap, answers, status, how) in enumerate(DECISIONS, 1):
            q = queue(overlap=overlap)
            q.add_batch(batch := f"b{id}", "choice", new_items(1), labels=LABELS)
            for number, answer in enumerate(answers):
                task = q.next(f"a{number}", batch)
                assert task is not None
                q.answer(task.item, f"a{number}", answer)
            item = q.item(id)
            assert (item.status, item.answered, (item.resolution or {}).get("how")) == (status, len(answers), how)
            assert (q.next(f"zoe {id}", batch) is None) == (status != "open")
            assert item.cause == ("disagreement" if status == "review" else None)
            if how:
                assert item.resolution == {
                    **{"answer": "card", "how": how, "note": None},
                    "by": [f"a{number}" for number, answer in enumerate(answers) if answer == "card"],
                }

    def test_a_dispute_about_ones_own_answer_is_for_another_who_may_decide(
        self, queue: Open, metadata: Metadata
    ) -> None:
        accounts = Accounts(metadata)
        accounts.add("rosa", "reviewer", "terminal")
        accounts.add("ralf", "reviewer", "terminal")
        add_accounts(metadata, "anna")
        q = queue(overlap=2)
        q.add_batch("b", "text", new_items(4))
        for who, answers in (("rosa", ["x", "y", "own"]), ("anna", ["x", "z"])):
            for answer in answers:
                task = q.next(who)
                assert task is not None
                q.answer(task.item, who, answer)
        agreed, disputed, single, new = (q.item(number) for number in (1, 2, 3, 4))
        assert [q.may_decide(item, "rosa") for item in (agreed, disputed, single, new)] == [True, False, True, True]
        assert [q.may_decide(item, "ralf") for item in (agreed, disputed, single, new)] == [True] * 4
        for change in (lambda: q.resolve(disputed.id, "rosa", "y"), lambda: q.drop(disputed.id, "rosa")):
            with pytest.raises(Conflict, match="you have answered this item yourself; another reviewer or an owner"):
                change()
        assert q.item(disputed.id).status == "review"
        # Nor when it is decided: a later decision replaces an earlier one.
        q.resolve(disputed.id, "ralf", "z")
        assert not q.may_decide(q.item(disputed.id), "rosa")
        # Where nobody else may decide, the one who can does.
        accounts.close("ralf", "terminal")
        assert q.resolve(disputed.id, "rosa", "y").status == "done"

    def test_free_texts_that_differ_go_to_review_at_once(self, queue: Open) -> None:
        q = queue(overlap=2)
        q.add_batch("b", "text", new_items(1))
        for name in ("anna", "ben"):
            q.answer(q.next(name).item, name, f"by {name}")  # type: ignore[union-attr]
        (item,) = q.review_list()
        assert [(given.annotator, given.answer) for given in item.answers] == [("anna", "by anna"), ("ben", "by ben")]
        assert q.resolve(item.id, "root", "by both", "merged").resolution == {
            **{"answer": "by both", "how": "review", "by": ["root"], "note": "merged"}
        }
        assert q.review_list() == []
        assert q.drop(item.id, "root").status == "dropped"

    @pytest.mark.slow
    def test_a_share_is_checked_blindly(self, queue: Open) -> None:
        q = queue(check=0.2)
        items = new_items(40, suggestion={"answer": "cash", "confidence": 0.5, "annotator": "model-1"})
        q.add_batch("b", "choice", items, labels=LABELS, seed=3)
        checked = {item.record for item in q.items("b") if item.checked}
        assert 2 < len(checked) < 16
        assert len(answer_all(q, "anna")) == 40
        task = q.next("ben")
        assert task is not None
        assert "card" not in str(task.content)
        assert task.suggestion == {"answer": "cash", "confidence": 0.5, "annotator": "model-1"}
        assert set(answer_all(q, "ben", "cash")) == checked
        assert set(answer_all(q, "cleo", "cash")) == checked
        done = {item.record: item.resolution for item in q.items("b", "done")}
        assert {
            record for record, resolution in done.items() if resolution and resolution["answer"] == "cash"
        } == checked
        # The same draw, as a repeated run would make it.
        q.add_batch("c", "choice", items, labels=LABELS, seed=3)
        assert {item.record for item in q.items("c") if item.checked} == checked

    def test_checks_begin_with_the_second_account(self, queue: Open, metadata: Metadata) -> None:
        q = queue()
        for number, name in enumerate(("anna", "ben")):
            add_accounts(metadata, name)
            assert q.add_batch(f"b{number}", "choice", new_items(5)).settings["check"] == (0, 0.05)[number]

    def test_skipped_and_flagged_items(self, queue: Open) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(2), labels=LABELS)
        first, _ = q.next("anna"), q.next("ben")
        assert first is not None
        assert q.skip(first.item, "anna", "not my field").status == "open"
        q.give_back(2, "ben")
        assert q.next("anna").item == 2  # type: ignore[union-attr]
        assert q.skip(first.item, "ben").status == "open"
        assert q.skip(first.item, "cleo").status == "review"
        receipt = q.flag(2, "anna", "holds a password", "cash")
        assert receipt.status == "review"
        assert [(item.id, item.cause, item.answered) for item in q.review_list("b")] == [
            *((1, "skipped", 0), (2, "flagged", 0))
        ]
        assert q.item(1).answers[0].note == "not my field"
        assert q.undo("anna").item == 2  # type: ignore[union-attr]
        assert q.item(2).status == "open"

    def test_an_item_that_everybody_skips_goes_to_review(self, queue: Open, metadata: Metadata) -> None:
        add_accounts(metadata, "anna")
        q = queue()
        q.add_batch("b", "choice", new_items(1), labels=LABELS)
        assert q.skip(1, "anna").status == "review"
        # And so does a disagreement that nobody is there to decide.
        add_accounts(metadata, "ben")
        q = queue(overlap=2)
        q.add_batch("c", "choice", new_items(1), labels=LABELS)
        q.answer(2, "anna", "card")
        assert q.answer(2, "ben", "cash").status == "review"

    def test_undo_takes_back_the_own_last_answer(self, queue: Open, clock: Clock) -> None:
        q = queue(overlap=2)
        q.add_batch("b", "choice", new_items(2), labels=LABELS)
        with pytest.raises(NotFound, match="no answer of yours"):
            q.undo("anna")
        for name, answer in (("anna", "card"), ("ben", "cash")):
            q.answer(q.next(name).item, name, answer)  # type: ignore[union-attr]
        assert q.item(1).wanted == 3
        assert q.next("cleo").item == 1  # type: ignore[union-attr]
        task = q.undo("ben")
        assert task is not None
        assert (task.item, q.item(1).answered, q.item(1).wanted) == (1, 1, 3)
        assert q.undo("ben", item=1) is not None  # a repeated request undoes nothing more
        assert q.item(1).answered == 1
        assert q.answer(1, "ben", "card").status == "done"
        with pytest.raises(Conflict, match="decided meanwhile"):
            q.answer(1, "cleo", "card")
        q.undo("ben")
        clock.forward(11)
        assert (q.item(1).status, q.item(1).answered) == ("open", 1)
        assert q.next("anna").item == 2  # type: ignore[union-attr]
        with pytest.raises(Conflict, match="this is not your last answer"):
            q.undo("anna", item=2)
        q.resolve(1, "root", "loan")
        with pytest.raises(Conflict, match="a reviewer has decided this item"):
            q.undo("anna")

    def test_items_are_fetched_ahead(self, queue: Open, clock: Clock) -> None:
        """A page shows one item while it has a lease of the next: no item twice, and gold items as often as always."""
        q = queue(gold_rate=0.3)
        q.add_batch("b", "choice", new_items(21), labels=LABELS, gold=gold_items(["cash"] * 40), seed=1)
        seen: list[int] = []
        shown, ahead = q.next("anna"), None
        while shown is not None:
            clock.forward(0.01)
            ahead = q.next("anna", besides=[shown.item])
            # Asked again, after a lost reply or by a page that is loaded again: the same two, the oldest first.
            assert q.next("anna", besides=[shown.item]) == ahead
            assert q.next("anna").item == shown.item  # type: ignore[union-attr]
            seen.append(shown.item)
            q.answer(shown.item, "anna", "card")
            shown = ahead
        assert len(set(seen)) == len(seen)
        _, gold = q.gold_score("anna")
        assert len(seen) == 21 + gold
        assert 7 <= gold <= 10


class TestSQLiteQueue(QueueContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.slow
class TestPostgreSQLQueue(QueueContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url
