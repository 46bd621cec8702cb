"""Feedback over HTTP: what is acknowledged, what is refused with one line, and what a killed server keeps."""

import concurrent.futures
import errno
import json
import multiprocessing
import os
import random
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

from posttrain.data.feedback.inbox import Inbox
from posttrain.data.feedback.segment import Segment, sealed_segments
from posttrain.store.checked_lines import read_lines
from posttrain.web.feedback import feedback_app, serve

pytestmark = pytest.mark.slow

GOOD = {"id": "f1", "prompt": "asked", "completion": "said", "rating": "up"}


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    with Inbox(tmp_path / "inbox") as opened:
        yield opened


@pytest.fixture
def client(inbox: Inbox) -> TestClient:
    return TestClient(feedback_app(inbox, limit_bytes=2000))


def held(folder: Path) -> list[str]:
    paths = [*sealed_segments(folder), *sorted((folder / "segments").glob("*.open"))]
    return [value["feedback"]["id"] for path in paths for value in read_lines(path.read_bytes()).values]


def test_it_is_acknowledged_once_it_is_there(client: TestClient, inbox: Inbox) -> None:
    answer = client.post("/v1/feedback", json=GOOD)
    assert (answer.status_code, answer.json()) == (201, {"id": "f1", "repeated": False})
    assert held(inbox.folder) == ["f1"]
    answer = client.post("/v1/feedback", json=GOOD)
    assert (answer.status_code, answer.json()) == (201, {"id": "f1", "repeated": True})
    answer = client.post("/v1/feedback", json={**GOOD, "rating": "down"})
    assert answer.status_code == 409
    assert answer.json() == {"error": "another feedback has the id `f1`; choose an id that is new"}
    assert held(inbox.folder) == ["f1"]


def test_right_answers_outside_the_label_set_are_refused(inbox: Inbox) -> None:
    client = TestClient(feedback_app(inbox, labels=["card", "cash"]))
    answer = client.post("/v1/feedback", json={**GOOD, "corrected_answer": "cards"})
    assert answer.status_code == 422
    assert answer.json() == {"error": "label `cards` is not in the label set; did you mean `card`?"}
    for id, output in (("a", {"completion": "card"}), ("b", {"rating": "down"}), ("c", {"corrected_answer": "cash"})):
        assert client.post("/v1/feedback", json={**GOOD, "id": id, **output}).status_code == 201
    assert held(inbox.folder) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("body", "status", "says"),
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
        (json.dumps({**GOOD, "rating": 0}).replace(": 0", ": 1e999").encode(), 422, "cannot be stored"),
        ({**GOOD, "rating": None}, 422, "needs a `rating`, a `corrected_answer`, or both"),
        ({**GOOD, "completion": ""}, 422, "needs a `completion`, a `corrected_answer`, or both"),
        ({**GOOD, "id": "two\nlines"}, 422, "`id`: must be one line"),
        ({**GOOD, "id": ""}, 422, "`id`"),
        ({**GOOD, "id": "x" * 201}, 422, "`id`"),
        ({"prompt": "x"}, 422, "`id`"),
        ({**GOOD, "correction": "x"}, 422, "did you mean"),
        ({**GOOD, "completion": "x" * 2000}, 413, "longer than 2000 bytes"),
    ],
)
def test_mistakes_end_in_one_line(client: TestClient, inbox: Inbox, body: Any, status: int, says: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/v1/feedback", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    assert held(inbox.folder) == []
    assert client.post("/v1/feedback", json=GOOD).status_code == 201


def test_a_body_of_undeclared_length_is_cut_off_too(client: TestClient) -> None:
    chunks = (b"x" * 500 for _ in range(10))
    answer = client.post("/v1/feedback", content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_only_json_is_taken(client: TestClient) -> None:
    answer = client.post("/v1/feedback", content=json.dumps(GOOD), headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()) == (415, {"error": "send `Content-Type: application/json`"})


def test_a_token(inbox: Inbox) -> None:
    client = TestClient(feedback_app(inbox, token="geheim"))
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "geheim"}):
        answer = client.post("/v1/feedback", json=GOOD, headers=header)
        assert answer.status_code == 401
        assert "geheim" not in answer.text
        assert client.get("/v1/status", headers=header).status_code == 401
    assert client.post("/v1/feedback", json=GOOD, headers={"Authorization": "Bearer geheim"}).status_code == 201
    assert client.get("/healthz").status_code == 200


