"""The verbs under ``posttrain accounts``, and who may reach ``posttrain serve``."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher

from posttrain.cli.serve import serve
from posttrain.label import accounts as accounts_module
from posttrain.label.accounts import Accounts
from posttrain.label.tokens import Tokens
from posttrain.store.errors import UserError
from posttrain.store.workspace import Workspace
from posttrain.web import server as server_module

PASSWORD = "correct horse battery"


@pytest.fixture(autouse=True)
def _quick_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
    monkeypatch.setattr(accounts_module, "password_hasher", lambda: hasher)


@pytest.fixture
def accounts(posttrain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``accounts("add", "olga", stdin=...)``: calls a verb in a new workspace."""

    def call(*arguments: str, stdin: str = "") -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return posttrain("accounts", *arguments, "-w", tmp_path / "workspace")

    return call


def test_people_are_added_changed_and_closed(accounts: Any, tmp_path: Path) -> None:
    assert accounts("add", "olga", "--role", "owner", stdin=f"{PASSWORD}\n").out == "olga is owner\n"
    assert accounts("add", "anna", "--no-password").out == "anna is annotator\n"
    assert accounts("role", "anna", "--role", "reviewer").out == "anna is reviewer\n"
    assert "its sessions have ended" in accounts("password", "anna", stdin="another long password").out
    listed = accounts("list", "--json").json
    assert [(row["name"], row["role"], row["has_password"]) for row in listed["accounts"]] == [
        ("anna", "reviewer", True),
        ("olga", "owner", True),
    ]
    assert "argon2" not in json.dumps(listed)
    assert accounts("close", "anna").code == 0
    assert re.search(r"anna +reviewer +closed", accounts("list").out)
    with Workspace.open(tmp_path / "workspace") as store:
        people = Accounts(store.metadata)
        assert people.check_password("olga", PASSWORD)
        assert people.check_password("anna", "another long password") is None


def test_secrets_are_printed_once_and_work(accounts: Any, tmp_path: Path) -> None:
    accounts("add", "olga", "--role", "owner", stdin=PASSWORD)
    token = accounts("token", "olga", "--note", "backup").out.strip()
    link = accounts("link", "olga", "--url", "https://label.example.com/").out.splitlines()[0]
    invitation = accounts("invite", "--role", "viewer").out.splitlines()[0]
    assert link.startswith("https://label.example.com/sign-in?token=")
    assert invitation.startswith("http://127.0.0.1:8600/invitation?token=")
    listed = accounts("list", "--json")
    assert all(secret.rpartition("=")[2] not in listed.out for secret in (token, link, invitation))
    [invited, issued] = listed.json["tokens"]
    assert (issued["note"], issued["account"], invited["role"]) == ("backup", "olga", "viewer")
    with Workspace.open(tmp_path / "workspace") as store:
        tokens = Accounts(store.metadata).tokens
        assert tokens.authenticate(token, "api")
        assert tokens.use(link.rpartition("=")[2], "link").account == "olga"
        assert tokens.find(invitation.rpartition("=")[2], "invitation")
    assert accounts("revoke", issued["id"]).code == 0
    with Workspace.open(tmp_path / "workspace") as store:
        assert Accounts(store.metadata).tokens.authenticate(token, "api") is None


def test_a_token_for_a_dashboard_needs_no_password(accounts: Any, tmp_path: Path) -> None:
    token = accounts("token", "grafana", "--role", "viewer").out.strip()
    with Workspace.open(tmp_path / "workspace") as store:
        people = Accounts(store.metadata)
        credential = people.tokens.authenticate(token, "api")
        assert credential is not None
        assert (credential.name, credential.role, people.get("grafana").has_password) == ("grafana", "viewer", False)
    assert accounts("token", "grafana").code == 0
    for name, role, line in (("grafana", "owner", "is taken"), ("other", "king", "king")):
        refused = accounts("token", name, "--role", role)
        assert (refused.code, line in refused.err) == (2, True)
    assert [row["name"] for row in accounts("list", "--json").json["accounts"]] == ["grafana"]


