"""Every operation of the API by every role, protection from other sites, and tokens."""

import itertools
from typing import Any

from posttrain.web.access import LOOP
from posttrain.web.app import api_app

ROLES = ("viewer", "annotator", "reviewer", "owner")

# Each operation with its least role, and a body with which it does not fail for another reason than the role.
OPERATIONS: dict[tuple[str, str], tuple[str, Any]] = {
    ("GET", "/session"): ("viewer", None),
    ("DELETE", "/session"): ("viewer", None),
    ("PUT", "/password"): ("viewer", {"new": "another long password"}),
    ("GET", "/tokens"): ("viewer", None),
    ("POST", "/tokens"): ("viewer", {}),
    ("DELETE", "/tokens/{id}"): ("viewer", None),
    ("GET", "/people"): ("reviewer", None),
    ("POST", "/people"): ("owner", {"name": "new", "role": "viewer"}),
    ("PUT", "/people/{name}/role"): ("owner", {"role": "viewer"}),
    ("PUT", "/people/{name}/pause"): ("reviewer", {"reason": None}),
    ("POST", "/people/{name}/link"): ("owner", None),
    ("DELETE", "/people/{name}"): ("owner", None),
    ("GET", "/invitations"): ("owner", None),
    ("POST", "/invitations"): ("owner", {"role": "viewer"}),
    ("DELETE", "/invitations/{id}"): ("owner", None),
    ("GET", "/audit"): ("owner", None),
    ("GET", "/status"): (LOOP, None),
    ("GET", "/models"): (LOOP, None),
    ("GET", "/deployments"): (LOOP, None),
    ("POST", "/models/promote"): ("owner", {"model": "model-x", "confirm": "model-x"}),
    ("POST", "/models/rollback"): ("owner", {"confirm": "model-x"}),
    ("GET", "/events"): (LOOP, None),
    ("POST", "/items/next"): ("annotator", {}),
    ("POST", "/items/{id}/answer"): ("annotator", {"answer": "card"}),
    ("POST", "/items/{id}/skip"): ("annotator", {}),
    ("POST", "/items/{id}/flag"): ("annotator", {"note": "two questions"}),
    ("POST", "/undo"): ("annotator", {}),
    ("PUT", "/items/{id}/lease"): ("annotator", None),
    ("DELETE", "/items/{id}/lease"): ("annotator", None),
    ("GET", "/batches"): ("viewer", None),
    ("GET", "/review"): ("reviewer", None),
    ("POST", "/items/{id}/resolve"): ("reviewer", {"answer": "card"}),
    ("POST", "/items/{id}/drop"): ("reviewer", {}),
    ("GET", "/quality"): ("reviewer", None),
    ("GET", "/guidelines"): ("viewer", None),
    ("POST", "/guidelines"): ("reviewer", {"text": "Read twice."}),
    ("GET", "/guidelines/outdated"): ("reviewer", None),
    ("GET", "/guidelines/{version}"): ("viewer", None),
}


def send(client: Any, method: str, path: str, body: Any = None, **headers: str) -> Any:
    path = (
        path.replace("/items/{id}", "/items/1")
        .replace("{id}", "0" * 16)
        .replace("{name}", "nobody")
        .replace("{version}", "1")
    )
    return client.request(method, f"/api{path}", json=body, headers=headers)


def test_the_document_names_each_operation_with_its_least_role(server: Any) -> None:
    document = server.client().get("/api/openapi.json").json()
    described = {
        (method.upper(), path): LOOP if operation.get("x-not-role") == "annotator" else operation["x-least-role"]
        for path, methods in document["paths"].items()
        if "servers" not in methods
        for method, operation in methods.items()
    }
    assert described == {operation: role for operation, (role, _) in OPERATIONS.items()}
    assert document["servers"] == [{"url": "/api"}]