def test_a_full_disk(client: TestClient, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "append", full)
        answer = client.post("/v1/feedback", json=GOOD)
        assert answer.status_code == 507
        assert "no space left on device" in answer.json()["error"]
        assert held(inbox.folder) == []
    assert client.post("/v1/feedback", json=GOOD).json() == {"id": "f1", "repeated": False}


def test_health_and_counts(client: TestClient, inbox: Inbox) -> None:
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
    """A server in a process of its own, its address, and where it says more."""
    here, there = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(folder, log, there))
    process.start()
    there.close()
    assert here.poll(20)
    return process, here.recv(), here


CHUNK = b"8000\r\n" + b"x" * 2**15 + b"\r\n"


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (b"Transfer-Encoding: chunked", CHUNK * 128 + b"0\r\n\r\n"),
        (b"Content-Length: 4194304", b"x" * 2**22),
        (b"Content-Length: 4194304\r\nExpect: 100-continue", b""),
    ],
    ids=["chunked", "declared", "declared and asked first"],
)
def test_too_long_a_body_is_answered_before_the_connection_ends(tmp_path: Path, header: bytes, body: bytes) -> None:
    process, address, _ = start(tmp_path / "inbox", tmp_path / "log")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=10) as connection:
        head = b"POST /v1/feedback HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + header + b"\r\n\r\n" + body)
        time.sleep(0.2)  # what a reset takes to arrive
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    process.terminate()
    process.join(20)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"is longer than 1048576 bytes" in answer


def post_until_it_dies(address: str, worker: str, acknowledged: list[str], stop: Callable[[], bool]) -> None:
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
    """A disk may be slow; what matters is that the kill comes while posts are under way."""
    while len(acknowledged) < count:
        time.sleep(0.001)


def test_kill_again_and_again_under_concurrent_posts(tmp_path: Path) -> None:
    folder, moments = tmp_path / "inbox", random.Random(5)
    acknowledged: list[str] = []
    for kill in range(4):
        process, address, _ = start(folder, tmp_path / "log")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            futures = [
                pool.submit(post_until_it_dies, address, f"{kill}-{worker}", acknowledged, lambda: False)
                for worker in range(8)
            ]
            wait_for(acknowledged, len(acknowledged) + moments.randrange(1, 12))
            time.sleep(moments.uniform(0, 0.02))
            process.kill()
            process.join(20)
            for future in futures:
                future.result(20)
    with Inbox(folder) as inbox:
        assert inbox.status()["entries"] >= len(acknowledged)
    ids = held(folder)
    assert len(acknowledged) >= 4
    assert len(set(ids)) == len(ids)
    assert set(acknowledged) <= set(ids)
    assert len(ids) - len(acknowledged) <= 8 * 4  # those that were under way


def test_sigterm_answers_what_is_under_way_and_ends_cleanly(tmp_path: Path) -> None:
    process, address, output = start(tmp_path / "inbox", tmp_path / "log")
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as hangs_up:
        hangs_up.sendall(
            b"POST /v1/feedback HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    acknowledged: list[str] = []
    ended = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for worker in range(4):
            pool.submit(post_until_it_dies, address, str(worker), acknowledged, ended.is_set)
        wait_for(acknowledged, 8)
        process.terminate()
        process.join(20)
        ended.set()
    assert process.exitcode == 0
    assert output.recv() == "ended"
    assert (tmp_path / "log").read_text() == ""
    assert set(acknowledged) <= set(held(tmp_path / "inbox"))
