"""The queue gives each item to as many annotators as wanted, and decides it by their answers."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from queues import LABELS, Clock, add_accounts, answer_all, gold_items, new_items

from posttrain.label.accounts import Accounts
from posttrain.label.answers import ANSWERS
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, PausedError, QueueConfig
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError
from posttrain.store.journal import Journal
from posttrain.store.metadata import Metadata
from posttrain.store.verify import verify_database

Open = Callable[..., Queue]


class QueueContract:
    @pytest.fixture(autouse=True)
    def _no_fsync(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def journal(self, tmp_path: Path) -> Journal:
        return Journal(tmp_path / "journal.jsonl")

    @pytest.fixture
    def metadata(self, url: str, journal: Journal) -> Iterator[Metadata]:
        metadata = Metadata(url, create=True, journal=journal)
        yield metadata
        assert verify_database(metadata, journal) == []
        metadata.close()

    @pytest.fixture
    def queue(self, metadata: Metadata, clock: Clock) -> Open:
        """``queue(overlap=2)``: a queue with these settings."""
        return lambda **config: Queue(metadata, QueueConfig(**config), clock)

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
        q = queue(lease_minutes=1)
        q.add_batch("b", "choice", new_items(1), labels=LABELS)
        task = q.next("anna")
        assert task is not None
        clock.forward(0.9)
        assert q.next("ben") is None
        q.renew(task.item, "anna")
        clock.forward(0.9)
        assert q.next("ben") is None
        clock.forward(0.2)
        with pytest.raises(Conflict, match="your time for this item has ended"):
            q.renew(task.item, "anna")
        bens = q.next("ben")
        assert bens is not None
        assert bens.item == task.item
        with pytest.raises(Conflict, match="others are answering this item"):
            q.answer(task.item, "anna", "card")
        q.give_back(task.item, "ben")
        # Nobody else has it: the late answer is no loss.
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
        with pytest.raises(UserError, match="is no possible value of `seconds`"):
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
        with pytest.raises(UserError, match="`chioce` is no kind of answers"):
            q.add_batch("c", "chioce", new_items(1))
        assert [batch.name for batch in q.batches()] == ["b"]
        assert q.progress("b").answers == 0

    @pytest.mark.parametrize(
        ("overlap", "answers", "status", "how"),
        [
            (1, ["card"], "done", "single"),
            (2, ["card"], "open", None),
            (2, ["card", "card"], "done", "majority"),
            (2, ["card", "cash"], "open", None),
            (2, ["card", "cash", "card"], "done", "majority"),
            (2, ["card", "cash", "loan"], "review", None),
            (3, ["card", "card", "cash"], "open", None),
            (3, ["card", "card", "cash", "card"], "done", "majority"),
            (3, ["card", "card", "cash", "cash"], "review", None),
        ],
    )
    def test_answers_decide_an_item(
        self, queue: Open, overlap: int, answers: list[str], status: str, how: str | None
    ) -> None:
        q = queue(overlap=overlap)
        q.add_batch("b", "choice", new_items(1), labels=LABELS)
        for number, answer in enumerate(answers):
            task = q.next(f"a{number}")
            assert task is not None
            q.answer(task.item, f"a{number}", answer)
        item = q.item(1)
        assert (item.status, item.answered, (item.resolution or {}).get("how")) == (status, len(answers), how)
        assert (q.next("zoe") is None) == (status != "open")
        assert item.cause == ("disagreement" if status == "review" else None)
        if how:
            assert item.resolution == {
                **{"answer": "card", "how": how, "note": None},
                "by": [f"a{number}" for number, answer in enumerate(answers) if answer == "card"],
            }

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

    def test_a_share_is_checked_blindly(self, queue: Open) -> None:
        q = queue(check=0.2)
        items = new_items(100, suggestion={"answer": "cash", "confidence": 0.5, "annotator": "model-1"})
        q.add_batch("b", "choice", items, labels=LABELS, seed=3)
        checked = {item.record for item in q.items("b") if item.checked}
        assert 8 < len(checked) < 35
        assert len(answer_all(q, "anna")) == 100
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
        q = queue(skips=2)
        q.add_batch("b", "choice", new_items(2), labels=LABELS)
        first, _ = q.next("anna"), q.next("ben")
        assert first is not None
        assert q.skip(first.item, "anna", "not my field").status == "open"
        q.give_back(2, "ben")
        assert q.next("anna").item == 2  # type: ignore[union-attr]
        assert q.skip(first.item, "ben").status == "review"
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

    def test_gold_items_are_mixed_in_and_no_part_of_the_result(self, queue: Open) -> None:
        q = queue(gold_rate=0.3)
        q.add_batch("b", "choice", new_items(60), labels=LABELS, gold=gold_items(["cash"] * 100), seed=1)
        order = answer_all(q, "anna")
        shown = [record for record in order if record.startswith("gold")]
        assert len(order) == 60 + len(shown)
        assert 10 < len(shown) < 45
        assert len(set(order)) == len(order)
        assert q.gold_score("anna") == (0, len(shown))
        assert (q.progress("b").items, q.progress("b").done, q.progress("b").left) == (60, 60, 0)
        q.finish_batch("b")
        table = q.answers("b")
        assert table.filter(table["expected"].is_valid())["record"].to_pylist() == shown
        # The same gold items come with the next batch, and not to the same person.
        q.add_batch("c", "choice", new_items(60), labels=LABELS, gold=gold_items(["cash"] * 100), seed=1)
        assert not set(shown) & set(answer_all(q, "anna"))
        assert set(answer_all(q, "ben", "cash")) == set()

    def test_items_are_fetched_ahead(self, queue: Open, clock: Clock) -> None:
        """A page shows one item while it has a lease of the next: no item twice, and gold items as often as always."""
        q = queue(gold_rate=0.3)
        q.add_batch("b", "choice", new_items(60), labels=LABELS, gold=gold_items(["cash"] * 100), seed=1)
        seen: list[int] = []
        shown, ahead = q.next("anna"), None
        while shown is not None:
            clock.forward(0.01)
            ahead = q.next("anna", besides=[shown.item])
            # Asked again, after a lost reply or by a page that is loaded anew: the same two, the oldest first.
            assert q.next("anna", besides=[shown.item]) == ahead
            assert q.next("anna").item == shown.item  # type: ignore[union-attr]
            seen.append(shown.item)
            q.answer(shown.item, "anna", "card")
            shown = ahead
        assert len(set(seen)) == len(seen)
        _, gold = q.gold_score("anna")
        assert len(seen) == 60 + gold
        assert 10 < gold < 45

    def test_too_many_wrong_gold_answers_pause_an_account(self, queue: Open, metadata: Metadata, clock: Clock) -> None:
        add_accounts(metadata, "anna", "root")
        q = queue(gold_rate=0.5, gold_minimum=4, gold_threshold=0.75, check=0)
        q.add_batch("b", "choice", new_items(50), labels=LABELS, gold=gold_items(["cash"] * 60), seed=1)
        sentences: list[str | None] = []
        for _ in range(2):
            while sentences[-1:] in ([], [None]):
                task = q.next("anna")
                assert task is not None
                sentences.append(q.answer(task.item, "anna", "card").paused)
            with pytest.raises(PausedError, match=r"^Thank you for your work so far\. 0 of your last 4"):
                q.next("anna")
            assert sentences[-1] == Accounts(metadata).get("anna").paused
            q.resume("anna", "root")
            clock.forward(1)
            sentences.append(None)
        assert sum(sentence is not None for sentence in sentences) == 2
        assert q.next("anna") is not None

    def test_good_annotators_are_not_paused(self, queue: Open, metadata: Metadata) -> None:
        add_accounts(metadata, "anna")
        q = queue(gold_rate=0.5, gold_minimum=2)
        q.add_batch("b", "choice", new_items(50), labels=LABELS, gold=gold_items(["card"] * 30))
        assert len(answer_all(q, "anna")) > 60
        assert Accounts(metadata).get("anna").paused is None

    def test_wrong_suggestions_are_planted(self, queue: Open) -> None:
        q = queue(planted_rate=0.25)
        suggestion = {"answer": "card", "confidence": 0.9, "annotator": "model-1"}
        q.add_batch("b", "choice", new_items(200, suggestion=suggestion), labels=LABELS, seed=2)
        shown = []
        while (task := q.next("anna")) is not None:
            assert task.suggestion is not None
            assert set(task.suggestion) == set(suggestion)
            shown.append(task.suggestion["answer"])
            q.answer(task.item, "anna", task.suggestion["answer"])
        table = q.answers()
        assert table["suggestion"].to_pylist() == shown
        assert table["planted"].to_pylist() == [answer != "card" for answer in shown]
        assert 25 < sum(table["planted"].to_pylist()) < 80
        assert set(shown) == set(LABELS)

    def test_the_answers_are_a_table(self, queue: Open, clock: Clock) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(3), labels=LABELS)
        q.add_guideline("# One", "root")
        task = q.next("anna")
        assert task is not None
        clock.forward(0.5)
        q.answer(task.item, "anna", "cash", position=1)
        q.answer(2, "model-1", "loan", confidence=0.75, seconds=0.1)
        q.skip(3, "anna")
        q.resolve(2, "root", "card")
        table = q.answers("b")
        assert table.schema == ANSWERS
        first, second = table.to_pylist()
        assert first == {
            **{"item": 1, "record": "r0", "batch": "b", "annotator": "anna", "answer": "cash", "expected": None},
            **{"resolution": "cash", "resolved_by": "single", "suggestion": None, "planted": False, "position": 1},
            **{"seconds": 30.0, "confidence": None, "checked": False, "guideline": 1, "created_at": clock()},
        }
        assert (second["confidence"], second["resolution"], second["resolved_by"]) == (0.75, "card", "review")
        assert q.answers("none").num_rows == 0

    def test_a_finished_batch_changes_no_more(self, queue: Open) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(2), labels=LABELS)
        with pytest.raises(Conflict, match="2 items of `b` are not answered yet"):
            q.finish_batch("b")
        answer_all(q, "anna")
        q.finish_batch("b")
        q.finish_batch("b")
        (batch,) = q.batches("done")
        assert batch.finished_at is not None
        for call in (lambda: q.resolve(1, "root", "card"), lambda: q.drop(1, "root")):
            with pytest.raises(Conflict, match="closed, and its answers are in use"):
                call()
        with pytest.raises(NotFound, match="no answer of yours to undo"):
            q.undo("anna")
        with pytest.raises(Conflict, match="decided meanwhile"):
            q.answer(1, "ben", "card")

    def test_progress_foresees_the_end(self, queue: Open, clock: Clock) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(10), labels=LABELS)
        assert (q.progress("b").rate, q.progress("b").done_at) == (None, None)
        for _ in range(4):
            q.answer(q.next("anna").item, "anna", "card")  # type: ignore[union-attr]
            clock.forward(2)
        progress = q.progress("b")
        assert (progress.open, progress.done, progress.answers, progress.left, progress.resolved) == (6, 4, 4, 6, 4)
        assert progress.rate == pytest.approx(30)
        assert progress.done_at == clock() + timedelta(minutes=12)

    def test_guidelines_stamp_answers(self, queue: Open) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(3), labels=LABELS)
        q.answer(1, "anna", "card")
        assert [q.add_guideline(text, "root", "note") for text in ("# One", "# One", "# Two")] == [1, 1, 2]
        q.answer(2, "anna", "cash")
        assert [(row["record"], row["guideline"]) for row in q.outdated_answers()] == [("r0", 0)]
        assert q.add_guideline("# Three", "root") == 3
        assert [(row["record"], row["answer"]) for row in q.outdated_answers(batch="b")] == [
            *(("r0", "card"), ("r1", "cash"))
        ]
        newest, first = q.guideline(), q.guideline(1)
        assert newest is not None
        assert first is not None
        assert (newest["version"], first["text"], q.guideline(9)) == (3, "# One", None)
        assert q.next("anna").guideline == 3  # type: ignore[union-attr]

    def test_many_items_are_added_in_one_transaction(self, queue: Open, metadata: Metadata) -> None:
        q = queue()
        position = metadata.position()
        q.add_batch("b", "choice", new_items(3000), labels=LABELS)
        assert metadata.position() == position + 1
        assert [item.record for item in q.items("b")] == [f"r{number}" for number in range(3000)]


class TestSQLiteQueue(QueueContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.slow
class TestPostgreSQLQueue(QueueContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match=r"label\.queue|overlap"):
        QueueConfig.read({"overlap": 0}, "posttrain.yaml")
