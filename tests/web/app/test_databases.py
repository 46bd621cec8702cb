"""Accounts and the API on PostgreSQL as on SQLite: what two people do at once has one outcome."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from posttrain.label.client import LabelClient
from posttrain.label.queue_rows import NewItem
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.config import StoreConfig
from posttrain.store.errors import StorageError, UserError

PASSWORD = "correct horse battery"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path: Path, make_server: Callable[..., Any]) -> Any:
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else None
    return make_server(tmp_path / "workspace", store=StoreConfig(database=url))


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the results of calls that begin together; of one that is refused, its error."""
    start = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait(10)
        try:
            return call()
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.mark.slow
def test_a_person_is_invited_labels_is_paused_and_leaves(server: Any) -> None:
    owner = server.browser("owner")
    items = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(3)]
    server.site.queue.add_batch("round-1", "choice", items, labels=["card", "cash"])
    secret = owner.post("/api/invitations", json={"role": "annotator", "note": "for 安娜"}).json()["secret"]
    guest = server.client()
    joined = {"token": secret, "name": "安娜", "password": PASSWORD, "repeat": PASSWORD}
    assert guest.post("/invitation", data=joined).status_code == 303
    guest.headers["X-CSRF-Token"] = guest.get("/api/session").json()["csrf"]
    item = guest.post("/api/items/next", json={}).json()["task"]["item"]
    assert guest.post(f"/api/items/{item}/answer", json={"answer": "card", "next": True}).json()["next"]
    assert guest.post("/api/undo", json={}).json()["task"]["item"] == item
    assert guest.post(f"/api/items/{item}/flag", json={"note": "unclear"}).status_code == 201
    assert owner.put("/api/people/安娜/pause", json={"reason": "Let us talk."}).json()["paused"] == "Let us talk."
    assert guest.post("/api/items/next", json={}).json() == {"task": None, "paused": "Let us talk."}
    assert owner.post(f"/api/items/{item}/resolve", json={"answer": "cash"}).json()["resolution"]["answer"] == "cash"
    assert owner.post("/api/guidelines", json={"text": "# Labels"}).json()["version"] == 1
    assert owner.get("/api/guidelines/outdated").status_code == 200
    assert owner.delete("/api/people/安娜").status_code == 200
    assert guest.get("/api/session").status_code == 401
    entries = owner.get("/api/audit?count=20").json()
    assert [entry["number"] for entry in entries] == sorted((entry["number"] for entry in entries), reverse=True)
    assert [entry["action"] for entry in entries[:3]] == ["close account", "add guideline", "resolve item"]
    assert entries[2]["after"]["answer"] == "cash"
    for page in ("/people", "/people/audit", "/quality", "/guidelines", "/label", "/review"):
        assert owner.get(page, headers={"Accept": "text/html"}).status_code == 200


def test_secrets_that_are_used_at_once_are_used_once(server: Any) -> None:
    accounts = server.site.accounts
    link = accounts.tokens.issue_link("viewer", "owner")
    used = at_once([partial(accounts.tokens.use, link, "link")] * 6)
    assert [each.account for each in used if not isinstance(each, NotFound)] == ["viewer"]
    invitation = accounts.tokens.invite("viewer", "", "owner")
    joined = at_once([partial(accounts.accept, invitation, f"guest{at}", PASSWORD) for at in range(4)])
    assert sum(not isinstance(each, NotFound) for each in joined) == 1
    assert sum(account.name.startswith("guest") for account in accounts.all()) == 1


def test_names_that_differ_in_letter_case_alone_are_one_name(server: Any) -> None:
    accounts = server.site.accounts
    names = ["Dana", "dana", "DANA", "dAnA"]
    added = at_once([partial(accounts.add, name, "viewer", "owner") for name in names])
    assert sum(isinstance(each, Conflict) for each in added) == len(names) - 1


def test_owners_who_leave_at_once_leave_one(server: Any) -> None:
    accounts = server.site.accounts
    for name in ("first", "second", "third"):
        accounts.add(name, "owner", "owner")
    calls: list[Callable[[], Any]] = [partial(accounts.close, name, "owner") for name in ("owner", "first")]
    calls += [partial(accounts.set_role, name, "viewer", "owner") for name in ("second", "third")]
    left = at_once(calls)
    assert sum(isinstance(each, Conflict) for each in left) == 1
    owners = [each for each in accounts.all() if each.role == "owner" and each.closed_at is None]
    assert len(owners) == 1


