"""A server's app with an account of each role, and clients that are signed in."""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from fastapi.testclient import TestClient
from starlette.types import ASGIApp

from posttrain.data.feedback.inbox import Inbox
from posttrain.label import accounts as accounts_module
from posttrain.label.accounts import Accounts
from posttrain.label.queue import Queue
from posttrain.label.queue_rows import NewItem
from posttrain.loop.config import read_config
from posttrain.store.config import StoreConfig
from posttrain.store.workspace import Workspace
from posttrain.web.access import Site
from posttrain.web.app import labelling_app
from posttrain.web.feedback import feedback_app
from posttrain.web.server import HostCheck, serve

ADDRESS = "http://localhost:8600"
PASSWORD = "correct horse battery"
ROLES = ("viewer", "annotator", "reviewer", "owner")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync, and hashes passwords in no time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    hasher = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
    monkeypatch.setattr(accounts_module, "password_hasher", lambda: hasher)
    accounts_module._unfitting_hash.cache_clear()


_FORKS = multiprocessing.get_context("fork")  # a fresh interpreter would spend seconds on imports


def run_server(root: Path, port: int, output: Any) -> None:
    with Workspace.create(root) as store, Inbox(store.home / "inbox") as inbox:
        site = Site(store, None, Accounts(store.metadata), Queue(store.metadata))
        serve(labelling_app(site, feedback_app(inbox)), "127.0.0.1", port, output.send, on_end=site.ending.set)
    output.send("ended")


class RealServer:
    """A server in a process of its own, on one port, that can be killed and started again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        receiver, sender = _FORKS.Pipe(duplex=False)
        self.process = _FORKS.Process(target=run_server, args=(self.root, self.port, sender))
        self.process.start()
        sender.close()
        assert receiver.poll(30)
        receiver.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealServer]:
    server = RealServer(tmp_path / "workspace")
    yield server
    server.kill()


@dataclass
class Server:
    """The app, and clients of it; the account of each role is called as the role."""

    app: ASGIApp
    site: Site

    def client(self, **headers: str) -> TestClient:
        """Returns a browser that is not signed in: it sends its origin, and follows no redirects."""
        return TestClient(
            self.app,
            ADDRESS,
            headers={"Origin": ADDRESS, **headers},
            follow_redirects=False,
            raise_server_exceptions=False,
        )

    def program(self, name: str) -> TestClient:
        """Returns a program with an API token of the account."""
        secret = self.site.accounts.tokens.issue_api_token(name, "test", name)
        return TestClient(
            self.app, ADDRESS, headers={"Authorization": f"Bearer {secret}"}, raise_server_exceptions=False
        )

    def browser(self, name: str) -> TestClient:
        """Returns a browser that has signed in, whose pages send the session's value."""
        client = self.client()
        answer = client.post("/sign-in", data={"name": name, "password": PASSWORD})
        assert answer.status_code == 303, answer.text
        client.headers["X-CSRF-Token"] = client.get("/api/session").json()["csrf"]
        return client


def build_server(root: Path, store: StoreConfig = StoreConfig(), **options: Any) -> Iterator[Server]:  # noqa: B008
    """Yields the server of a workspace, with an account of each role."""
    with Workspace.create(root, store) as workspace, Inbox(workspace.home / "inbox") as inbox:
        accounts = Accounts(workspace.metadata)
        for role in ROLES:
            accounts.add(role, role, "terminal", PASSWORD)
        config = read_config(root) if (root / "posttrain.yaml").exists() else None
        site = Site(workspace, config, accounts, Queue(workspace.metadata), **options)
        app = HostCheck(labelling_app(site, feedback_app(inbox)), ("localhost", "label.example.com"))
        yield Server(app, site)


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """``make_server(root)``: the server of a workspace of the test's own; ``store`` says where its database is."""
    with contextlib.ExitStack() as stack:
        yield lambda root, **how: stack.enter_context(contextlib.contextmanager(build_server)(root, **how))


@pytest.fixture
def server(small: Any) -> Iterator[Server]:
    yield from build_server(small())


@pytest.fixture(scope="module")
def shared_server(small_anywhere: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all tests of a module that leave nothing behind."""
    yield from build_server(small_anywhere(tmp_path_factory.mktemp("shared"))())


@pytest.fixture
def batch(server: Any) -> Any:
    """A batch of three items and two gold items; the settings would tell gold items apart."""
    items = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(3)]
    gold = [NewItem(f"g{number}", {"text": f"known {number}"}, expected="cash") for number in range(2)]
    return server.site.queue.add_batch("round-1", "choice", items, labels=["card", "cash"], gold=gold)
