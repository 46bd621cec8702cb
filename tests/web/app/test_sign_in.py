"""Signing in: by password, by a link, by an invitation; and everything that must not let anyone in."""

import html
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from posttrain.label import tokens as tokens_module
from posttrain.store.database import utc_now
from posttrain.web import sign_in as sign_in_module
from posttrain.web.sign_in import ATTEMPTS_OF_ACCOUNT, ATTEMPTS_OF_ADDRESS, AttemptLimit

ADDRESS = "http://localhost:8600"
PASSWORD = "correct horse battery"
HTML = {"Accept": "text/html"}


def sign_in(client: TestClient, name: str = "annotator", password: str = PASSWORD, **values: str) -> Any:
    return client.post("/sign-in", data={"name": name, "password": password, **values})


def test_the_right_password_opens_a_session(server: Any) -> None:
    client = server.client()
    answer = sign_in(client)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("posttrain-8600=")
    assert {"HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert "annotator" in client.get("/", headers=HTML).text
    assert client.get("/api/session").json()["name"] == "annotator"


@pytest.mark.parametrize(
    ("name", "password"),
    [("annotator", "wrong password"), ("nobody", PASSWORD), ("annotator", ""), ("' OR 1=1 --", PASSWORD), ("", "")],
)
def test_a_refusal_is_the_same_for_every_cause(server: Any, name: str, password: str) -> None:
    client = server.client()
    answer = sign_in(client, name, password)
    assert answer.status_code == 401
    assert "The name or the password is wrong." in answer.text
    assert "set-cookie" not in answer.headers
    assert client.get("/api/session").status_code == 401


def test_guessing_one_account_is_stopped_even_for_the_right_password(server: Any) -> None:
    client = server.client()
    assert [sign_in(client, password="wrong").status_code for _ in range(ATTEMPTS_OF_ACCOUNT)] == [401] * 10
    answer = sign_in(client)
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after"]) <= 901
    assert sign_in(client, "ANNOTATOR").status_code == 429  # letter case buys no attempts
    assert [sign_in(client, "nobody", "x").status_code for _ in range(11)] == [401] * 10 + [429]  # nor tells who exists
    assert sign_in(server.client(), "owner").status_code == 303


def test_guessing_many_accounts_from_one_address_is_stopped(server: Any) -> None:
    client = server.client()
    statuses = [sign_in(client, f"name{number}", "x").status_code for number in range(ATTEMPTS_OF_ADDRESS + 1)]
    assert statuses == [401] * ATTEMPTS_OF_ADDRESS + [429]
    assert sign_in(client, "owner").status_code == 429


def test_attempts_are_forgotten_with_time_and_counted_before_their_outcome() -> None:
    now = [0.0]
    limit = AttemptLimit(2, 10.0, keys=3, clock=lambda: now[0])
    assert [limit.wait("a"), limit.wait("a"), limit.wait("a")] == [0.0, 0.0, 10.0]
    now[0] = 4.0
    assert limit.wait("a") == 6.0
    now[0] = 10.5
    assert limit.wait("a") == 0.0
    limit.wait("a")
    limit.forgive("a")
    assert [limit.wait("a"), limit.wait("a"), limit.wait("a")] == [0.0, 0.0, 10.0]


def test_other_names_end_no_counter_and_fill_no_memory() -> None:
    now = [0.0]
    limit = AttemptLimit(2, 10.0, clock=lambda: now[0])
    assert [limit.wait("a"), limit.wait("a")] == [0.0, 0.0]
    for number in range(20_000):
        limit.wait(f"other {number}")
    assert limit.wait("a") == 10.0
    small = AttemptLimit(2, 10.0, keys=3, clock=lambda: now[0])
    assert [small.wait("a"), small.wait("a")] == [0.0, 0.0]
    waits = [small.wait(f"other {number}") for number in range(1000)]
    assert sum(wait == 0.0 for wait in waits) <= 2 + 3 * 2, "names beyond the limit share counters"
    small.forgive("other 999")
    assert small.wait("a") == 10.0
    assert len(small._times) <= 6
    now[0] = 10.5
    assert (small.wait("a"), len(small._times)) == (0.0, 1)


SPELLINGS = (
    "annotator",
    "ANNOTATOR",
    "\uff41nnotator",
    "\uff21NNOTATOR",
    "annotator ",
    "annota\u24e3or",
    " \uff41nnotator",
)


def test_all_spellings_of_a_name_share_one_counter(server: Any) -> None:
    tries = [sign_in(server.client(), SPELLINGS[at % len(SPELLINGS)], "wrong") for at in range(ATTEMPTS_OF_ACCOUNT)]
    assert [answer.status_code for answer in tries] == [401] * ATTEMPTS_OF_ACCOUNT
    assert [sign_in(server.client(), name).status_code for name in SPELLINGS] == [429] * len(SPELLINGS)


def test_a_right_password_in_another_spelling_forgives_the_name(server: Any) -> None:
    client = server.client()
    for _ in range(ATTEMPTS_OF_ACCOUNT - 1):
        sign_in(client, "annotator", "wrong")
    assert sign_in(client, "\uff41nnotator ").status_code == 303
    assert sign_in(client, "annotator", "wrong").status_code == 401


def test_an_address_that_must_wait_keeps_no_owner_out(server: Any) -> None:
    for number in range(ATTEMPTS_OF_ADDRESS):
        sign_in(server.client(), f"name{number}", "x")
    for _ in range(ATTEMPTS_OF_ACCOUNT + 1):
        assert sign_in(server.client(), "annotator", "x").status_code == 429
    elsewhere = TestClient(
        server.app, ADDRESS, client=("10.0.0.9", 1), headers={"Origin": ADDRESS}, follow_redirects=False
    )
    assert sign_in(elsewhere).status_code == 303


def test_signing_in_rotates_the_session_and_ends_the_old_one(server: Any) -> None:
    attacker, victim = server.browser("viewer"), server.client()
    [(name, fixed)] = attacker.cookies.items()
    victim.cookies.set(name, fixed, domain="localhost.local")
    answer = sign_in(victim, "owner")
    assert answer.status_code == 303
    assert fixed not in answer.headers["set-cookie"]
    assert attacker.get("/api/session").status_code == 401


def test_a_cookie_that_nobody_issued_opens_nothing(server: Any) -> None:
    for value in (b"x", b"", b"a" * 5000, b"\xff\xc3\xa9", b"' OR 1=1 --"):
        answer = server.client().get("/api/session", headers={"Cookie": b"posttrain-8600=" + value})
        assert answer.status_code == 401


def test_signing_out_ends_the_session(server: Any) -> None:
    client = server.browser("viewer")
    cookies = dict(client.cookies)
    assert client.post("/sign-out", data={"csrf": "wrong"}).status_code == 403
    assert client.get("/api/session").status_code == 200
    assert client.post("/sign-out", data={"csrf": client.headers["X-CSRF-Token"]}).status_code == 303
    assert "posttrain-8600" not in client.cookies
    header = "; ".join(f"{name}={value}" for name, value in cookies.items())
    assert server.client().get("/api/session", headers={"Cookie": header}).status_code == 401


def test_a_link_signs_in_once_and_opening_it_changes_nothing(server: Any) -> None:
    secret = server.site.accounts.tokens.issue_link("owner", "terminal")
    for _ in range(2):  # previews of chats
        page = server.client().get("/sign-in", params={"token": secret, "next": "/label"})
        assert "Continue as owner" in page.text
        assert "set-cookie" not in page.headers
    client = server.client()
    answer = client.post("/sign-in", data={"token": secret, "next": "/label"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/label")
    assert client.get("/api/session").json()["role"] == "owner"
    again = server.client()
    for answer in (again.post("/sign-in", data={"token": secret}), again.get("/sign-in", params={"token": secret})):
        assert answer.status_code == 404
        assert "was used already" in answer.text
        assert "set-cookie" not in answer.headers


def test_an_expired_link_or_invitation_lets_nobody_in(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = server.site.accounts.tokens
    link, invitation = tokens.issue_link("owner", "terminal"), tokens.invite("owner", "", "owner")
    monkeypatch.setattr(tokens_module, "utc_now", lambda: utc_now() + timedelta(days=8))
    client = server.client()
    values = {"token": invitation, "name": "late", "password": PASSWORD, "repeat": PASSWORD}
    assert client.get("/sign-in", params={"token": link}).status_code == 404
    assert client.post("/sign-in", data={"token": link}).status_code == 404
    assert client.get("/invitation", params={"token": invitation}).status_code == 404
    assert client.post("/invitation", data=values).status_code == 404
    assert len(server.site.accounts.all()) == 4


def test_an_invitation_makes_one_account_of_its_role(server: Any) -> None:
    secret = server.site.accounts.tokens.invite("reviewer", "", "owner")
    client = server.client()
    values = {"token": secret, "name": "rita", "password": PASSWORD, "repeat": PASSWORD, "role": "owner"}
    assert "as reviewer" in client.get("/invitation", params={"token": secret}).text
    for change, message in (
        ({"repeat": "other"}, "The two passwords differ."),
        ({"name": "a b"}, "cannot be the name of an account"),
        ({"name": "OWNER"}, "is taken"),
        ({"password": "short", "repeat": "short"}, "the password has 5 characters"),
    ):
        answer = client.post("/invitation", data={**values, **change})
        assert answer.status_code == 422
        assert message in answer.text
        assert PASSWORD not in answer.text
    assert client.post("/invitation", data=values).status_code == 303
    assert client.get("/api/session").json() | {"csrf": ""} == {
        "name": "rita",
        "role": "reviewer",
        "kind": "session",
        "paused": None,
        "csrf": "",
    }
    assert server.client().post("/invitation", data={**values, "name": "other"}).status_code == 404


@pytest.mark.parametrize(
    "target",
    [
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "\\\\evil.example",
        "/%0d%0aSet-Cookie:a=b\r\nX: y",
        "javascript:alert(1)",
        "/a//evil.example",
        "/\t/evil.example",
        " //evil.example",
        "evil.example",
    ],
)
def test_a_page_leads_to_no_other_site(shared_server: Any, target: str) -> None:
    client = shared_server.client()
    answer = sign_in(client, next=target)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert client.get("/sign-in", params={"next": target}).headers["location"] == "/"
    answer = client.get("/language/zh", params={"next": target})
    assert answer.headers["location"] == "/"
    assert "a=b" not in str(answer.headers)


def test_a_page_leads_on_to_a_page_of_this_server(server: Any) -> None:
    answer = server.client().get("/", headers=HTML)
    assert answer.headers["location"] == "/sign-in?next=/"
    assert sign_in(server.client(), next="/review?batch=round-1").headers["location"] == "/review?batch=round-1"


def test_the_way_through_signing_in_keeps_the_whole_address(server: Any) -> None:
    client = server.client()
    location = client.get("/guidelines?old=1&new=2", headers=HTML).headers["location"]
    assert location == "/sign-in?next=/guidelines%3Fold%3D1%26new%3D2"
    shown = client.get(location, headers=HTML).text
    assert '<input type="hidden" name="next" value="/guidelines?old=1&amp;new=2">' in shown
    odd = client.get("/guidelines?old=//evil.example", headers=HTML).headers["location"]
    assert odd == "/sign-in?next=/guidelines", "an odd query is left out, and leads nowhere else"


def language_link(page: str) -> str:
    (target,) = re.findall(r'href="(/language/zh\?next=[^"]*)"', page)
    return html.unescape(target)


def test_a_change_of_the_language_loses_neither_query_nor_invitation_nor_link(server: Any) -> None:
    owner = server.browser("owner")
    assert owner.get(language_link(owner.get("/guidelines?old=1&new=2").text)).headers["location"] == (
        "/guidelines?old=1&new=2"
    )
    tokens = server.site.accounts.tokens
    link, invitation = tokens.issue_link("viewer", "owner"), tokens.invite("viewer", "", "owner")
    client = server.client()
    values = {"token": invitation, "name": "vera", "password": "short", "repeat": "short"}
    pages = [
        client.get(f"/sign-in?token={link}"),
        client.get(f"/invitation?token={invitation}"),
        client.post("/invitation", data=values),
    ]
    for page, text in zip(pages, ("以 viewer 的身份继续", "创建账户", "创建账户"), strict=True):
        answer = client.get(client.get(language_link(page.text)).headers["location"])
        assert (answer.status_code, text in answer.text) == (200, True)
        client.cookies.clear()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:9999"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 303),
    ],
)
def test_another_site_signs_nobody_in(server: Any, headers: dict[str, str], status: int) -> None:
    client = server.client()
    assert client.post("/sign-in", data={"name": "viewer", "password": PASSWORD}, headers=headers).status_code == status
    del client.headers["Origin"]
    assert sign_in(client).status_code == 403


def test_forms_are_small_and_of_their_type(server: Any) -> None:
    client = server.client()
    assert client.post("/sign-in", data={"name": "x" * 20_000}).status_code == 413
    assert client.post("/sign-in", json={"name": "x"}).status_code == 415
    assert client.post("/sign-in", data={f"f{number}": "" for number in range(30)}).status_code == 400
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/sign-in", content=b"name=\xff%ff", headers=kind).status_code == 400


@pytest.fixture
def elsewhere(server: Any) -> TestClient:
    """A browser on another machine."""
    client: TestClient = server.client(Host="label.example.com", Origin="https://label.example.com")
    return client


def test_over_tls_the_cookie_is_for_tls_alone(server: Any, elsewhere: TestClient) -> None:
    answer = sign_in(elsewhere)
    assert answer.status_code == 303
    assert answer.headers["set-cookie"].startswith("__Host-posttrain=")
    assert "Secure" in answer.headers["set-cookie"].split("; ")
    # A cookie that came without TLS may be anyone's.
    secret = server.site.accounts.tokens.open_session("owner")
    headers = {"Cookie": f"posttrain-80={secret}"}
    assert server.client(Host="label.example.com").get("/api/session", headers=headers).status_code == 401


def test_passwords_do_not_travel_without_tls(server: Any, elsewhere: TestClient) -> None:
    elsewhere.headers["Origin"] = "http://label.example.com"
    answer = sign_in(elsewhere)
    assert answer.status_code == 403
    assert "signing in needs HTTPS" in answer.json()["error"]
    secret = server.site.accounts.tokens.invite("viewer", "", "owner")
    assert elsewhere.post("/invitation", data={"token": secret}).status_code == 403


def test_refused_and_successful_sign_ins_are_logged(server: Any) -> None:
    client = server.client()
    sign_in(client, "annotator", "wrong")
    sign_in(client, PASSWORD, "annotator")  # the wrong way round
    sign_in(client)
    entries = server.program("owner").get("/api/audit").json()
    logged = [(entry["actor"], entry["action"], entry["after"]) for entry in entries[1:4]]
    assert logged == [
        ("annotator", "sign in", None),
        ("(unknown)", "refused sign-in", {"from": "testclient"}),
        ("annotator", "refused sign-in", {"from": "testclient"}),
    ]
    assert PASSWORD not in str(entries)


def test_ipv6_clients_are_counted_by_network() -> None:
    def address(host: str) -> str:
        return sign_in_module._address(SimpleNamespace(client=SimpleNamespace(host=host)))  # type: ignore[arg-type]

    assert address("2001:db8:1:2:aaaa::1") == address("2001:db8:1:2:bbbb::2")
    assert address("2001:db8:1:2:aaaa::1") != address("2001:db8:1:3:aaaa::1")
    assert address("10.0.0.1") != address("10.0.0.2")