def test_a_token_s_new_account_has_its_name_in_the_normal_form_or_is_not_made(
    accounts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accounts("token", "ｇrafana ", "--role", "viewer").code == 0
    assert [row["account"] for row in accounts("list", "--json").json["tokens"]] == ["grafana"]

    def refuse(*arguments: Any) -> None:
        raise UserError("refused")

    monkeypatch.setattr(Tokens, "issue_api_token", refuse)
    assert accounts("token", "other", "--role", "viewer").code == 2
    assert [row["name"] for row in accounts("list", "--json").json["accounts"]] == ["grafana"]


def test_mistakes_are_one_line(accounts: Any) -> None:
    accounts("add", "olga", "--role", "owner", stdin=PASSWORD)
    for arguments, stdin, message in (
        (("add", "anna"), "", "standard input: there is no password; write it on the first line"),
        (("add", "anna"), "short", "the password has 5 characters"),
        (("add", "a b"), PASSWORD, "`a b` cannot be the name of an account"),
        (("add", "OLGA"), PASSWORD, "the name `OLGA` is taken"),
        (
            ("add", "anna", "--role", "boss"),
            PASSWORD,
            "`boss` is not a role; one of viewer, annotator, reviewer, owner",
        ),
        (("close", "olga"), "", "`olga` is the only owner"),
        (("role", "olga", "--role", "viewer"), "", "`olga` is the only owner"),
        (("password", "nobody"), PASSWORD, "there is no account `nobody`"),
        (("token", "nobody"), "", "there is no account `nobody`"),
        (("revoke", "x"), "", "there is no token `x`"),
    ):
        mistake = accounts(*arguments, stdin=stdin).mistake
        assert message in mistake
        assert PASSWORD not in mistake


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Servers that would have been started: each announces its address and ends."""
    started: list[Any] = []

    def run(app: Any, host: str, port: int, announce: Any, **options: Any) -> None:
        started.append(options)
        announce(f"http://{host}:{port}")

    monkeypatch.setattr(server_module, "serve", run)
    monkeypatch.setenv("POSTTRAIN_TOKEN", "geheim")
    return started


@pytest.mark.slow
def test_on_this_machine_a_link_signs_its_user_in_as_owner(
    tmp_path: Path, announced: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "maria")
    for _ in range(2):
        serve(port=8601, workspace=tmp_path)
        shown = capfd.readouterr()
        assert shown.out == "listening on http://127.0.0.1:8601\n"
        link = re.fullmatch(r"sign in: http://127\.0\.0\.1:8601/sign-in\?token=(\S+)\n", shown.err)
        assert link
        with Workspace.open(tmp_path) as store:
            accounts = Accounts(store.metadata)
            assert [(account.name, account.role) for account in accounts.all()] == [("maria", "owner")]
            assert accounts.tokens.use(link[1], "link").account == "maria"


def test_label_serve_leads_to_the_page_for_labelling(posttrain: Any, tmp_path: Path, announced: list[Any]) -> None:
    outcome = posttrain("label", "serve", "--port", "8602", "-w", tmp_path)
    assert outcome.out == "listening on http://127.0.0.1:8602\n"
    assert re.search(r"^sign in: http://127\.0\.0\.1:8602/sign-in\?token=\S+&next=/label$", outcome.err, re.M)


def test_elsewhere_it_starts_only_with_accounts(
    posttrain: Any, accounts: Any, tmp_path: Path, announced: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "workspace"
    accounts("add", "olga", "--role", "owner", "--no-password")
    for host in ("0.0.0.0", "192.168.1.5", "::"):
        mistake = posttrain("serve", "--host", host, "-w", root).mistake
        assert mistake == (
            f"--host {host}: nobody has an account to sign in with; posttrain accounts add NAME --role owner -w {root}"
        )
    assert announced == []
    accounts("password", "olga", stdin=PASSWORD)
    outcome = posttrain("serve", "--host", "0.0.0.0", "--trusted-proxy", "10.0.0.2", "-w", root)
    assert (outcome.code, outcome.err) == (0, "")  # no link: whoever reads the log could use it
    assert announced[0]["trusted_proxies"] == ["10.0.0.2"]
