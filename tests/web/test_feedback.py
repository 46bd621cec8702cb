"""Feedback over HTTP: acknowledgements, refusals in one line, and no loss when the server is killed."""

import concurrent.futures
import errno
import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from posttrain.data.feedback.entries import Feedback
from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.segment import Segment, sealed_segments
from posttrain.store.hashing import read_lines
from posttrain.web.feedback import feedback_app
from posttrain.web.server import serve

pytestmark = pytest.mark.slow

GOOD = {"id": "f1", "prompt": "question", "completion": "answer", "rating": "up"}


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    with Inbox(tmp_path / "inbox") as inbox:
        yield inbox


@pytest.fixture
def client(inbox: Inbox) -> TestClient:
    return TestClient(feedback_app(inbox, limit_bytes=8000))


def stored_ids(folder: Path) -> list[str]:
    paths = [*sealed_segments(folder), *sorted((folder / "segments").glob("*.open"))]
    return [value["feedback"]["id"] for path in paths for value in read_lines(path.read_bytes()).values]


def test_feedback_is_acknowledged_once_it_is_stored(client: TestClient, inbox: Inbox) -> None:
    answer = client.post("/v1/feedback", json=GOOD)
    assert (answer.status_code, answer.json()) == (201, {"id": "f1", "repeated": False})
    assert stored_ids(inbox.folder) == ["f1"]
    answer = client.post("/v1/feedback", json=GOOD)
    assert (answer.status_code, answer.json()) == (201, {"id": "f1", "repeated": True})
    answer = client.post("/v1/feedback", json={**GOOD, "rating": "down"})
    assert answer.status_code == 409
    assert answer.json() == {"error": "another feedback has the id `f1`; choose an id that is new"}
    assert stored_ids(inbox.folder) == ["f1"]


