"""A real HTTP server that answers like OpenAI's chat completions, or with the faults that a test sets."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class FakeEndpoint:
    """Attributes:
    answer: the text for a conversation.
    faults: the faults of the next requests, one each: a status, "hang", "garbage", "cut", "empty".
    requests: bodies of the requests that got a text.
    usage: the tokens that each reply reports; None for a server that counts none.
    """

    url: str = ""
    answer: Callable[[list[dict[str, str]]], str] = lambda messages: f"echo {messages[-1]['content']}"
    faults: list[Any] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 7, "completion_tokens": 3})
    most_at_once: int = 0
    at_once: int = 0
    delay: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEndpoint]:
    from posttrain.models.endpoint import Endpoint

    monkeypatch.setattr(Endpoint, "wait", 0.01)
    monkeypatch.setattr(Endpoint, "timeout", 5.0)
    fake = FakeEndpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                fake.at_once += 1
                fake.most_at_once = max(fake.most_at_once, fake.at_once)
                fault = fake.faults.pop(0) if fake.faults else None
                fake.headers.append(dict(self.headers))
            time.sleep(fake.delay)
            with fake.lock:
                fake.at_once -= 1  # before the reply: the client's next request may come before this line otherwise
            self.reply(body, fault)

        def reply(self, body: dict[str, Any], fault: Any) -> None:
            if self.path != "/v1/chat/completions":
                fault = 404
            if isinstance(fault, int):
                self.send(fault, {"error": {"message": "as the test\nasked for"}})
            elif fault == "hang":
                time.sleep(0.6)
                self.close_connection = True
            elif fault == "garbage":
                self.send(200, b"<html>not json")
            elif fault == "other json":
                self.send(200, {"choices": []})
            else:
                text = "" if fault == "empty" else fake.answer(body["messages"])
                with fake.lock:
                    fake.requests.append(body)
                choice = {"message": {"role": "assistant", "content": text}}
                choice["finish_reason"] = "length" if fault == "cut" else "stop"
                self.send(200, {"choices": [choice], **({"usage": fake.usage} if fake.usage else {})})

        def send(self, status: int, body: Any) -> None:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()
