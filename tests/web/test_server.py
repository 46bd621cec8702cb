"""The server accepts only its own hosts, and limits the time of a client and the number of connections."""

import asyncio
import multiprocessing
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from posttrain.web.server import HostCheck, host_name, serve

_FORKS = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on imports


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/reads":
        while (await receive()).get("more_body"):
            pass
    if scope["path"] == "/waits":
        await asyncio.sleep(0.6)
    texts = {"/long": lambda: "x" * 2**20, "/delays": lambda: str(connection_delays(scope["server"][1]))}
    await PlainTextResponse(texts.get(scope["path"], lambda: "answer")())(scope, receive, send)


def connection_delays(port: int) -> list[bool]:
    """For each TCP connection to a port: whether a small packet waits for an acknowledgement (Nagle)."""
    delays = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family == socket.AF_INET and copy.getpeername() and copy.getsockname()[1] == port:
                        delays.append(not copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    return delays


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8600", "localhost"),
        ("example.com.:1", "example.com"),
        ("[::1]:8600", "::1"),
        ("[::1]", "::1"),
        ("127.0.0.1:", "127.0.0.1"),
        ("", ""),
        ("[::1", ""),
        ("::1", ""),
        ("localhost@evil.example", ""),
        ("localhost:80@evil.example", ""),
        ("localhost/x", ""),
        ("a b", ""),
    ],
)
def test_the_name_of_a_host(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("host", "any_address", "status"),
    [
        ("localhost:8600", False, 200),
        ("feedback.example.com", False, 200),
        ("evil.example", False, 421),
        ("localhost.evil.example", False, 421),
        ("10.0.0.1", False, 421),
        ("10.0.0.1:80", True, 200),
        ("[fe80::1]", True, 200),
        ("evil.example", True, 421),
        ("", True, 421),
    ],
)
def test_only_allowed_hosts_are_served(host: str, any_address: bool, status: int) -> None:
    client = TestClient(HostCheck(app, ("localhost", "Feedback.example.com"), any_address=any_address))
    answer = client.get("/", headers={"Host": host})
    assert answer.status_code == status
    if status == 421:
        assert "--allowed-host" in answer.json()["error"]


def _run(output: Any, limits: dict[str, Any]) -> None:
    serve(app, "127.0.0.1", 0, output.send, allowed_hosts=["own.example"], **limits)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server with short limits and three connections."""
    receiver, sender = _FORKS.Pipe(duplex=False)
    limits = {"head_seconds": 0.5, "body_seconds": 0.4, "answer_seconds": 0.3, "max_connections": 3}
    process: BaseProcess = _FORKS.Process(target=_run, args=(sender, limits))
    process.start()
    assert receiver.poll(20)
    yield int(receiver.recv().rpartition(":")[2])
    process.terminate()
    process.join(20)
    assert process.exitcode == 0


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(data)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection, or resets it because it did not read everything."""
    received = b""
    with connection, suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
    return received


def request(path: str, headers: str = "", host: str = "localhost") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode()


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "own.example", "evil.example"])
def test_the_bound_address_and_named_hosts_are_allowed(port: int, host: str) -> None:
    status = b"421" if host == "evil.example" else b"200"
    assert answer(connect(port, request("/", "Connection: close\r\n", host))).startswith(b"HTTP/1.1 " + status)


def test_the_answer_is_sent_without_waiting_for_an_acknowledgement(port: int) -> None:
    assert answer(connect(port, request("/delays", "Connection: close\r\n"))).endswith(b"\r\n\r\n[False]")


@pytest.mark.parametrize(
    "start",
    [b"", b"POST / HTTP/1.1\r\nHo", request("/reads", "Content-Length: 5\r\n") + b"1234"],
    ids=["nothing", "a part of the head", "a part of the body"],
)
def test_a_slow_client_is_answered_408(port: int, start: bytes) -> None:
    assert answer(connect(port, start)).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_nobody_needs_is_not_awaited_without_end(port: int) -> None:
    assert answer(connect(port, request("/", "Content-Length: 5\r\n") + b"1234")).count(b"HTTP/1.1") == 1


def test_the_app_may_take_longer_than_a_client(port: int) -> None:
    assert answer(connect(port, request("/waits", "Connection: close\r\n"))).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_takes_no_answer_is_closed(port: int) -> None:
    with connect(port, request("/long") * 20) as connection:
        time.sleep(0.8)
        # Of the answers, there is only what the buffers of the connection hold.
        assert len(answer(connection)) < 20 * 2**20


def test_of_too_many_connections_the_one_that_waits_longest_is_closed(port: int) -> None:
    held = [connect(port, b"POST /reads HTTP/1.1\r\n") for _ in range(3)]
    assert answer(connect(port, request("/", "Connection: close\r\n"))).startswith(b"HTTP/1.1 200 ")
    assert answer(held[0])[:12] in (b"HTTP/1.1 503", b"")
    assert all(answer(connection).startswith(b"HTTP/1.1 408 ") for connection in held[1:])


def test_a_client_that_is_being_answered_is_not_closed_for_another(port: int) -> None:
    served = [connect(port, request("/waits", "Connection: close\r\n")) for _ in range(3)]
    time.sleep(0.2)  # a request that has not been read yet could be closed as well
    assert answer(connect(port)).startswith(b"HTTP/1.1 503 ")
    assert all(answer(connection).startswith(b"HTTP/1.1 200 ") for connection in served)


def test_a_request_that_is_broken_is_answered_400(port: int) -> None:
    assert answer(connect(port, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    body = request("/reads", "Transfer-Encoding: chunked\r\n") + b"zz\r\n"
    assert answer(connect(port, body)).startswith(b"HTTP/1.1 400 ")