def test_corrected_answers_outside_the_label_set_are_refused(inbox: Inbox) -> None:
    client = TestClient(feedback_app(inbox, labels=["card", "cash"]))
    answer = client.post("/v1/feedback", json={**GOOD, "corrected_answer": "cards"})
    assert answer.status_code == 422
    assert answer.json() == {"error": "label `cards` is not in the label set; did you mean `card`?"}
    for id, fields in (("a", {"completion": "card"}), ("b", {"rating": "down"}), ("c", {"corrected_answer": "cash"})):
        assert client.post("/v1/feedback", json={**GOOD, "id": id, **fields}).status_code == 201
    assert stored_ids(inbox.folder) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "broken JSON"),
        (b"{", 400, "broken JSON"),
        (b"[1]", 400, "one JSON object"),
        (b"\xff\xfe{}", 400, "not UTF-8"),
        (b'{"id": "\\ud800"}', 400, "not UTF-8"),
        (b'{"id": NaN}', 400, "`NaN` is not JSON"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", 400, "nested too deeply"),
        ({**GOOD, "prompt": 5}, 422, "`prompt`: must be text, or turns"),
        ({**GOOD, "prompt": " "}, 422, "the prompt is empty"),
        ({**GOOD, "prompt": [{"role": "assistant", "content": "x"}]}, 422, "no user turn stands before the answer"),
        ({**GOOD, "prompt": [{"role": "usr", "content": "x"}]}, 422, "did you mean `user`?"),
        ({**GOOD, "rating": "great"}, 422, "`rating`: must be up, down or a number"),
        ({**GOOD, "rating": True}, 422, "`rating`: must be up, down or a number"),
        (
            json.dumps({**GOOD, "rating": 0}).replace(": 0", ": 1e999").encode(),
            422,
            "`rating`: must be at most 1,000,000",
        ),
        ({**GOOD, "rating": 10**3999}, 422, "`rating`: must be at most 1,000,000"),
        ({**GOOD, "rating": -(10**6) - 1}, 422, "`rating`: must be at most 1,000,000"),
        (json.dumps(GOOD).replace('"up"', "1" * 5000).encode(), 400, "a number has thousands of digits"),
        (
            json.dumps({**GOOD, "metadata": {"n": 0}}).replace(": 0", ": 1e999").encode(),
            422,
            "`metadata`: holds a number that is too large",
        ),
        (json.dumps(GOOD).replace("{", '{"id": "f0", ').encode(), 400, "the key `id` occurs twice"),
        (b'{"id": "a", "prompt": "p", "metadata": {"a": {"b": 1, "b": 2}}}', 400, "the key `b` occurs twice"),
        ({**GOOD, "rating": None}, 422, "needs a `rating`, a `corrected_answer`, or both"),
        ({**GOOD, "completion": ""}, 422, "needs a `completion`, a `corrected_answer`, or both"),
        ({**GOOD, "id": "two\nlines"}, 422, "`id`: must be one line"),
        ({**GOOD, "id": ""}, 422, "`id`"),
        ({**GOOD, "id": "x" * 201}, 422, "`id`"),
        ({"prompt": "x"}, 422, "`id`"),
        ({**GOOD, "correction": "x"}, 422, "did you mean"),
        ({**GOOD, "completion": "x" * 8000}, 413, "longer than 8000 bytes"),
    ],
)
def test_invalid_feedback_is_refused_in_one_line(
    client: TestClient, inbox: Inbox, body: Any, status: int, message: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/feedback", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    assert len(answer.json()["error"]) < 500
    assert stored_ids(inbox.folder) == []
    assert client.post("/v1/feedback", json=GOOD).status_code == 201


def test_a_long_body_of_undeclared_length_is_refused(client: TestClient) -> None:
    chunks = (b"x" * 500 for _ in range(20))
    answer = client.post("/v1/feedback", content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_only_json_is_accepted(client: TestClient) -> None:
    answer = client.post("/v1/feedback", content=json.dumps(GOOD), headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()) == (415, {"error": "send `Content-Type: application/json`"})


def test_a_wrong_token_is_refused(inbox: Inbox) -> None:
    client = TestClient(feedback_app(inbox, token="geheim"))
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "geheim"}):
        answer = client.post("/v1/feedback", json=GOOD, headers=header)
        assert answer.status_code == 401
        assert "geheim" not in answer.text
        assert client.get("/v1/status", headers=header).status_code == 401
    assert client.post("/v1/feedback", json=GOOD, headers={"Authorization": "Bearer geheim"}).status_code == 201
    assert client.get("/healthz").status_code == 200


def test_the_api_describes_itself(inbox: Inbox) -> None:
    client = TestClient(feedback_app(inbox, token="geheim"))
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == {"/v1/feedback", "/v1/status", "/healthz"}
    post = document["paths"]["/v1/feedback"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"].keys() == Feedback.model_fields.keys()
    assert {"201", "400", "401", "409", "413", "415", "422", "503", "507"} <= set(post["responses"])
    assert post["security"] == [{"HTTPBearer": []}]
    assert "security" not in document["paths"]["/healthz"]["get"]
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404  # pages that would load scripts


def test_unknown_paths_and_methods_are_refused_in_one_line(client: TestClient) -> None:
    assert (client.get("/nowhere").status_code, client.get("/nowhere").json()) == (404, {"error": "not found"})
    answer = client.get("/v1/feedback")
    assert (answer.status_code, answer.json()) == (405, {"error": "method not allowed"})
    assert answer.headers["allow"] == "POST"


def test_a_full_disk_gives_507_and_stores_nothing(
    client: TestClient, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "append", fail)
        answer = client.post("/v1/feedback", json=GOOD)
        assert answer.status_code == 507
        assert "no space left on device" in answer.json()["error"]
        assert stored_ids(inbox.folder) == []
    assert client.post("/v1/feedback", json=GOOD).json() == {"id": "f1", "repeated": False}


def test_status_counts_entries_and_a_closed_inbox_gives_503(client: TestClient, inbox: Inbox) -> None:
    client.post("/v1/feedback", json=GOOD)
    assert client.get("/healthz").json() == {"status": "ok"}
    status = client.get("/v1/status").json()["inbox"]
    assert (status["entries"], status["sealed"], status["waiting"]) == (1, 0, 0)
    inbox.close()
    assert client.get("/healthz").status_code == 503
    assert client.post("/v1/feedback", json={**GOOD, "id": "f2"}).status_code == 503


_FORKS = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on imports


def _run(folder: Path, log: Path, output: Any) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    with Inbox(folder, segment_bytes=20_000) as inbox:
        serve(feedback_app(inbox), "127.0.0.1", 0, output.send)
    output.send("ended")


def start(folder: Path, log: Path) -> tuple[BaseProcess, str, Any]:
    """Start a server in another process; returns the process, its address, and the pipe for further messages."""
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(folder, log, sender))
    process.start()
    sender.close()
    assert receiver.poll(20)
    return process, receiver.recv(), receiver


