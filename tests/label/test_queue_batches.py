"""Batches: gold items, planted suggestions, progress, the table of answers, guidelines."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from queues import LABELS, Clock, Open, QueueFixtures, add_accounts, answer_all, gold_items, new_items

from posttrain.label.accounts import Accounts
from posttrain.label.answers import ANSWERS
from posttrain.label.queue_rows import PausedError, QueueConfig, is_drawn_evenly
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError
from posttrain.store.metadata import Metadata


@pytest.mark.parametrize("period", [2, 5, 20])
def test_everybody_is_shown_as_many_gold_items_at_places_of_their_own(period: int) -> None:
    places = set()
    for name in ("anna", "ben", "cleo", "dan"):
        hits = [number for number in range(40 * period) if is_drawn_evenly(1 / period, number, name)]
        # One in each block, so that nobody who answers two blocks is unmeasured; and nobody can count to the next.
        assert [hit // period for hit in hits] == list(range(40))
        assert len({hit % period for hit in hits}) > 1
        places.add(tuple(hits))
    assert len(places) == 4
    assert not any(is_drawn_evenly(0.0, number, "anna") for number in range(100))


class BatchContract(QueueFixtures):
    @pytest.mark.slow
    def test_gold_items_are_mixed_in_and_no_part_of_the_result(self, queue: Open) -> None:
        q = queue(gold_rate=0.3)
        q.add_batch("b", "choice", new_items(21), labels=LABELS, gold=gold_items(["cash"] * 40), seed=1)
        order = answer_all(q, "anna")
        shown = [record for record in order if record.startswith("gold")]
        assert len(order) == 21 + len(shown)
        assert 7 <= len(shown) <= 10
        assert len(set(order)) == len(order)
        assert q.gold_score("anna") == (0, len(shown))
        assert (q.progress("b").items, q.progress("b").done, q.progress("b").left) == (21, 21, 0)
        q.finish_batch("b")
        table = q.answers("b")
        assert table.filter(table["expected"].is_valid())["record"].to_pylist() == shown
        # The same gold items come with the next batch, and not to the same person.
        q.add_batch("c", "choice", new_items(21), labels=LABELS, gold=gold_items(["cash"] * 40), seed=1)
        assert not set(shown) & set(answer_all(q, "anna"))
        assert set(answer_all(q, "ben", "cash")) == set()

    def test_a_gold_item_looks_like_the_others(self, queue: Open) -> None:
        """Neither ids, reasons, suggestions nor files tell which items are gold."""
        q = queue(gold_rate=0.5)
        suggestion = {"answer": "card", "confidence": 0.75, "annotator": "model"}
        items = new_items(40, suggestion=suggestion, reason="uncertain")
        q.add_batch("b", "choice", items, labels=LABELS, gold=gold_items(["cash"] * 40), seed=1)
        gold = q.items("b", gold=True)
        assert min(item.id for item in q.items("b")) < sorted(item.id for item in gold)[20]
        assert max(item.id for item in q.items("b")) > sorted(item.id for item in gold)[20]
        assert {item.reason for item in gold} == {"uncertain"}
        # As often right as the model says, so that accepting without reading is no way to pass.
        right = sum(item.suggestion["answer"] == "cash" for item in gold if item.suggestion)
        assert 20 < right < 39
        assert all(item.suggestion and item.suggestion["confidence"] == 0.75 for item in gold)
        shown = [q.next("anna", besides=[])]
        assert all(task and "source" not in task.content for task in shown)

    def test_too_many_wrong_gold_answers_pause_an_account(self, queue: Open, metadata: Metadata, clock: Clock) -> None:
        add_accounts(metadata, "anna", "root")
        q = queue(gold_rate=0.5, gold_threshold=0.75, check=0)
        q.add_batch("b", "choice", new_items(50), labels=LABELS, gold=gold_items(["cash"] * 60), seed=1)
        sentences: list[str | None] = []
        for _ in range(2):
            while sentences[-1:] in ([], [None]):
                task = q.next("anna")
                assert task is not None
                sentences.append(q.answer(task.item, "anna", "card").paused)
            with pytest.raises(PausedError, match=r"^Thank you for your work so far\. 0 of your last 10"):
                q.next("anna")
            assert sentences[-1] == Accounts(metadata).get("anna").paused
            Accounts(metadata).pause("anna", None, "root")
            clock.forward(1)
            sentences.append(None)
        assert sum(sentence is not None for sentence in sentences) == 2
        assert q.next("anna") is not None

    def test_good_annotators_are_not_paused(self, queue: Open, metadata: Metadata) -> None:
        add_accounts(metadata, "anna")
        q = queue(gold_rate=0.5)
        q.add_batch("b", "choice", new_items(12), labels=LABELS, gold=gold_items(["card"] * 12))
        assert len(answer_all(q, "anna")) > 18
        assert Accounts(metadata).get("anna").paused is None

    @pytest.mark.slow
    def test_wrong_suggestions_are_planted(self, queue: Open) -> None:
        q = queue(planted_rate=0.25)
        suggestion = {"answer": "card", "confidence": 0.9, "annotator": "model-1"}
        q.add_batch("b", "choice", new_items(40, suggestion=suggestion), labels=LABELS, seed=2)
        shown = []
        while (task := q.next("anna")) is not None:
            assert task.suggestion is not None
            assert set(task.suggestion) == set(suggestion)
            shown.append(task.suggestion["answer"])
            q.answer(task.item, "anna", task.suggestion["answer"])
        table = q.answers()
        assert table["suggestion"].to_pylist() == shown
        assert table["planted"].to_pylist() == [answer != "card" for answer in shown]
        assert 4 < sum(table["planted"].to_pylist()) < 17
        assert set(shown) == set(LABELS)

    def test_what_is_planted_is_not_the_expected_answer(self, queue: Open) -> None:
        q = queue(gold_rate=0.5, planted_rate=0.5)
        suggestion = {"answer": "card", "confidence": 0.9, "annotator": "model"}
        gold = [replace(item, suggestion=suggestion) for item in gold_items(["cash"] * 30)]
        q.add_batch("b", "choice", new_items(30, suggestion=suggestion), labels=LABELS, gold=gold, seed=2)
        shown = set()
        while (task := q.next("anna")) is not None:
            assert task.suggestion is not None
            if q.item(task.item).record.startswith("gold"):
                shown.add(task.suggestion["answer"])
            q.answer(task.item, "anna", "card")
        assert shown == {"card", "loan"}

    def test_the_answers_are_a_table(self, queue: Open, clock: Clock) -> None:
        q = queue()
        q.add_batch("b", "choice", new_items(3), labels=LABELS)
        q.add_guideline("# One", "root")
        task = q.next("anna")
        assert task is not None
        clock.forward(0.5)
        q.answer(task.item, "anna", "cash")
        q.answer(2, "model-1", "loan", confidence=0.75, seconds=0.1)
        q.skip(3, "anna")
        q.resolve(2, "root", "card")
        table = q.answers("b")
        assert table.schema == ANSWERS
        first, second = table.to_pylist()
        assert first == {
            **{"item": 1, "record": "r0", "batch": "b", "annotator": "anna", "answer": "cash", "expected": None},
            **{"resolution": "cash", "resolved_by": "single", "suggestion": None, "planted": False},
            **{"seconds": 30.0, "confidence": None, "checked": False, "guideline": 1, "created_at": clock()},
            "deciding": False,
        }
        assert (second["confidence"], second["resolution"], second["resolved_by"]) == (0.75, "card", "review")
        assert q.answers("none").num_rows == 0

    def test_the_answer_that_a_disagreement_asked_for_is_marked(self, queue: Open) -> None:
        q = queue(overlap=2)
        q.add_batch("b", "choice", new_items(2), labels=LABELS)
        for name, answers in {"anna": ["card", "card"], "ben": ["card", "cash"]}.items():
            for item, answer in enumerate(answers, 1):
                q.answer(item, name, answer)
        task = q.next("cleo")
        assert task is not None
        assert task.item == 2
        q.answer(2, "cleo", "cash")
        assert q.answers("b")["deciding"].to_pylist() == [False] * 4 + [True]

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
        with pytest.raises(Conflict, match="closed, and its answers are in use"):
            q.resolve(1, "root", "card")
        with pytest.raises(Conflict, match="closed, and its answers are in use"):
            q.drop(1, "root")
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
        q.add_batch("b", "choice", new_items(1000), labels=LABELS)
        assert metadata.position() == position + 1
        assert [item.record for item in q.items("b")] == [f"r{number}" for number in range(1000)]


class TestSQLiteBatch(BatchContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"


@pytest.mark.slow
class TestPostgreSQLBatch(BatchContract):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match=r"label\.queue|overlap"):
        QueueConfig.read({"overlap": 0}, "posttrain.yaml")
