"""Requests that mean harm: injections, markup, broken and huge bodies, paths, hosts and headers."""

import re
from typing import Any

import pytest

from posttrain.label.queue_rows import NewItem

ROLES = ("viewer", "annotator", "reviewer", "owner")

INJECTIONS = [
    "'; DROP TABLE accounts; --",
    "' OR '1'='1",
    "%",
    "_",
    "\\",
    "x' UNION SELECT password_hash FROM accounts",
]


def test_sql_in_a_value_is_a_value(server: Any) -> None:
    owner, annotator = server.program("owner"), server.program("annotator")
    items = [NewItem(f"r{number}", {"text": f"message {number}"}) for number in range(len(INJECTIONS))]
    server.site.queue.add_batch("round-1", "choice", items, labels=["card", "cash"])
    for text in INJECTIONS:
        item = annotator.post("/api/items/next", json={}).json()["task"]["item"]
        requests = [
            owner.get("/api/audit", params={"actor": text}),
            owner.get("/api/batches", params={"name": text}),
            owner.get("/api/quality", params={"batch": text}),
            owner.get("/api/review", params={"batch": text}),
            owner.put(f"/api/people/{text.replace('/', '')}/role", json={"role": "owner"}),
            owner.post("/api/people", json={"name": text, "role": "owner"}),
            annotator.post("/api/items/next", json={"batch": text}),
            annotator.post(f"/api/items/{item}/answer", json={"answer": text}),
            annotator.post(f"/api/items/{item}/flag", json={"note": text}),
            owner.get(f"/api/tokens/{text.replace('/', '')}"),
        ]
        assert all(answer.status_code < 500 for answer in requests)
        assert [answer.json() for answer in requests[:2]] == [[], []]
        assert "argon2" not in " ".join(answer.text for answer in requests)
        assert [account.name for account in server.site.accounts.all()] == sorted(ROLES)
        assert server.site.queue.item(item).answers[0].note == text


MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'>{{98765*4321}}</meta>"


