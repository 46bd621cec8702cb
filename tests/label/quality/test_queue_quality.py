"""Simulated annotators answer a real queue, and the report on it names who is careless."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queues import LABELS, Clock, add_accounts
from simulated_team import SimulatedAnnotator, SimulatedItem

from posttrain.label.quality.queue_report import queue_values, report_on_queue
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, QueueConfig
from posttrain.store.metadata import Metadata


@pytest.mark.slow
def test_a_careless_annotator_of_a_queue_is_named_and_the_work_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rng, clock = np.random.default_rng(0), Clock()
    truth = {f"r{at}": LABELS[int(rng.integers(3))] for at in range(80)}
    known = {f"gold{at}": LABELS[int(rng.integers(3))] for at in range(12)}
    team = [SimulatedAnnotator(name, accuracy=0.95) for name in ("anna", "ben", "cleo")]
    team.append(SimulatedAnnotator("dan", accuracy=0.95, constant="loan", constant_share=0.6))
    metadata = Metadata(f"sqlite:///{tmp_path}/m.db", create=True)
    add_accounts(metadata, *(annotator.name for annotator in team))
    queue = Queue(metadata, QueueConfig(overlap=2, gold_rate=0.1, gold_threshold=0.0), clock)
    items = [NewItem(record, {"text": record}) for record in truth]
    gold = [NewItem(record, {"text": record}, expected=answer) for record, answer in known.items()]
    queue.add_batch("b", "choice", items, labels=LABELS, gold=gold)
    working = list(team)
    while working:
        annotator = working[int(rng.integers(len(working)))]
        task = queue.next(annotator.name)
        if task is None:
            working.remove(annotator)
            continue
        record = task.content["text"]
        shown = SimulatedItem(task.item, {**truth, **known}[record], LABELS)
        answer, seconds = annotator.answer(shown, rng)
        clock.forward(seconds / 60)
        queue.answer(task.item, annotator.name, answer, seconds=seconds)
    report = report_on_queue(queue)
    assert report["counts"]["answers"] == queue.answers().num_rows > 160
    assert {tuple(alarm["annotators"]) for alarm in report["alarms"]} == {("dan",)}
    assert any(alarm["kind"] == "one_answer" and "`loan`" in alarm["sentence"] for alarm in report["alarms"])
    rates = report["gold"]["by_annotator"]
    assert rates["dan"]["value"] < min(rates[name]["value"] for name in ("anna", "ben", "cleo"))
    metadata.close()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    metadata = Metadata(f"sqlite:///{tmp_path}/m.db", create=True)
    yield Queue(metadata)
    metadata.close()


def alarm_kinds(queue: Queue) -> set[tuple[str, str]]:
    report = report_on_queue(queue)
    assert queue_values(queue)["label.alarms"] == len(report["alarms"])
    return {(alarm["kind"], name) for alarm in report["alarms"] for name in alarm["annotators"]}


@pytest.mark.parametrize(
    ("content", "is_read"),
    [
        ({"text": "a short message"}, True),
        ({"text": "word " * 90}, False),
        ({"text": "我的卡在自动取款机里被吞了" * 12}, False),
        ({"prompt": [{"role": "system", "content": "rule " * 90}, {"role": "user", "content": "hello"}]}, True),
    ],
)
def test_answers_faster_than_their_texts_can_be_read_raise_an_alarm(
    queue: Queue, content: dict[str, Any], is_read: bool
) -> None:
    queue.add_batch("b", "choice", [NewItem(f"r{at}", content) for at in range(30)], labels=LABELS)
    while (task := queue.next("anna")) is not None:
        queue.answer(task.item, "anna", LABELS[task.item % 3], seconds=4.0)
    assert alarm_kinds(queue) == (set() if is_read else {("speed", "anna")})


@pytest.mark.parametrize("round", [1, None])
def test_who_prefers_the_first_of_two_answers_is_named_where_their_order_is_chance(
    queue: Queue, round: int | None
) -> None:
    pair = {"text": "?", "candidates": ["yes", "no"]}
    queue.add_batch("b", "preference", [NewItem(f"r{at}", pair) for at in range(120)], round=round)
    for count in range(120):
        # Anna takes the first one of three in four pairs, and Ben of every second one.
        name, period = (("anna", 4), ("ben", 2))[count % 2]
        answer = int(count // 2 % period == 0)
        task = queue.next(name)
        assert task is not None
        queue.answer(task.item, name, answer, seconds=5.0)
    # In an imported file the first one may be the better model's.
    assert alarm_kinds(queue) == ({("position_bias", "anna")} if round else set())