AWAY = "the database does not answer; try again"
REQUESTS = (
    ("GET", "/sign-in", None),
    ("GET", "/api/session", None),
    ("GET", "/api/batches", None),
    ("GET", "/api/review", None),
    ("GET", "/metrics", None),
    ("POST", "/api/items/next", {}),
    ("POST", "/api/items/1/answer", {"answer": "card"}),
    ("POST", "/api/models/rollback", {"confirm": "model-1"}),
)


@pytest.mark.parametrize("failure", ["refused", "lost", "pool"])
def test_a_database_that_is_away_is_answered_503_and_named_in_the_log_alone(
    tmp_path: Path, make_server: Callable[..., Any], caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    server = make_server(tmp_path / "workspace")
    program, anyone = server.program("owner"), server.client()
    invitation = server.site.accounts.tokens.invite("viewer", "", "owner")
    database = server.site.workspace.metadata
    location = database.location = "postgresql+psycopg://posttrain@db.intern.example:5432/labels"

    class Refused(Exception):
        sqlstate = None

    Refused.__module__ = "psycopg"
    line = 'connection to server at "10.1.2.3", port 5432 failed: Connection refused'

    def connect() -> Any:
        if failure == "pool":
            raise PoolTimeoutError("QueuePool limit of size 5 overflow 10 reached")
        raise OperationalError("SELECT 1", {}, Refused(line), connection_invalidated=failure == "lost")

    database.engine = SimpleNamespace(
        dialect=SimpleNamespace(name="postgresql", loaded_dbapi=SimpleNamespace(OperationalError=Refused)),
        connect=connect,
        dispose=lambda: None,
    )
    answers = [program.request(method, path, json=body) for method, path, body in REQUESTS]
    joined = {"token": invitation, "name": "guest", "password": PASSWORD, "repeat": PASSWORD}
    answers += [anyone.post("/invitation", data=joined), anyone.post("/sign-in", data={"name": "owner"})]
    page = anyone.get("/sign-in", headers={"Accept": "text/html", "Accept-Language": "zh"})
    assert "数据库没有响应" in page.text
    for answer in [*answers, page]:
        assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5"), answer.text
        assert not any(word in answer.text for word in ("10.1.2.3", "intern", "5432", "psycopg", "QueuePool"))
    assert all(answer.json() == {"error": AWAY} for answer in answers)
    assert location in caplog.text


def test_a_full_disk_names_no_path(tmp_path: Path, make_server: Callable[..., Any]) -> None:
    server = make_server(tmp_path / "workspace")
    program, location = server.program("owner"), server.site.workspace.metadata.location

    def fail(*arguments: Any) -> Any:
        raise StorageError("no space left on device", where=location, fix="free some space")

    server.site.queue.batches = fail
    answer = program.get("/api/batches")
    assert (answer.status_code, answer.json()) == (507, {"error": "no space left on device"})


@pytest.mark.slow
def test_the_client_sends_again_while_the_database_is_away(
    tmp_path: Path, make_server: Callable[..., Any], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(tmp_path / "workspace", store=StoreConfig(database=postgres_url))
    items = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(3)]
    server.site.queue.add_batch("round-1", "choice", items, labels=["card", "cash"])
    secret = server.site.accounts.tokens.issue_api_token("annotator", "test", "annotator")
    database, browser = server.site.workspace.metadata, server.client()
    there, away = database.engine, create_engine("postgresql+psycopg://user@127.0.0.1:1/none")
    waits: list[float] = []

    def come_back(seconds: float) -> None:
        waits.append(seconds)
        database.engine = there if len(waits) % 2 == 0 else away

    monkeypatch.setattr("posttrain.label.client.time.sleep", come_back)

    def hand_over(request: httpx.Request) -> httpx.Response:
        names = ("authorization", "content-type")
        headers = {name: value for name, value in request.headers.items() if name in names}
        answer = browser.request(request.method, str(request.url), content=request.read(), headers=headers)
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

    with LabelClient("http://localhost:8600", secret, transport=httpx.MockTransport(hand_over)) as client:
        for _ in range(3):
            database.engine = away
            task = client.next_item()
            assert task is not None
            database.engine = away
            client.answer(task.item, "card")
        assert client.progress("round-1")["answers"] == 3
    assert waits == [5.0] * 12
    for name in ("a\0b", "\0"):
        answer = browser.post("/sign-in", data={"name": name, "password": "x"})
        assert (answer.status_code, "NUL" in answer.text) == (422, True)
