"""Reports on a queue: computed once while nothing changes, beside whoever waits; what people do to suggestions."""

import threading
from pathlib import Path
from typing import Any

import pytest
from sample_team import add_answers

from posttrain.label.quality import queue_report
from posttrain.label.quality.queue_report import QueueReports
from posttrain.label.queue import Queue
from posttrain.label.tokens import NotFound
from posttrain.store.workspace import Workspace


@pytest.fixture
def queue(tmp_path: Path) -> Any:
    with Workspace.create(tmp_path / "workspace") as store:
        add_answers(store, 90)
        yield Queue(store.metadata)


def test_a_report_counts_what_each_person_accepts_and_chooses(queue: Any) -> None:
    behaviour = QueueReports(queue).get()["behaviour"]
    answers = queue.answers().to_pylist()
    for name in ("anna", "ben", "chloe", "rosa"):
        mine = [row for row in answers if row["annotator"] == name]
        planted = [row for row in mine if row["planted"]]
        accepted = sum(row["answer"] == row["suggestion"] for row in planted)
        rate = behaviour["suggestions"][name]["planted"]
        assert (rate["count"], rate["n"]) == (accepted, len(planted))
    assert behaviour["errors"]
    assert all(0 <= share <= 1 for shares in behaviour["errors"].values() for share in shares)


def test_an_empty_queue_has_an_empty_report(tmp_path: Path) -> None:
    with Workspace.create(tmp_path / "empty") as store:
        report = QueueReports(Queue(store.metadata)).get()
        assert report["behaviour"] == {"suggestions": {}, "errors": {}}
        with pytest.raises(NotFound):
            QueueReports(Queue(store.metadata)).get("nothing")


def test_a_slow_report_is_computed_once_beside_those_who_do_not_wait(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, calls = threading.Event(), []
    compute = queue_report.report_on_queue

    def slow(*arguments: Any) -> Any:
        calls.append(arguments)
        assert go.wait(30)
        return compute(*arguments)

    monkeypatch.setattr(queue_report, "report_on_queue", slow)
    reports = QueueReports(queue)
    assert reports.get(wait=0) is None
    assert reports.get(wait=0.01) is None
    go.set()
    first = reports.get()
    assert first is reports.get(wait=0)
    assert len(calls) == 1
    # A change is taken up once the report is old enough; until then, and while it is computed, the last one counts.
    queue.add_guideline("Read twice.", "rosa")
    assert reports.get() is first
    monkeypatch.setattr(queue_report, "_KEPT_SECONDS", 0.0)
    go.clear()
    assert reports.get(wait=0) is first
    go.set()
    assert reports.get() is not first
    assert len(calls) == 2


def test_a_report_that_fails_is_tried_again(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = QueueReports(queue)
    with monkeypatch.context() as patch:
        patch.setattr(queue_report, "quality_report", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reports.get()
    assert reports.get()["counts"]["answers"] > 0
