"""Accounts and the API on PostgreSQL as on SQLite: what two people do at once has one outcome."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from posttrain.label.queue_rows import NewItem
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.config import StoreConfig
from posttrain.store.errors import UserError

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
