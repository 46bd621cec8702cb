"""The API of the session, of people with their roles and tokens, and of the log of changes."""

from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from posttrain.label.audit import list_changes
from posttrain.label.tokens import (
    API_TOKEN_LIFETIME,
    INVITATION_LIFETIME,
    LINK_LIFETIME,
    Conflict,
    token_id,
)
from posttrain.store.database import utc_now
from posttrain.store.section import MAX_INTEGER
from posttrain.web.access import Sender, Site, end_session, least
from posttrain.web.api.bodies import ERRORS, TOO_MANY, AccountName, Body, Changed, Name, Note, Role, Secret, TokenId
from posttrain.web.request_bodies import RequestRejected
from posttrain.web.sign_in import ATTEMPT_SECONDS, ATTEMPTS_OF_ACCOUNT, AttemptLimit


class Session(BaseModel):
    """The account that sends the request."""

    name: str
    role: str
    kind: str = Field(description="`session` of a browser, or `api` for a token.")
    paused: str | None = Field(description="Why this account is given no items; null: it is given items.")
    csrf: str | None = Field(description="Value of the header `x-csrf-token`; null for a token, which needs none.")


class Person(BaseModel):
    """A person or a model that answers."""

    name: str
    role: str
    has_password: bool
    paused: str | None
    created_at: datetime
    closed_at: datetime | None


class Token(BaseModel):
    """A token or an invitation without its secret."""

    id: str
    kind: str
    account: str | None
    role: str
    note: str | None
    created_at: datetime
    expires_at: datetime | None


class Entry(BaseModel):
    """A change: who made it when, and how it was before and after."""

    number: int
    at: datetime
    actor: str
    action: str
    target: str
    before: Any
    after: Any


class NewPassword(Body):
    """Changes the sender's own password."""

    present: Annotated[str | None, Field(max_length=1000)] = None
    new: Annotated[str, Field(max_length=1000)]


class NewToken(Body):
    note: Note = ""
    days: Annotated[int, Field(ge=1, le=3650)] = API_TOKEN_LIFETIME.days


class NewInvitation(Body):
    role: Role
    note: Note = ""
    days: Annotated[int, Field(ge=1, le=30)] = INVITATION_LIFETIME.days


class NewRole(Body):
    role: Role


class Pause(Body):
    """Stops an account from being given items, for a reason that its person is shown; null: continues."""

    reason: Annotated[str | None, Field(min_length=1, max_length=2000)]


class NewAccount(Body):
    """Adds an account that signs in by a one-time link."""

    name: Name
    role: Role