CHUNK = b"8000\r\n" + b"x" * 2**15 + b"\r\n"


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"Transfer-Encoding: chunked", CHUNK * 128 + b"0\r\n\r\n"),
        (b"Content-Length: 4194304", b"x" * 2**22),
        (b"Content-Length: 4194304\r\nExpect: 100-continue", b""),
    ],
    ids=["chunked", "declared", "declared with expect"],
)
def test_a_too_long_body_is_answered_before_the_connection_ends(tmp_path: Path, header: bytes, body: bytes) -> None:
    process, address, _ = start(tmp_path / "inbox", tmp_path / "log")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=10) as connection:
        head = b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + header + b"\r\n\r\n" + body)
        time.sleep(0.2)  # a reset would arrive in this time
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    process.terminate()
    process.join(20)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"is longer than 1048576 bytes" in answer


def post_until_failure(address: str, worker: str, acknowledged: list[str], stop: Callable[[], bool]) -> None:
    number = 0
    with httpx.Client(timeout=5) as client:
        while not stop():
            id = f"{worker}-{number}"
            try:
                answer = client.post(f"{address}/v1/feedback", json={**GOOD, "id": id})
            except httpx.HTTPError:
                return
            assert answer.status_code == 201, answer.text
            acknowledged.append(id)
            number += 1


def wait_for(acknowledged: list[str], count: int) -> None:
    """Wait for acknowledgements, not for a time: a disk may be slow, and the kill must come during the posts."""
    while len(acknowledged) < count:
        time.sleep(0.001)


def test_repeated_kills_during_concurrent_posts_lose_no_acknowledged_feedback(tmp_path: Path) -> None:
    folder, delays = tmp_path / "inbox", random.Random(5)
    acknowledged: list[str] = []
    for kill in range(4):
        process, address, _ = start(folder, tmp_path / "log")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(post_until_failure, address, f"{kill}-{worker}", acknowledged, lambda: False)
                for worker in range(8)
            ]
            wait_for(acknowledged, len(acknowledged) + delays.randrange(1, 12))
            time.sleep(delays.uniform(0, 0.02))
            process.kill()
            process.join(20)
            for future in futures:
                future.result(20)
    with Inbox(folder) as inbox:
        assert inbox.status()["entries"] >= len(acknowledged)
    ids = stored_ids(folder)
    assert len(acknowledged) >= 4
    assert len(set(ids)) == len(ids)
    assert set(acknowledged) <= set(ids)
    assert len(ids) - len(acknowledged) <= 8 * 4  # posts in progress at a kill


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_answers_open_requests_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process, address, output = start(tmp_path / "inbox", tmp_path / "log")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as connection:
        connection.sendall(
            b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    acknowledged: list[str] = []
    stopped = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for worker in range(4):
            pool.submit(post_until_failure, address, str(worker), acknowledged, stopped.is_set)
        wait_for(acknowledged, 8)
        os.kill(process.pid or 0, number)
        process.join(20)
        stopped.set()
    assert process.exitcode == 0
    assert output.recv() == "ended"
    assert (tmp_path / "log").read_text() == ""
    assert set(acknowledged) <= set(stored_ids(tmp_path / "inbox"))