def test_markup_in_a_value_stays_text(server: Any) -> None:
    server.site.queue.add_batch("round-1", "text", [NewItem("r", {"text": MARKUP}, reason=MARKUP)])
    client = server.browser("annotator")
    answer = client.post("/api/items/next", json={})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["task"]["content"]["text"] == MARKUP
    page = server.client().post("/sign-in", data={"name": MARKUP, "password": MARKUP, "next": MARKUP})
    invitation = server.site.accounts.tokens.invite("viewer", "", "owner")
    joined = server.client().post("/invitation", data={"token": invitation, "name": MARKUP, "password": "x"})
    html = {"Accept": "text/html"}
    for shown in (
        page,
        joined,
        client.get(f"/{MARKUP}", headers=html),
        client.get("/sign-in", params={"next": MARKUP}),
    ):
        assert "<script>alert" not in shown.text
        assert "<img" not in shown.text
        assert "426763565" not in shown.text


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "broken JSON"),
        (b"[1]", 400, "one JSON object"),
        (b"\xff", 400, "not UTF-8"),
        (b'{"role": "viewer", "role": "owner"}', 400, "occurs twice"),
        (b'{"role": NaN}', 400, "is not JSON"),
        (b'{"note": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "nested too deeply"),
        (b'{"role": "viewer", "note": "\\ud800"}', 400, "not UTF-8"),
        (b'{"role": "viewer", "note": "\\u0000"}', 422, "NUL"),
        (b'{"role": "viewer", "extra": 1}', 422, "`extra`"),
        (b'{"role": "model"}', 422, "`role`"),
        (b'{"role": "viewer", "days": "7"}', 422, "`days`"),
        (b'{"role": "viewer", "days": true}', 422, "`days`"),
        (b'{"role": "viewer", "days": 1e999}', 422, "`days`"),
        (b'{"role": "viewer", "note": "' + b"x" * 3000 + b'"}', 422, "`note`"),
        (b'{"role": "viewer", "note": "' + b"x" * 2**20 + b'"}', 413, "longer than"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_in_one_line(
    shared_server: Any, body: bytes, status: int, message: str
) -> None:
    client = shared_server.browser("owner")
    answer = client.post("/api/invitations", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    assert len(answer.json()["error"]) < 600


def test_a_long_body_of_undeclared_length_is_refused(shared_server: Any) -> None:
    chunks = (b"x" * 2**16 for _ in range(20))
    answer = shared_server.browser("owner").post(
        "/api/invitations", content=chunks, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize("id", ["0", "-1", "1e9", "99999999999999999999", "x", "%00", "1.5", "१"])
def test_ids_of_items_are_positive_integers(shared_server: Any, id: str) -> None:
    answer = shared_server.program("owner").post(f"/api/items/{id}/skip", json={})
    assert answer.status_code in (404, 422), answer.text


@pytest.mark.parametrize(
    "path",
    [
        "../app.py",
        "%2e%2e/app.py",
        "..%2fapp.py",
        "..%5capp.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "app.css%00.py",
        ".",
    ],
)
def test_only_files_of_the_package_are_served(shared_server: Any, path: str) -> None:
    answer = shared_server.client().get(f"/static/{path}")
    assert answer.status_code in (404, 405), answer.text
    assert "root:" not in answer.text
    assert "import" not in answer.text


def test_every_answer_has_the_headers_that_protect_pages(server: Any) -> None:
    client = server.browser("owner")
    answers = [
        client.get("/", headers={"Accept": "text/html"}),
        client.get("/sign-in"),
        client.get("/static/app.css"),
        client.get("/api/session"),
        client.get("/api/nowhere"),
        client.get("/nowhere"),
        client.get("/healthz"),
        client.post("/api/people", content=b"{", headers={"Content-Type": "application/json"}),
        client.get("/", headers={"Host": "evil.example"}),
        client.post("/sign-in", json={}),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
    kept = [answer.request.url.path for answer in answers if answer.headers.get("cache-control") != "no-store"]
    assert kept == ["/static/app.css", "/"]  # the last one is refused before it reaches the app


def test_pages_have_no_inline_scripts_or_styles(server: Any) -> None:
    client = server.browser("owner")
    secret = server.site.accounts.tokens.invite("viewer", "", "owner")
    html = {"Accept": "text/html"}
    pages = [client.get("/", headers=html), client.post("/sign-in", headers=html), server.client().get("/sign-in")]
    pages.append(client.get("/invitation", params={"token": secret}))
    for page in pages:
        assert page.headers["content-type"].startswith("text/html")
        for script in re.findall(r"<script[^>]*>(.*?)</script>", page.text, re.S):
            assert script == ""
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page.text)
        assert not re.search(r'(?:src|href|action)="(?!/(?!/)|#)', page.text)  # everything is of this server


def test_names_of_other_sites_are_not_served(server: Any) -> None:
    client = server.browser("owner")
    for host in ("evil.example", "localhost.evil.example", "localhost@evil.example", ""):
        answer = client.get("/api/session", headers={"Host": host})
        assert answer.status_code == 421
        assert "owner" not in answer.text


def test_a_value_starts_no_header(server: Any) -> None:
    client = server.client()
    for path in ("/sign-in?next=/a%0d%0aX-Evil:%201", "/language/zh%0d%0aX-Evil:%201", "/language/en?next=%0aX-Evil:1"):
        answer = client.get(path)
        assert "x-evil" not in answer.headers
    answer = client.get("/api/session", headers={"Last-Event-ID": "1", "Authorization": "Bearer a\tb"})
    assert answer.status_code == 401


def test_errors_of_the_api_are_json_and_those_of_pages_are_pages(server: Any) -> None:
    client = server.browser("viewer")
    html = {"Accept": "text/html"}
    assert client.get("/api/nowhere", headers=html).json() == {"error": "not found"}
    assert client.patch("/api/session").json() == {"error": "method not allowed"}
    page = client.post("/sign-in", data={"name": MARKUP}, headers={**html, "Origin": "http://evil.example"})
    assert page.status_code == 403
    assert "another site sent this request" in page.text
    assert page.headers["content-type"].startswith("text/html")
    for path, status, text in (
        ("/nowhere", 404, "There is no such page."),
        ("/v2/feedback", 404, "There is no such page."),
        ("/runs?run=" + "x&run=" * 9, 422, ""),
        ("/guidelines?old=first", 422, "`old`"),
        (f"/label?batch={MARKUP * 9}", 403, ""),
        (f"/lineage?id={MARKUP * 9}", 422, "`id`"),
    ):
        page = client.get(path, headers=html)
        assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8"), path
        assert text in page.text
        assert MARKUP not in page.text
    # What a program asks is answered as before, whatever it accepts.
    assert client.get("/nowhere").json() == {"error": "not found"}
    assert client.get("/healthz", headers=html).json() == {"status": "ok"}
    assert client.get("/guidelines?old=first").json()["error"].startswith("`old`")
