"""The forms of the pages, sent as static/actions.js sends them: passwords, one-time links, accounts that are closed."""

from html.parser import HTMLParser
from typing import Any

import pytest
from fastapi.testclient import TestClient

PASSWORD = "correct horse battery"
NEW_PASSWORD = "another long password"
HTML = {"Accept": "text/html"}


class Forms(HTMLParser):
    """Collects the forms of a page that call the API: their attributes, fields and the words on their buttons."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.forms: list[dict[str, Any]] = []
        self._in_button = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append({**values, "fields": {}, "required": 0, "button": ""})
        elif self.forms and tag in ("input", "select"):
            self.forms[-1]["required"] += "required" in values and "name" not in values
            if "name" in values:
                self.forms[-1]["fields"][values["name"]] = values
        self._in_button = tag == "button"

    def handle_data(self, data: str) -> None:
        if self._in_button and self.forms:
            self.forms[-1]["button"] += data


def form(client: TestClient, page: str, button: str, target: str) -> dict[str, Any]:
    """Returns the form of a page with this button that calls this path."""
    (fitting,) = [
        form
        for form in Forms(client.get(page, headers=HTML).text).forms
        if form.get("data-path") == target and form["button"].startswith(button)
    ]
    return fitting


def send(client: TestClient, form: dict[str, Any], **values: str) -> Any:
    assert values.keys() <= form["fields"].keys()
    missing = {name for name, field in form["fields"].items() if "required" in field} - values.keys()
    assert not missing, "a browser sends no form in which a required field is empty"
    has_body = form["data-call"] != "DELETE" and "data-empty" not in form
    return client.request(form["data-call"], form["data-path"], json=values if has_body else None)


def test_the_page_of_the_account_changes_the_password(server: Any) -> None:
    client = server.browser("annotator")
    password = form(client, "/account", "Set the password", "/api/password")
    answer = send(client, password, present="guess", new=NEW_PASSWORD)
    assert (answer.status_code, answer.json()["error"]) == (403, "the present password is wrong")
    assert send(client, password, present=PASSWORD, new=NEW_PASSWORD).status_code == 200
    assert client.get("/account", headers=HTML).headers["location"] == "/sign-in?next=/account"
    old, new = (
        server.client().post("/sign-in", data={"name": "annotator", "password": each}).status_code
        for each in (PASSWORD, NEW_PASSWORD)
    )
    assert (old, new) == (401, 303)


def test_who_signed_in_by_a_link_sets_a_first_password(server: Any) -> None:
    accounts = server.site.accounts
    accounts.add("lina", "annotator", "owner")
    client = server.client()
    secret = accounts.tokens.issue_link("lina", "owner")
    assert client.post("/sign-in", data={"token": secret}).status_code == 303
    client.headers["X-CSRF-Token"] = client.get("/api/session").json()["csrf"]
    password = form(client, "/account", "Set the password", "/api/password")
    assert "present" not in password["fields"]
    assert send(client, password, new=NEW_PASSWORD).status_code == 200
    assert server.client().post("/sign-in", data={"name": "lina", "password": NEW_PASSWORD}).status_code == 303


def test_an_owner_makes_a_link_that_signs_in_once(server: Any) -> None:
    owner = server.browser("owner")
    made = send(owner, form(owner, "/people", "Make a one-time link", "/api/people/annotator/link"))
    assert made.status_code == 201
    secret = made.json()["secret"]
    guest = server.client()
    shown = guest.get(f"/sign-in?token={secret}", headers=HTML)
    assert "Continue as annotator" in shown.text
    assert guest.get("/api/session").status_code == 401, "a preview of the link signs nobody in"
    assert guest.post("/sign-in", data={"token": secret}).status_code == 303
    assert guest.get("/api/session").json()["name"] == "annotator"
    assert server.client().post("/sign-in", data={"token": secret}).status_code == 404
    actions = [entry["action"] for entry in owner.get("/api/audit").json()]
    assert actions[:2] == ["sign in", "issue link"]
    assert secret not in owner.get("/api/audit").text


def test_an_account_is_closed_after_a_question_and_for_good(server: Any) -> None:
    owner, annotator = server.browser("owner"), server.browser("annotator")
    link = server.site.accounts.tokens.issue_link("annotator", "owner")
    program = server.program("annotator")
    close = form(owner, "/people", "Close the account", "/api/people/annotator")
    assert close["required"] == 1, "the button beside the one that closes the dialog asks first"
    assert send(owner, close).status_code == 200
    assert annotator.get("/label", headers=HTML).status_code == 303
    assert annotator.get("/api/session").status_code == program.get("/api/session").status_code == 401
    guest = server.client()
    assert guest.post("/sign-in", data={"token": link}).status_code == 404
    assert guest.post("/sign-in", data={"name": "annotator", "password": PASSWORD}).status_code == 401
    people = owner.get("/people", headers=HTML).text
    assert "annotator</th>" in people, "its answers name it"
    assert "/api/people/annotator" not in people, "there is nothing left to change"


@pytest.mark.parametrize("button", ["Close the account", "Change the role"])
def test_the_last_owner_cannot_leave_by_a_form(server: Any, button: str) -> None:
    owner = server.browser("owner")
    target = "/api/people/owner" + ("/role" if "role" in button else "")
    values = {"role": "viewer"} if "role" in button else {}
    assert send(owner, form(owner, "/people", button, target), **values).status_code == 409
    assert owner.get("/people", headers=HTML).status_code == 200
