"""Who sends a request and what it may do: sessions by cookie, API tokens, least roles, and protection from CSRF."""

import hashlib
import hmac
import re
import threading
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.responses import Response

from posttrain.label.accounts import Accounts
from posttrain.label.quality.queue_report import QueueReports
from posttrain.label.queue import Queue
from posttrain.label.tokens import RANKS, SESSION_LONGEST
from posttrain.loop.config import Config
from posttrain.store.workspace import Workspace
from posttrain.web.request_bodies import RequestRejected
from posttrain.web.server import LOCAL_NAMES, host_name

CSRF_HEADER = "x-csrf-token"

LOOP = "loop"
"""In place of a least role: all but annotators, whom test records with their answers would tell what to answer."""

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Site:
    """Everything that the pages and the API of one server share.

    Attributes:
        config: None in a folder that holds datasets only.
        plain_http: Sign-in is allowed without TLS from other machines, too.
        ending: Set when the server ends, so that open streams do.
        quality: The quality reports of the queue.
    """

    workspace: Workspace
    config: Config | None
    accounts: Accounts
    queue: Queue
    plain_http: bool = False
    ending: threading.Event = field(default_factory=threading.Event)
    quality: QueueReports = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "quality", QueueReports(self.queue))


@dataclass(frozen=True)
class Principal:
    """The account that sends a request.

    Attributes:
        kind: ``session`` of a browser, or ``api`` for a token.
        secret: The session's secret; None for a token.
    """

    name: str
    role: str
    kind: str
    secret: str | None = None

    @property
    def csrf(self) -> str | None:
        """The value that a page sends with each change; a page of another site cannot know it. None for a token."""
        if self.secret is None:
            return None
        # Derived, not stored: it lives and ends with the session.
        return hmac.new(self.secret.encode(), b"csrf", hashlib.sha256).hexdigest()

    def may(self, role: str) -> bool:
        """Returns whether the account has this role or a higher one, or may do what `LOOP` says."""
        if role == LOOP:
            return self.role != "annotator"
        return RANKS[self.role] >= RANKS[role]


def find_principal(request: Request, site: Site) -> Principal | None:
    """Returns the account whose session or token a request carries; None if it carries none that is valid."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme:
        credential = site.accounts.tokens.authenticate(token.strip(), "api") if scheme.lower() == "bearer" else None
        return Principal(credential.name, credential.role, "api") if credential else None
    secret = session_secret(request, site)
    credential = site.accounts.tokens.authenticate(secret, "session") if secret else None
    return Principal(credential.name, credential.role, "session", secret) if credential else None


def principal_of(request: Request) -> Principal:
    """Returns the account of a request, once it is proved that its own page or program sent it.

    Raises:
        RequestRejected: 401 without a valid session or token; 403 if another site may have sent it.
    """
    principal = find_principal(request, request.app.state.site)
    if principal is None:
        raise RequestRejected(401, "sign in, or send a valid `Authorization: Bearer TOKEN`")
    # A browser adds cookies to requests of any page, but no page can add a token of a program.
    if principal.kind == "session" and request.method not in _SAFE_METHODS:
        check_same_origin(request)
        check_csrf(principal, request.headers.get(CSRF_HEADER, ""))
    return principal


Sender = Annotated[Principal, Depends(principal_of)]


class _LeastRole:
    """Lets requests pass whose account has a role or a higher one."""

    def __init__(self, role: str) -> None:
        self.role = role

    def __call__(self, principal: Sender) -> None:
        if self.role == LOOP and not principal.may(LOOP):
            raise RequestRejected(403, "annotators do not read the loop: it holds answers to what they label")
        if not principal.may(self.role):
            raise RequestRejected(403, f"this needs the role {self.role}, and yours is {principal.role}")


def least(role: str) -> dict[str, Any]:
    """Returns the options of a route that a role and those above it, or those of `LOOP`, may call; its description
    says so, too.
    """
    extra = {"x-least-role": "viewer", "x-not-role": "annotator"} if role == LOOP else {"x-least-role": role}
    return {"dependencies": [Depends(_LeastRole(role))], "openapi_extra": extra}


def check_same_origin(request: Request) -> None:
    """Checks that a page of this server sent the request, as browsers say with every change.

    Raises:
        RequestRejected: 403 if another site did, or the browser does not say.
    """
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    # The scheme is the proxy's, if there is one, and so is not compared; another host or port is another site.
    own = _split_origin(origin)[1] == request.headers.get("host", "").lower() != ""
    if (origin is None and site is None) or (origin is not None and not own) or site not in (None, "same-origin"):
        raise RequestRejected(403, "another site sent this request; open the page of this server and try again")


def check_csrf(principal: Principal, value: str) -> None:
    """Checks the value that only this session's pages know.

    Raises:
        RequestRejected: 403 if it is another one.
    """
    if not hmac.compare_digest((principal.csrf or "").encode(), value.encode()):
        raise RequestRejected(403, f"send the session's value in `{CSRF_HEADER}`; GET /api/session returns it")


def session_secret(request: Request, site: Site) -> str | None:
    """Returns the secret in a request's cookie, or None."""
    secret = request.cookies.get(_cookie_name(request, secure=True))
    # Where TLS is required, a cookie without it may come from anyone on the way.
    if secret is None and (site.plain_http or is_local(request)):
        secret = request.cookies.get(_cookie_name(request, secure=False))
    return secret


