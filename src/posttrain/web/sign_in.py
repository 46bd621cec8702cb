"""The pages for signing in, by password or by a one-time link, and for joining by an invitation."""

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from posttrain.label.accounts import Account, fold_name
from posttrain.label.tokens import NotFound
from posttrain.store.errors import UserError, is_user_mistake
from posttrain.web.access import (
    Site,
    check_csrf,
    check_same_origin,
    check_transport,
    end_session,
    find_principal,
    start_session,
)
from posttrain.web.app_page import app_page, safe_path
from posttrain.web.request_bodies import RequestRejected, read_body

ATTEMPTS_OF_ACCOUNT = 10
ATTEMPTS_OF_ADDRESS = 50
ATTEMPT_SECONDS = 15 * 60.0

_LONGEST_NAME = 80  # characters; no account has a longer one
_FORM_BYTES = 16 * 1024
_FORM = "application/x-www-form-urlencoded"

# Each check of a password takes a core and 64 MiB for a moment: strangers must not take all of them.
_PASSWORD_CHECKS = 2


class AttemptLimit:
    """Counts attempts in a sliding window by key; a counter is kept as long as an attempt of it is in the window.

    Args:
        most: Attempts with one key in the window.
        seconds: Length of the window.
        keys: Keys that have a counter of their own; more keys than these share as many counters again.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, most: int, seconds: float, keys: int = 100_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self.seconds, self.keys, self.clock = most, seconds, keys, clock
        self._times: OrderedDict[str | int, list[float]] = OrderedDict()
        self._lock = Lock()

    def wait(self, key: str) -> float:
        """Returns the seconds to wait before the next attempt; counts one if that is zero."""
        # Counted before its outcome is known: else many at the same time would all be let in.
        with self._lock:
            now = self.clock()
            while self._times and next(iter(self._times.values()))[-1] <= now - self.seconds:
                self._times.popitem(last=False)
            # Neither may strangers fill the memory, nor end a counter by many other keys. Python's hash of a text has
            # a secret seed, so that nobody can choose names that share the counter of another.
            counter = key if key in self._times or len(self._times) < self.keys else hash(key) % self.keys
            times = [time for time in self._times.get(counter, []) if time > now - self.seconds]
            if len(times) >= self.most:
                return times[-self.most] + self.seconds - now
            self._times[counter] = [*times, now]
            self._times.move_to_end(counter)
            return 0.0

    def forgive(self, key: str) -> None:
        """Forgets the attempts with a key, after one that was right."""
        with self._lock:
            self._times.pop(key, None)


def sign_in_routes(site: Site) -> APIRouter:
    """Builds the routes of the pages; posts are forms and work without scripts."""
    router = APIRouter(include_in_schema=False)
    by_account = AttemptLimit(ATTEMPTS_OF_ACCOUNT, ATTEMPT_SECONDS)
    by_address = AttemptLimit(ATTEMPTS_OF_ADDRESS, ATTEMPT_SECONDS)
    workspace = site.workspace.root.name
    password_checks = CapacityLimiter(_PASSWORD_CHECKS)

    @router.get("/sign-in")
    def show(request: Request, token: str = "", next: str = "") -> Response:
        # The link itself changes nothing: mail programs and chats open links to preview them.
        if token:
            link = site.accounts.tokens.find(token, "link")
            if link is None:
                return _form(request, 404, error="error.link")
            return _form(request, link=link, token=token, next=safe_path(next))
        if find_principal(request, site) is not None:
            return RedirectResponse(safe_path(next), 303)
        return _form(request, next=safe_path(next))

    @router.post("/sign-in")
    async def sign_in(request: Request) -> Response:
        values = await _read_form(request)
        check_same_origin(request)
        check_transport(request, site)
        target = safe_path(values.get("next", ""))
        if token := values.get("token"):
            return await run_sync(partial(_use_link, request, token, target))
        name, address = values.get("name", ""), _address(request)
        # Names that nobody has are counted, too: a difference would tell which names exist. An address that must wait
        # is not counted with a name: it would keep the name's owner out.
        counted = fold_name(name)[:_LONGEST_NAME]
        if wait := by_address.wait(address) or by_account.wait(counted):
            response = _form(request, 429, error="error.limit", minutes=int(wait // 60) + 1, next=target)
            response.headers["Retry-After"] = str(int(wait) + 1)
            return response
        check = partial(site.accounts.check_password, name, values.get("password", ""))
        account = await run_sync(check, limiter=password_checks)
        if account is None:
            await run_sync(site.accounts.record_refusal, name, address)
            return _form(request, 401, error="error.wrong", next=target, name=name)
        by_account.forgive(counted)
        return await run_sync(partial(_signed_in, request, account, target))

    @router.post("/sign-out")
    async def sign_out(request: Request) -> Response:
        values = await _read_form(request)
        check_same_origin(request)
        return await run_sync(partial(_sign_out, request, values.get("csrf", "")))

    @router.get("/invitation")
    def invitation(request: Request, token: str = "") -> Response:
        invited = site.accounts.tokens.find(token, "invitation")
        if invited is None:
            return _form(request, 404, error="error.link")
        return _join_form(request, token, invited.role)

    @router.post("/invitation")
    async def join(request: Request) -> Response:
        values = await _read_form(request)
        check_same_origin(request)
        check_transport(request, site)
        if wait := by_address.wait(_address(request)):
            raise RequestRejected(429, "too many attempts", {"Retry-After": str(int(wait) + 1)})
        return await run_sync(partial(_join, request, values), limiter=password_checks)

    def _use_link(request: Request, token: str, target: str) -> Response:
        try:
            name = site.accounts.tokens.use(token, "link").account or ""
            return _signed_in(request, site.accounts.get(name), target)
        except NotFound:
            return _form(request, 404, error="error.link")

    def _signed_in(request: Request, account: Account, target: str) -> Response:
        response = RedirectResponse(target, 303)
        start_session(request, response, site, account.name)
        return response

    def _sign_out(request: Request, csrf: str) -> Response:
        response = RedirectResponse("/sign-in", 303)
        if principal := find_principal(request, site):
            check_csrf(principal, csrf)
        end_session(request, response, site)
        return response

    def _join(request: Request, values: dict[str, str]) -> Response:
        token, name, password = (values.get(key, "") for key in ("token", "name", "password"))
        invited = site.accounts.tokens.find(token, "invitation")
        if invited is None:
            return _form(request, 404, error="error.link")
        if password != values.get("repeat"):
            return _join_form(request, token, invited.role, 422, error="error.repeat", name=name)
        try:
            account = site.accounts.accept(token, name, password)
        except NotFound:
            return _form(request, 404, error="error.link")
        except UserError as error:
            if not is_user_mistake(error):
                raise
            return _join_form(request, token, invited.role, 422, problem=str(error), name=name)
        return _signed_in(request, account, "/")

    def _form(request: Request, status: int = 200, **values: Any) -> Response:
        content = {"error": "", "minutes": 0, "name": "", "next": "/", "link": None, "token": "", **values}
        has_passwords = site.accounts.has_passwords()
        return app_page(
            request, None, "sign_in.html", status, has_passwords=has_passwords, workspace=workspace, **content
        )

    def _join_form(request: Request, token: str, role: str, status: int = 200, **values: Any) -> Response:
        content = {"error": "", "problem": "", "name": "", **values}
        # After a mistake the address has no token, and to change the language would lose the invitation.
        here = f"/invitation?token={quote(token)}"
        return app_page(
            request, None, "invitation.html", status, here=here, token=token, role=role, workspace=workspace, **content
        )

    return router


async def _read_form(request: Request) -> dict[str, str]:
    body = await read_body(request, _FORM_BYTES, _FORM)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=20, errors="strict")
    except ValueError:
        raise RequestRejected(400, "this is not a form of this page") from None
    return {key: values[0] for key, values in fields.items()}


def _address(request: Request) -> str:
    """Returns a client's address; of IPv6 the network, since a client has all addresses of it."""
    address = request.client.host if request.client else ""
    return ":".join(address.split(":")[:4]) if address.count(":") > 1 and "." not in address else address


def sign_in_url(base: str, secret: str, page: str = "/") -> str:
    """Returns the address of a one-time link that leads to a page."""
    return f"{base}/sign-in?token={secret}" + ("" if page == "/" else f"&next={page}")
