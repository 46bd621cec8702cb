"""The client of the API against a server that is killed: whatever was acknowledged is there."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from posttrain.label.accounts import Accounts
from posttrain.label.client import LabelClient
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem, PausedError, QueueConfig
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import UserError, WorkError
from posttrain.store.workspace import Workspace

LABELS = ["card", "cash", "loan"]


def prepare(root: Path, names: tuple[str, ...], items: int, role: str = "annotator") -> list[str]:
    """Makes the accounts and a batch; returns a token of each account."""
    with Workspace.create(root) as store:
        accounts = Accounts(store.metadata)
        for name in names:
            accounts.add(name, role, "terminal")
        rows = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(items)]
        # No item is answered twice, so that each acknowledged answer is the only one of its item.
        Queue(store.metadata, QueueConfig(check=0.0)).add_batch("round-1", "choice", rows, labels=LABELS)
        return [accounts.tokens.issue_api_token(name, "test", "terminal") for name in names]


@pytest.mark.slow
def test_kills_between_and_amid_requests_lose_no_acknowledged_answer(real: Any) -> None:
    names = ("anna", "ben", "cleo")
    tokens = prepare(real.root, names, 60)
    acknowledged: dict[int, tuple[str, str]] = {}
    real.start()
    done = threading.Event()

    def label(name: str, token: str, draw: int) -> None:
        with LabelClient(real.url, token, retries=60, timeout=5) as client:
            while (task := client.next_item()) is not None:
                answer = LABELS[(task.item + draw) % 3]
                client.answer(task.item, answer)
                acknowledged[task.item] = (name, answer)
        done.set()

    people = [
        threading.Thread(target=label, args=(name, token, draw))
        for draw, (name, token) in enumerate(zip(names, tokens, strict=True))
    ]
    for person in people:
        person.start()
    for kill in range(2):
        while len(acknowledged) < 20 * (kill + 1) and not done.is_set():
            time.sleep(0.001)
        real.kill()
        real.start()
    for person in people:
        person.join(120)
    real.kill()
    with Workspace.open(real.root) as store:
        queue = Queue(store.metadata)
        stored = {
            item.id: [(given.annotator, given.answer) for given in item.answers] for item in queue.items("round-1")
        }
        assert queue.progress("round-1").done == 60
    assert len(acknowledged) >= 40
    assert all(stored[item] == [answer] for item, answer in acknowledged.items())
    assert all(len(answers) == 1 for answers in stored.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_open_streams_and_the_server(real: Any, number: signal.Signals) -> None:
    [token] = prepare(real.root, ("vera",), 1, "viewer")
    real.start()
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.stream("GET", f"{real.url}/api/events", headers=headers, timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 2000"
        started = time.monotonic()
        os.kill(real.process.pid or 0, number)
        list(lines)
    real.process.join(20)
    assert real.process.exitcode == 0
    assert time.monotonic() - started < 8  # below the server's patience with open requests


@pytest.fixture
def client(server: Any) -> Iterator[LabelClient]:
    secret = server.site.accounts.tokens.issue_api_token("annotator", "test", "annotator")
    with LabelClient("http://localhost:8600", secret, retries=0, transport=_InProcess(server)) as client:
        yield client


class _InProcess(httpx.BaseTransport):
    """Hands requests to the app of a test."""

    def __init__(self, server: Any) -> None:
        self.browser = server.client()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        headers = {name: value for name, value in request.headers.items() if name in ("authorization", "content-type")}
        answer = self.browser.request(request.method, str(request.url), content=request.content, headers=headers)
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)


def test_a_program_labels_a_batch(client: LabelClient, server: Any, batch: Any) -> None:
    first = client.next_item("round-1")
    assert first is not None
    assert (first.kind, list(first.labels or ())) == ("choice", ["card", "cash"])
    again = client.next_item()
    assert again is not None
    assert again.item == first.item
    id = client.answer(first.item, "card", seconds=1.5)
    assert client.answer(first.item, "card") == id
    undone = client.undo(first.item)
    assert undone is not None
    assert undone.item == first.item
    client.skip(first.item, "unclear")
    second = client.next_item()
    assert second is not None
    client.flag(second.item, "Both fit.", "cash")
    progress = client.progress("round-1")
    assert (progress["items"], progress["review"], progress["answers"]) == (3, 1, 0)
    assert [state["name"] for state in client.batches()] == ["round-1"]


def test_refusals_are_errors_of_their_kind(client: LabelClient, server: Any, batch: Any) -> None:
    task = client.next_item()
    assert task is not None
    with pytest.raises(UserError, match="not in the label set"):
        client.answer(task.item, "cards")
    client.answer(task.item, "card")
    with pytest.raises(Conflict, match="answered this item already"):
        client.answer(task.item, "cash")
    for missing in (lambda: client.next_item("other"), lambda: client.progress("other"), lambda: client.skip(10**6)):
        with pytest.raises(NotFound):
            missing()
    server.site.accounts.pause("annotator", "Let us talk.", "owner")
    with pytest.raises(PausedError, match="Let us talk"):
        client.next_item()
    client._http.headers["Authorization"] = "Bearer wrong"
    with pytest.raises(UserError, match="valid `Authorization"):
        client.batches()


@pytest.mark.slow
def test_a_busy_server_is_asked_again_when_it_says_and_a_silent_one_is_given_up() -> None:
    replies = [
        httpx.Response(503, json={"error": "too many connections"}),
        httpx.Response(429, json={"error": "wait"}, headers={"Retry-After": "0"}),
        httpx.Response(200, json=[{"name": "round-1"}]),
    ]
    with LabelClient("http://x", "t", transport=httpx.MockTransport(lambda request: replies.pop(0))) as client:
        assert client.batches() == [{"name": "round-1"}]

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        LabelClient("http://x", "t", retries=1, transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(WorkError, match=r"no answer after 2 attempts \(ConnectError"),
    ):
        client.batches()
    with (
        LabelClient("http://x", "t", transport=httpx.MockTransport(lambda request: httpx.Response(500))) as client,
        pytest.raises(WorkError, match="HTTP status 500"),
    ):
        client.batches()