def test_the_document_names_what_is_answered_outside_of_the_api(server: Any) -> None:
    client = server.client()
    for _ in range(2):  # it is kept
        document = client.get("/api/openapi.json").json()
    outside = {path: item for path, item in document["paths"].items() if item.get("servers") == [{"url": "/"}]}
    assert set(outside) == {"/v1/feedback", "/v1/status", "/healthz", "/metrics"}
    assert outside["/metrics"]["get"]["x-least-role"] == "viewer"
    assert list(outside["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert outside["/v1/feedback"]["post"]["requestBody"]["required"]
    # A name stands for one schema, whichever app it comes from.
    for part in (client.get("/openapi.json").json(), api_app(server.site).openapi()):
        for name, schema in part["components"]["schemas"].items():
            assert document["components"]["schemas"][name] == schema, name


def test_an_operation_is_refused_below_its_least_role_and_only_there(server: Any) -> None:
    for role, ((method, path), (least, body)) in itertools.product((None, *ROLES), OPERATIONS.items()):
        client = server.program(role) if role else server.client()
        if path == "/events" and role is not None:
            continue  # it does not end; see test_events.py
        answer = send(client, method, path, body)
        if role is None:
            assert answer.status_code == 401, (method, path)
        elif least == LOOP and role == "annotator":
            error = answer.json()["error"].split(":")[0]
            assert (answer.status_code, error) == (403, "annotators do not read the loop")
        elif least != LOOP and ROLES.index(role) < ROLES.index(least):
            assert answer.status_code == 403, (method, path)
            assert answer.json() == {"error": f"this needs the role {least}, and yours is {role}"}
        else:
            assert answer.status_code not in (401, 403), (method, path, answer.text)
        assert answer.status_code < 500, (method, path, answer.text)


def test_each_change_by_cookie_needs_the_value_of_its_session_and_this_site(server: Any) -> None:
    client = server.browser("owner")
    csrf = client.headers.pop("X-CSRF-Token")
    others = server.browser("reviewer").headers["X-CSRF-Token"]
    for (method, path), (_, body) in OPERATIONS.items():
        if method == "GET":
            continue
        for headers in (
            {},
            {"X-CSRF-Token": others},
            {"X-CSRF-Token": csrf, "Origin": "http://evil.example"},
            {"X-CSRF-Token": csrf, "Sec-Fetch-Site": "same-site"},
        ):
            answer = send(client, method, path, body, **headers)
            assert answer.status_code == 403, (method, path, headers)
    assert send(client, "POST", "/invitations", {"role": "viewer"}, **{"X-CSRF-Token": csrf}).status_code == 201


def test_a_form_of_another_site_is_no_body(server: Any) -> None:
    client = server.browser("owner")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = client.post("/api/invitations", content=b'{"role": "owner"}', headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_a_token_cannot_become_a_password_an_owner_or_another_token(server: Any) -> None:
    program = server.program("owner")
    for method, path, body in (
        ("POST", "/tokens", {}),
        ("PUT", "/password", {"new": "another long password"}),
        ("DELETE", "/session", None),
        ("POST", "/people/{name}/link", None),
        ("POST", "/people", {"name": "new", "role": "owner"}),
        ("PUT", "/people/{name}/role", {"role": "owner"}),
        ("POST", "/invitations", {"role": "owner"}),
    ):
        assert send(program, method, path, body).status_code == 409


def test_a_wrong_token_is_refused_even_beside_a_valid_cookie(server: Any) -> None:
    client = server.browser("owner")
    for value in ("Bearer wrong", "Bearer ", "Bearer", "Basic b3duZXI6eA==", "ptt_x"):
        assert client.get("/api/session", headers={"Authorization": value}).status_code == 401


def test_people_manage_their_own_tokens_alone(server: Any) -> None:
    owner, viewer = server.browser("owner"), server.browser("viewer")
    made = owner.post("/api/tokens", json={"note": "backup"}).json()
    assert viewer.get("/api/tokens").json() == []
    assert viewer.delete(f"/api/tokens/{made['id']}").status_code == 404
    assert [token["id"] for token in owner.get("/api/tokens").json()] == [made["id"]]
    assert made["secret"] not in owner.get("/api/tokens").text
    own = viewer.post("/api/tokens", json={"days": 1}).json()
    assert owner.delete(f"/api/tokens/{own['id']}").status_code == 200
    assert viewer.get("/api/tokens").json() == []


def test_a_role_counts_from_the_moment_that_it_changes(server: Any) -> None:
    owner, reviewer = server.browser("owner"), server.browser("reviewer")
    assert reviewer.get("/api/people").status_code == 200
    assert owner.put("/api/people/reviewer/role", json={"role": "viewer"}).json()["role"] == "viewer"
    assert reviewer.get("/api/people").status_code == 403
    assert owner.delete("/api/people/reviewer").status_code == 200
    assert reviewer.get("/api/session").status_code == 401
    assert owner.delete("/api/people/owner").status_code == 409
    assert owner.put("/api/people/owner/role", json={"role": "viewer"}).status_code == 409


def test_a_password_is_changed_with_the_present_one_and_ends_all_sessions(server: Any) -> None:
    first, second = server.browser("annotator"), server.browser("annotator")
    answer = first.put("/api/password", json={"present": "guess", "new": "another long password"})
    assert answer.status_code == 403
    present = "correct horse battery"
    assert first.put("/api/password", json={"present": present, "new": "short"}).status_code == 422
    assert first.put("/api/password", json={"present": present, "new": "another long password"}).status_code == 200
    assert first.get("/api/session").status_code == second.get("/api/session").status_code == 401


def test_the_present_password_cannot_be_guessed_through_an_open_session(server: Any) -> None:
    client = server.browser("annotator")
    guesses = [client.put("/api/password", json={"present": f"guess {n}", "new": "x" * 9}) for n in range(11)]
    assert [guess.status_code for guess in guesses] == [403] * 10 + [429]