def start_session(request: Request, response: Response, site: Site, name: str) -> None:
    """Signs an account in: ends the session that the browser had, and sets the cookie of a new one.

    Raises:
        RequestRejected: 403 if the browser is on another machine and the connection is not encrypted.
    """
    secure = check_transport(request, site)
    # Never the old secret: somebody else may have set that cookie (session fixation).
    end_session(request, response, site)
    response.set_cookie(
        _cookie_name(request, secure),
        site.accounts.tokens.open_session(name),
        max_age=int(SESSION_LONGEST.total_seconds()),
        path="/",
        secure=secure,
        httponly=True,
        # Not "strict": a link in a mail to an item would end at the sign-in page. Changes need more than the cookie.
        samesite="lax",
    )


def end_session(request: Request, response: Response, site: Site) -> None:
    """Ends the session of a request's cookie and removes the cookie."""
    for secure in (True, False):
        name = _cookie_name(request, secure)
        if secret := request.cookies.get(name):
            site.accounts.tokens.end(secret)
            response.delete_cookie(name, path="/", secure=secure, httponly=True, samesite="lax")


def check_transport(request: Request, site: Site) -> bool:
    """Returns whether a browser reaches this server over TLS.

    Raises:
        RequestRejected: 403 if it does not, and is on another machine: passwords could be read on the way.
    """
    if _split_origin(request.headers.get("origin"))[0] == "https":
        return True
    if not (site.plain_http or is_local(request)):
        fix = "put a proxy with TLS before the server, tunnel its port with ssh -L, or start it with --plain-http"
        raise RequestRejected(403, f"signing in needs HTTPS; {fix}")
    return False


def is_local(request: Request) -> bool:
    """Returns whether the browser names this machine by an address that stays on it."""
    return host_name(request.headers.get("host", "")) in LOCAL_NAMES


def _split_origin(origin: str | None) -> tuple[str, str]:
    """Returns the scheme, and the host with its port, of an ``Origin`` header; nothing for ``null`` and the like."""
    match = re.fullmatch(r"(https?)://([^/@\s]+)", (origin or "").lower())
    return (match[1], match[2]) if match else ("", "")


def _cookie_name(request: Request, secure: bool) -> str:
    # Browsers take a name of this prefix only over TLS, for one host. Without TLS the port is in the name, as two
    # servers on one machine share their cookies.
    if secure:
        return "__Host-posttrain"
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"posttrain-{port if port.isascii() and port.isdigit() else 80}"