def people_routes(site: Site) -> APIRouter:
    """Builds the routes."""
    router = APIRouter(responses=ERRORS, tags=["people"])
    accounts, tokens = site.accounts, site.accounts.tokens
    guesses = AttemptLimit(ATTEMPTS_OF_ACCOUNT, ATTEMPT_SECONDS)

    @router.get("/session", **least("viewer"))
    def session(sender: Sender) -> Session:
        """Returns the account that sends the request."""
        paused = accounts.get(sender.name).paused
        return Session(name=sender.name, role=sender.role, kind=sender.kind, paused=paused, csrf=sender.csrf)

    @router.delete("/session", **least("viewer"), response_model=Changed)
    def sign_out(request: Request, sender: Sender) -> Response:
        """Signs out: ends the session of the request."""
        _require_session(sender)
        response = JSONResponse({"changed": True})
        end_session(request, response, site)
        return response

    @router.put("/password", responses=TOO_MANY, **least("viewer"))
    def set_password(body: NewPassword, sender: Sender) -> Changed:
        """Sets the sender's password, and ends all sessions of the account."""
        _require_session(sender)
        # A person at an unlocked screen must not lock its owner out, nor guess.
        if wait := guesses.wait(sender.name):
            raise RequestRejected(429, "too many attempts", {"Retry-After": str(int(wait) + 1)})
        if accounts.get(sender.name).has_password and not accounts.check_password(sender.name, body.present or ""):
            raise RequestRejected(403, "the present password is wrong")
        accounts.set_password(sender.name, body.new, sender.name)
        return Changed()

    @router.get("/tokens", **least("viewer"))
    def own_tokens(sender: Sender) -> list[Token]:
        """Lists the sender's API tokens, newest first."""
        return [Token(**vars(row)) for row in tokens.all(owner=sender.name)]

    @router.post("/tokens", status_code=201, **least("viewer"))
    def add_token(body: NewToken, sender: Sender) -> Secret:
        """Makes an API token of the sender with the sender's role; a token cannot make others."""
        _require_session(sender)
        lifetime = timedelta(days=body.days)
        return _secret(tokens.issue_api_token(sender.name, body.note, sender.name, lifetime), lifetime)

    @router.delete("/tokens/{id}", **least("viewer"))
    def revoke_token(id: TokenId, sender: Sender) -> Changed:
        """Ends an API token: the sender's own, or anyone's if the sender is an owner."""
        tokens.revoke(id, sender.name, owner=None if sender.may("owner") else sender.name)
        return Changed()

    @router.get("/people", **least("reviewer"))
    def people() -> list[Person]:
        """Lists all accounts by name."""
        return [Person(**vars(account)) for account in accounts.all()]

    @router.post("/people", status_code=201, **least("owner"))
    def add_person(body: NewAccount, sender: Sender) -> Person:
        """Adds an account without a password, which signs in by a one-time link."""
        _require_session_for(body.role, sender)
        return Person(**vars(accounts.add(body.name, body.role, sender.name)))

    @router.put("/people/{name}/role", **least("owner"))
    def set_role(name: AccountName, body: NewRole, sender: Sender) -> Person:
        """Changes what an account may do."""
        _require_session_for(body.role, sender)
        return Person(**vars(accounts.set_role(name, body.role, sender.name)))

    @router.put("/people/{name}/pause", **least("reviewer"))
    def pause(name: AccountName, body: Pause, sender: Sender) -> Person:
        """Gives an account no more items, or items again."""
        # Who was paused for low accuracy talks to somebody else first.
        if name == sender.name and body.reason is None and not sender.may("owner"):
            raise Conflict("somebody else resumes your account", fix="ask an owner or another reviewer")
        return Person(**vars(accounts.pause(name, body.reason, sender.name)))

    @router.post("/people/{name}/link", status_code=201, **least("owner"))
    def link(name: AccountName, sender: Sender) -> Secret:
        """Makes a one-time link's secret for somebody who has lost the password: `/sign-in?token=SECRET`."""
        _require_session(sender)
        return _secret(tokens.issue_link(name, sender.name), LINK_LIFETIME)

    @router.delete("/people/{name}", **least("owner"))
    def close(name: AccountName, sender: Sender) -> Person:
        """Closes an account; its answers stay."""
        return Person(**vars(accounts.close(name, sender.name)))

    @router.get("/invitations", **least("owner"))
    def invitations() -> list[Token]:
        """Lists the invitations that can still be used."""
        return [Token(**vars(row)) for row in tokens.all() if row.kind == "invitation"]

    @router.post("/invitations", status_code=201, **least("owner"))
    def invite(body: NewInvitation, sender: Sender) -> Secret:
        """Makes an invitation's secret: `/invitation?token=SECRET`."""
        _require_session_for(body.role, sender)
        lifetime = timedelta(days=body.days)
        return _secret(tokens.invite(body.role, body.note, sender.name, lifetime), lifetime)

    @router.delete("/invitations/{id}", **least("owner"))
    def revoke_invitation(id: TokenId, sender: Sender) -> Changed:
        """Ends an invitation."""
        tokens.revoke(id, sender.name)
        return Changed()

    @router.get("/audit", **least("owner"))
    def audit(
        before: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
        count: Annotated[int, Query(ge=1, le=1000)] = 100,
        actor: Annotated[str | None, Query(max_length=80, pattern=r"^[^\x00-\x1f]*$")] = None,
    ) -> list[Entry]:
        """Lists changes, newest first; `before` a number reads on."""
        changes = list_changes(site.workspace.metadata, before=before, count=count, actor=actor)
        return [Entry(**vars(change)) for change in changes]

    return router


def _require_session(sender: Sender) -> None:
    # A token that leaks must not become a password or another token.
    if sender.kind != "session":
        raise Conflict("this needs a session of a browser, not a token")


def _require_session_for(role: str, sender: Sender) -> None:
    """Lets no token make an owner, who could do more than the token."""
    if role == "owner":
        _require_session(sender)


def _secret(secret: str, lifetime: timedelta) -> Secret:
    return Secret(id=token_id(secret), secret=secret, expires_at=utc_now() + lifetime)
