"""Calls of ``label.webhook``: after the commit, in order, until they succeed, and never at the work's expense."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrain.label import webhook
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.label.webhook import deliver_due, note_alarms, note_batches, webhook_calls
from posttrain.store.database import utc_now
from posttrain.store.label_tables import label_batches, label_events
from posttrain.store.metadata import Metadata

ALARM = {"kind": "speed", "annotators": ["ana"], "sentence": "ana is fast"}


class Receiver:
    """A web server that keeps what it is sent; answers 500 as often as ``failures`` says."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failures, self.redirect, self.target = 0, 0, ""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.bodies.append(body)
                receiver.failures -= 1
                self.send_response(receiver.redirect or (500 if receiver.failures >= 0 else 204))
                if receiver.redirect:
                    self.send_header("Location", receiver.target)
                self.end_headers()

            def do_GET(self) -> None:
                receiver.bodies.append({"method": "GET"})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    database = Metadata(f"sqlite:///{tmp_path / 'db'}", create=True)
    yield database
    database.close()


def add_batch(metadata: Metadata, name: str, days_ago: float = 0) -> None:
    created = utc_now() - timedelta(days=days_ago)
    row = {"name": name, "kind": "label", "labels": ["a"], "settings": {}, "status": "open", "created_at": created}
    metadata.insert_row(label_batches, row)


def finish(metadata: Metadata, name: str) -> None:
    metadata.update_rows(label_batches, label_batches.c.name == name, {"status": "done", "finished_at": utc_now()})


def make_due(metadata: Metadata) -> None:
    with metadata.transaction() as connection:
        connection.execute(label_events.update().values(due_at=utc_now()))


def events(metadata: Metadata) -> list[tuple[str, str, str]]:
    columns = label_events.c
    with metadata.reading() as connection:
        return [
            (row.event, row.target, row.status)
            for row in connection.execute(label_events.select().order_by(columns.id))
        ]


def test_each_event_is_called_once(metadata: Metadata, receiver: Receiver) -> None:
    add_batch(metadata, "round-1")
    for _ in range(2):
        note_batches(metadata)
        deliver_due(metadata, receiver.url)
    finish(metadata, "round-1")
    alarm = {"kind": "new_errors", "annotators": ["ana"], "sentence": "ana drifts"}
    note_alarms(metadata, [alarm, alarm])
    for _ in range(2):
        note_batches(metadata)
        deliver_due(metadata, receiver.url)
    assert [body["event"] for body in receiver.bodies] == ["batch ready", "alarm", "batch done"]
    assert receiver.bodies[1]["alarm"] == alarm
    batch = receiver.bodies[2]["batch"]
    assert (batch["name"], batch["items"], batch["open"]) == ("round-1", 0, 0)
    assert batch["finished_at"] is not None
    assert len({body["id"] for body in receiver.bodies}) == 3


def test_an_old_batch_is_no_news(metadata: Metadata) -> None:
    add_batch(metadata, "old", days_ago=2)
    note_batches(metadata)
    assert events(metadata) == []
    finish(metadata, "old")
    note_batches(metadata)
    assert events(metadata) == [("batch done", "old", "pending")]


def test_a_failed_call_is_made_again_later(metadata: Metadata, receiver: Receiver) -> None:
    receiver.failures = 2
    add_batch(metadata, "b")
    note_batches(metadata)
    assert deliver_due(metadata, receiver.url) == 0
    assert events(metadata) == [("batch ready", "b", "failed")]
    assert deliver_due(metadata, receiver.url) == 0
    assert len(receiver.bodies) == 1, "the event is not due yet"
    make_due(metadata)
    assert deliver_due(metadata, receiver.url) == 0
    make_due(metadata)
    assert deliver_due(metadata, receiver.url) == 1
    make_due(metadata)
    assert deliver_due(metadata, receiver.url) == 0
    assert [body["id"] for body in receiver.bodies] == [receiver.bodies[0]["id"]] * 3


def test_calls_end_after_many_failures(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(webhook, "post_json", lambda url, body, timeout: calls.append(url) or "refused")
    note_alarms(metadata, [ALARM])
    for _ in range(20):
        deliver_due(metadata, "http://127.0.0.1:9")
        make_due(metadata)
    assert len(calls) == 12


def test_a_call_in_progress_is_not_made_by_another_process(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def post(url: str, body: dict[str, Any], timeout: float) -> None:
        calls.append(url)
        # The other process: its call must not find the event due.
        assert deliver_due(metadata, "second") == 0

    monkeypatch.setattr(webhook, "post_json", post)
    note_alarms(metadata, [ALARM])
    assert deliver_due(metadata, "first") == 1
    assert calls == ["first"]


def test_work_neither_waits_for_a_silent_server_nor_fails_with_it(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(webhook, "post_json", lambda *arguments: release.wait(30) and "late")
    add_batch(metadata, "b")
    start = time.monotonic()
    with webhook_calls(metadata, "http://127.0.0.1:9", last_seconds=0.2):
        finish(metadata, "b")
    assert time.monotonic() - start < 10
    release.set()


def test_the_last_step_of_the_work_is_sent_before_it_ends(metadata: Metadata, receiver: Receiver) -> None:
    with webhook_calls(metadata, receiver.url):
        add_batch(metadata, "b")
    assert [body["event"] for body in receiver.bodies] == ["batch ready"]


def test_a_batch_is_done_when_nothing_in_it_is_undecided(metadata: Metadata) -> None:
    queue = Queue(metadata)
    items = [NewItem(name, {"text": name}) for name in ("r1", "r2")]
    queue.add_batch("b", "choice", items, labels=["a"], gold=[NewItem("g", {"text": "g"}, expected="a")])
    first, second = (item.id for item in queue.items("b"))
    queue.answer(first, "ana", "a")
    note_batches(metadata)
    queue.flag(second, "ana", "ambiguous")
    note_batches(metadata)
    assert queue.progress("b").review == 1
    assert [event[:2] for event in events(metadata)] == [("batch ready", "b")]
    queue.drop(second, "rita")
    note_batches(metadata)
    queue.finish_batch("b")
    note_batches(metadata)
    assert [event[:2] for event in events(metadata)] == [("batch ready", "b"), ("batch done", "b")]


def test_alarms_are_looked_for_at_the_end_of_the_work(metadata: Metadata, receiver: Receiver) -> None:
    with webhook_calls(metadata, receiver.url, lambda: [ALARM]):
        pass
    assert [body["alarm"]["kind"] for body in receiver.bodies] == ["speed"]


def test_an_error_of_the_database_is_only_logged(
    metadata: Metadata, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(metadata: Metadata) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(webhook, "note_batches", broken)
    with webhook_calls(metadata, "http://127.0.0.1:9"):
        pass
    assert "label.webhook" in caplog.text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["/elsewhere", "ftp://127.0.0.1:1/file", "file:///etc/passwd"])
def test_a_redirected_call_is_not_delivered(
    receiver: Receiver, metadata: Metadata, caplog: pytest.LogCaptureFixture, status: int, target: str
) -> None:
    receiver.redirect, receiver.target = status, target
    add_batch(metadata, "round-1")
    note_batches(metadata)
    assert deliver_due(metadata, receiver.url) == 0
    assert [body["event"] for body in receiver.bodies] == ["batch ready"], "nothing is sent to the new address"
    assert f"redirects to {target} (status {status}); give that address" in caplog.text
    receiver.redirect = 0
    make_due(metadata)
    assert deliver_due(metadata, receiver.url) == 1
