"""Accounts, passwords, one-time secrets and the log of changes."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from sqlalchemy import select

from posttrain.label import accounts as accounts_module
from posttrain.label import tokens as tokens_module
from posttrain.label.accounts import Accounts
from posttrain.label.audit import list_changes
from posttrain.label.tokens import API_TOKEN_LIFETIME, SESSION_IDLE, SESSION_LONGEST, Conflict, NotFound
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError
from posttrain.store.label_tables import tokens as token_table
from posttrain.store.workspace import Workspace

PASSWORD = "correct horse battery"


class Clock:
    """The time that the tokens see."""

    def __init__(self) -> None:
        self.passed = timedelta()

    def __call__(self) -> Any:
        return utc_now() + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tokens_module, "utc_now", clock)
    return clock


@pytest.fixture(autouse=True)
def _quick_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
    monkeypatch.setattr(accounts_module, "password_hasher", lambda: hasher)


@pytest.fixture
def people(tmp_path: Path) -> Iterator[Accounts]:
    with Workspace.create(tmp_path / "workspace") as workspace:
        people = Accounts(workspace.metadata)
        people.add("olga", "owner", "terminal", PASSWORD)
        people.add("anna", "annotator", "olga", PASSWORD)
        yield people


def test_only_the_right_password_of_an_open_account_is_accepted(people: Accounts) -> None:
    assert people.check_password("anna", PASSWORD) == people.get("anna")
    for name, password in (("anna", PASSWORD + "!"), ("anna", ""), ("nobody", PASSWORD), ("Anna", PASSWORD)):
        assert people.check_password(name, password) is None
    people.close("anna", "olga")
    assert people.check_password("anna", PASSWORD) is None


def test_spellings_of_a_name_are_one_account_and_no_password(people: Accounts) -> None:
    assert people.check_password(" \uff41nna ", PASSWORD) == people.get("anna")
    for taken in ("\uff2fLGA", "olg\u24d0", "OLGA "):
        with pytest.raises(Conflict, match="is taken"):
            people.add(taken, "viewer", "olga")
    for weak in ("\uff41nnabella1", "ANNABELLA\uff11", "a\uff41A\uff21" * 3):
        with pytest.raises(UserError, match="easy to guess"):
            people.add("annabella1", "viewer", "olga", weak)


def test_an_unknown_name_costs_a_hash_as_well(people: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    class Counting(PasswordHasher):
        def verify(self, hash: str | bytes, password: str | bytes) -> bool:
            checked.append(str(hash).rpartition("$")[0].rpartition("$")[0])
            return super().verify(hash, password)

    hasher = Counting(time_cost=1, memory_cost=64, parallelism=1)
    monkeypatch.setattr(accounts_module, "password_hasher", lambda: hasher)
    accounts_module._unfitting_hash.cache_clear()
    people.add("link.only", "viewer", "olga")
    for name in ("anna", "nobody", "link.only"):
        assert people.check_password(name, "wrong password") is None
    assert len(checked) == 3
    assert len(set(checked)) == 1  # the same parameters, and so the same time


def test_a_composed_letter_is_the_same_letter(people: Accounts) -> None:
    people.add("zoe\u0301", "annotator", "olga", "cafe\u0301 cafe\u0301 12")
    assert people.check_password("zo\u00e9", "caf\u00e9 caf\u00e9 12")


def test_hashes_of_older_parameters_are_renewed(people: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    stronger = PasswordHasher(time_cost=2, memory_cost=64, parallelism=1)
    monkeypatch.setattr(accounts_module, "password_hasher", lambda: stronger)
    assert people.check_password("anna", PASSWORD)
    assert "t=2" in accounts_module.account_row(people.metadata, "anna")["password_hash"]
    assert people.check_password("anna", PASSWORD)


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a/b", "../x", "a\nb", "-x", "<b>", "x" * 81, "a'; DROP TABLE accounts"]
)
def test_unusable_names_are_refused(people: Accounts, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        people.add(name, "viewer", "olga")


@pytest.mark.parametrize("name", ["olg\u0430", "\u0410nna", "\u039fmar", "ben-\u0456"])
def test_a_name_of_letters_that_pass_for_others_is_refused(people: Accounts, name: str) -> None:
    with pytest.raises(UserError, match="mixes"):
        people.add(name, "viewer", "olga")


@pytest.mark.parametrize("name", ["安娜-li", "Ольга", "José", "Ελένη", "田中1", "محمد", "김민수.kim"])
def test_a_name_is_of_any_alphabet(people: Accounts, name: str) -> None:
    assert people.add(name, "viewer", "olga").name == name


@pytest.mark.parametrize("password", ["short", "x" * 1001, "aaaaaaaaaaaa", "longer.name"])
def test_weak_passwords_are_refused(people: Accounts, password: str) -> None:
    with pytest.raises(UserError, match=r"characters|easy to guess") as refusal:
        people.add("longer.name", "viewer", "olga", password)
    assert password not in str(refusal.value)


def test_names_differ_by_more_than_letter_case(people: Accounts) -> None:
    with pytest.raises(Conflict, match="`ANNA` is taken"):
        people.add("ANNA", "viewer", "olga")


def test_a_secret_is_stored_as_its_hash_alone(people: Accounts) -> None:
    secrets = [people.tokens.open_session("anna"), people.tokens.issue_link("anna", "olga")]
    secrets += [people.tokens.issue_api_token("anna", "script", "anna"), people.tokens.invite("viewer", "", "olga")]
    assert len(set(secrets)) == 4
    with people.metadata.reading() as connection:
        stored = " ".join(str(tuple(row)) for row in connection.execute(select(token_table)))
    journal = people.metadata.journal
    assert journal is not None
    for secret in secrets:
        assert len(secret) >= 43
        assert secret not in stored
        assert secret not in journal.path.read_text()


def test_a_session_ends_when_it_is_unused_and_at_the_latest(people: Accounts, clock: Clock) -> None:
    secret = people.tokens.open_session("anna")
    used = 0
    while people.tokens.authenticate(secret, "session"):
        clock.passed += SESSION_IDLE * 0.9
        used += 1
    assert used == int(SESSION_LONGEST / (SESSION_IDLE * 0.9)) + 1
    secret = people.tokens.open_session("anna")
    clock.passed += SESSION_IDLE * 1.01
    assert people.tokens.authenticate(secret, "session") is None


def test_a_secret_of_one_kind_is_none_of_another(people: Accounts) -> None:
    session, api = people.tokens.open_session("anna"), people.tokens.issue_api_token("anna", "", "anna")
    link = people.tokens.issue_link("anna", "olga")
    assert people.tokens.authenticate(session, "session")
    assert people.tokens.authenticate(api, "api")
    for secret, kind in ((session, "api"), (api, "session"), (link, "session"), (link, "api")):
        assert people.tokens.authenticate(secret, kind) is None
    for secret in (session, api):
        with pytest.raises(NotFound):
            people.tokens.use(secret, "link")


def test_sessions_follow_the_role_and_tokens_never_exceed_theirs(people: Accounts) -> None:
    session, api = people.tokens.open_session("anna"), people.tokens.issue_api_token("anna", "", "anna")

    def roles() -> list[str]:
        credentials = [people.tokens.authenticate(session, "session"), people.tokens.authenticate(api, "api")]
        return [credential.role for credential in credentials if credential]

    assert roles() == ["annotator", "annotator"]
    people.set_role("anna", "owner", "olga")
    assert roles() == ["owner", "annotator"]
    people.set_role("anna", "viewer", "olga")
    assert roles() == ["viewer", "viewer"]
    reader = people.tokens.issue_api_token("anna", "", "anna")
    people.set_role("anna", "annotator", "olga")
    # A viewer reads test records with their answers.
    assert people.tokens.authenticate(reader, "api") is None
    assert roles() == ["annotator", "annotator"]
    people.close("anna", "olga")
    assert roles() == []


def test_a_new_password_ends_sessions_and_links(people: Accounts) -> None:
    session, link = people.tokens.open_session("anna"), people.tokens.issue_link("anna", "olga")
    other = people.tokens.open_session("olga")
    people.set_password("anna", "another long password", "anna")
    assert people.tokens.authenticate(session, "session") is None
    assert people.tokens.find(link, "link") is None
    assert people.tokens.authenticate(other, "session")
    assert people.check_password("anna", "another long password")
    assert people.check_password("anna", PASSWORD) is None


def test_links_and_invitations_work_once_and_not_after_their_end(people: Accounts, clock: Clock) -> None:
    link = people.tokens.issue_link("anna", "olga")
    assert people.tokens.use(link, "link").account == "anna"
    with pytest.raises(NotFound, match="was used already"):
        people.tokens.use(link, "link")
    invitation = people.tokens.invite("reviewer", "for Rita", "olga")
    with pytest.raises(UserError, match="easy to guess"):
        people.accept(invitation, "rita", "rrrrrrrrrrr")
    with pytest.raises(Conflict, match="is taken"):
        people.accept(invitation, "anna", PASSWORD)
    assert people.accept(invitation, "rita", PASSWORD).role == "reviewer"
    with pytest.raises(NotFound):
        people.accept(invitation, "rosa", PASSWORD)
    late = people.tokens.invite("viewer", "", "olga")
    clock.passed = timedelta(days=8)
    with pytest.raises(NotFound):
        people.accept(late, "rosa", PASSWORD)
    assert [account.name for account in people.all()] == ["anna", "olga", "rita"]


def test_a_token_is_revoked_by_its_owner_only(people: Accounts, clock: Clock) -> None:
    secret = people.tokens.issue_api_token("anna", "script", "anna")
    [row] = people.tokens.all("anna")
    assert row.note == "script"
    assert people.tokens.all("olga") == []
    for id in (row.id[:8], "%", "", "0" * 16):
        with pytest.raises(NotFound):
            people.tokens.revoke(id, "anna")
    with pytest.raises(NotFound):
        people.tokens.revoke(row.id, "olga", owner="olga")
    assert people.tokens.authenticate(secret, "api")
    people.tokens.revoke(row.id, "anna", owner="anna")
    assert people.tokens.authenticate(secret, "api") is None
    secret = people.tokens.issue_api_token("anna", "", "anna")
    clock.passed = API_TOKEN_LIFETIME
    assert people.tokens.authenticate(secret, "api") is None


def test_an_owner_remains(people: Accounts) -> None:
    for change in (lambda: people.set_role("olga", "viewer", "olga"), lambda: people.close("olga", "olga")):
        with pytest.raises(Conflict, match="the only owner"):
            change()
    people.set_role("anna", "owner", "olga")
    people.close("olga", "anna")
    with pytest.raises(Conflict, match="the only owner"):
        people.set_role("anna", "viewer", "anna")


def test_models_cannot_sign_in(people: Accounts) -> None:
    people.add("head", "model", "terminal")
    for attempt in (
        lambda: people.tokens.open_session("head"),
        lambda: people.tokens.issue_link("head", "olga"),
        lambda: people.tokens.issue_api_token("head", "", "olga"),
        lambda: people.set_password("head", PASSWORD, "olga"),
        lambda: people.set_role("head", "owner", "olga"),
    ):
        with pytest.raises(Conflict, match="is a model"):
            attempt()
    with pytest.raises(UserError, match="is not a role"):
        people.tokens.invite("model", "", "olga")


def test_each_change_is_logged_with_its_author_and_both_sides(people: Accounts) -> None:
    people.set_role("anna", "reviewer", "olga")
    people.pause("anna", "Please read the guideline again.", "olga")
    people.pause("anna", None, "olga")
    people.record_refusal("anna", "10.0.0.9")
    people.record_refusal("my secret password", "10.0.0.9")
    entries = list_changes(people.metadata, count=5)
    assert [(entry.actor, entry.action, entry.target, entry.before, entry.after) for entry in entries] == [
        ("(unknown)", "refused sign-in", "", None, {"from": "10.0.0.9"}),
        ("anna", "refused sign-in", "anna", None, {"from": "10.0.0.9"}),
        ("olga", "resume", "anna", {"paused": "Please read the guideline again."}, {"paused": None}),
        ("olga", "pause", "anna", {"paused": None}, {"paused": "Please read the guideline again."}),
        ("olga", "set role", "anna", {"role": "annotator"}, {"role": "reviewer"}),
    ]
    older = list_changes(people.metadata, before=entries[-1].number)
    assert [(entry.action, entry.target) for entry in older] == [("add account", "anna"), ("add account", "olga")]


def test_a_change_and_its_entry_are_one_transaction(people: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(accounts_module, "record_change", fail)
    monkeypatch.setattr(tokens_module, "record_change", fail)
    before = people.all()
    for change in (
        lambda: people.set_role("anna", "viewer", "olga"),
        lambda: people.close("anna", "olga"),
        lambda: people.add("new", "viewer", "olga"),
        lambda: people.tokens.invite("viewer", "", "olga"),
    ):
        with pytest.raises(RuntimeError):
            change()
    assert people.all() == before
    assert people.tokens.all() == []
