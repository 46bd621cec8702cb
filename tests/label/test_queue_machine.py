"""Whatever annotators do, nothing is shown twice to one person, and no item has more answers than it wants."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from queues import LABELS, Clock, gold_items, new_items
from sqlalchemy import select

from posttrain.label.queue import Queue
from posttrain.label.queue_rows import QueueConfig, Task
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.label_tables import label_leases
from posttrain.store.metadata import Metadata

_numbers = itertools.count()

people = st.sampled_from(["anna", "ben", "cleo", "dan"])
labels = st.sampled_from(LABELS[:2])


class QueueMachine(RuleBasedStateMachine):
    metadata: Metadata

    @initialize(
        overlap=st.integers(1, 3),
        check=st.sampled_from([0, 0.5]),
        items=st.integers(1, 4),
        gold=st.sampled_from([0, 2]),
    )
    def add_batch(self, overlap: int, check: float, items: int, gold: int) -> None:
        self.number, self.clock = next(_numbers), Clock()
        # The database is shared by all examples: each has a batch and people of its own.
        self.batch = f"b{self.number}"
        config = QueueConfig(overlap=overlap, check=check, gold_rate=0.4)
        self.queue = Queue(self.metadata, config, self.clock)
        self.queue.add_batch(
            *(self.batch, "choice", new_items(items)), labels=LABELS, gold=gold_items(["card"] * gold), seed=self.number
        )
        self.ids = [item.id for gold in (False, True) for item in self.queue.items(self.batch, gold=gold)]
        self.given: dict[tuple[str, int], tuple[str, Any]] = {}
        self.order: list[tuple[str, int]] = []
        self.held: dict[str, Task] = {}
        self.shown: set[tuple[str, int]] = set()
        self.disputed: set[int] = set()

    def name(self, person: str) -> str:
        return f"{person} {self.number}"

    @rule(person=people)
    def ask(self, person: str) -> None:
        name = self.name(person)
        task = self.queue.next(name, self.batch)
        if task is None:
            return
        assert (name, task.item) not in self.given
        before = self.held.get(name)
        if before is not None and before.ends_at is not None and before.ends_at > self.clock():
            item = self.queue.item(before.item)
            # Nobody is given a second item before the first is answered or decided by others; after an undo he has two.
            is_known = (name, task.item) in self.shown
            assert is_known or item.status != "open" or (name, before.item) in self.given
        self.held[name] = task
        self.shown.add((name, task.item))

    @rule(person=people, answer=labels, which=st.integers(0, 5), held=st.booleans())
    def answer(self, person: str, answer: str, which: int, held: bool) -> None:
        name = self.name(person)
        item = self.held[name].item if held and name in self.held else self.ids[which % len(self.ids)]
        before = self.given.get((name, item))
        try:
            receipt = self.queue.answer(item, name, answer)
        except Conflict:
            assert before != ("answered", answer)
            return
        assert receipt.repeated == (before is not None)
        assert before in (None, ("answered", answer))
        if before is None:
            self.store(name, item, ("answered", answer))

    @rule(person=people, flag=st.booleans())
    def skip(self, person: str, flag: bool) -> None:
        name = self.name(person)
        if name in self.held and (name, self.held[name].item) not in self.given:
            item = self.held[name].item
            with contextlib.suppress(Conflict):
                if flag:
                    self.queue.flag(item, name, "odd")
                else:
                    self.queue.skip(item, name)
                self.store(name, item, ("flagged" if flag else "skipped", None))

    @rule(person=people)
    def undo(self, person: str) -> None:
        name = self.name(person)
        own = [key for key in self.order if key[0] == name]
        try:
            task = self.queue.undo(name)
        except NotFound:
            assert not own
            return
        except Conflict:  # a reviewer has decided it
            assert (self.queue.item(own[-1][1]).resolution or {})["how"] == "review"
            return
        self.order.remove(own[-1])
        del self.given[own[-1]]
        if task is not None:
            assert task.item == own[-1][1]
            self.held[name] = task
            self.shown.add((name, task.item))

    @rule(which=st.integers(0, 5), drop=st.booleans(), answer=labels)
    def decide(self, which: int, drop: bool, answer: str) -> None:
        reviewed = self.queue.review_list(self.batch)
        if reviewed:
            item = reviewed[which % len(reviewed)].id
            if drop:
                self.queue.drop(item, "root")
            else:
                self.queue.resolve(item, "root", answer)

    @rule(minutes=st.sampled_from([2.5, 15]))
    def wait(self, minutes: float) -> None:
        self.clock.forward(minutes)

    def store(self, name: str, item: int, given: tuple[str, Any]) -> None:
        self.given[name, item] = given
        self.order.append((name, item))

    @invariant()
    def the_rows_agree(self) -> None:
        stored: dict[tuple[str, int], tuple[str, Any]] = {}
        with self.metadata.reading() as connection:
            live = connection.execute(select(label_leases).where(label_leases.c.ends_at > self.clock())).all()
        for is_gold in (False, True):
            for item in self.queue.items(self.batch, gold=is_gold):
                given = [answer for answer in item.answers if answer.status == "answered"]
                assert item.answered == len(given)
                assert len({answer.annotator for answer in item.answers}) == len(item.answers)
                stored |= {(answer.annotator, item.id): (answer.status, answer.answer) for answer in item.answers}
                if is_gold:
                    assert item.status == "open"
                    continue
                assert item.answered <= item.wanted
                assert (item.status == "open") == (item.resolution is None and item.status != "review")
                if item.status == "open":
                    leases = sum(lease.item == item.id for lease in live)
                    assert item.answered < item.wanted
                    assert item.answered + leases <= item.wanted
                    if len({answer.answer for answer in given}) > 1:
                        self.disputed.add(item.id)
                    base = self.queue.config.overlap + item.checked
                    assert item.wanted == base or (item.wanted == base + 1 and item.id in self.disputed)
        assert stored == self.given


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metadata]:
    with pytest.MonkeyPatch.context() as patch:
        # Thousands of commits that need not reach the disk.
        patch.setattr("posttrain.store.database._PRAGMAS", ("foreign_keys = ON", "synchronous = OFF"))
        metadata = Metadata(f"sqlite:///{tmp_path_factory.mktemp('machine')}/store.db", create=True)
        yield metadata
        metadata.close()


@pytest.mark.slow
def test_nothing_breaks_the_rules(metadata: Metadata) -> None:
    machine = type("BoundMachine", (QueueMachine,), {"metadata": metadata})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    )
    # The rules were applied: a machine whose steps all do nothing would pass, too.
    assert Queue(metadata).answers().num_rows > 0
