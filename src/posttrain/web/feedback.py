"""HTTP server of the feedback inbox: ``POST /v1/feedback`` answers once the entry is on disk."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from posttrain.data.feedback.entries import Feedback, unknown_answer
from posttrain.data.feedback.inbox import Conflict, Full, Inbox
from posttrain.data.reading.rows import Problem, check_row
from posttrain.store.errors import UserError, WorkError

LIMIT_BYTES = 2**20

# How much of a body that is too long is read before the connection is closed.
_DRAIN_BYTES = 2**26
_DRAIN_SECONDS = 10.0


class RequestRejected(Exception):
    """Ends a request with a status and a one-line error."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


def feedback_app(
    inbox: Inbox, *, token: str | None = None, labels: Collection[str] = (), limit_bytes: int = LIMIT_BYTES
) -> FastAPI:
    """Builds the app that collects feedback into ``inbox``; the caller closes the inbox.

    ``POST /v1/feedback`` takes a `Feedback` as JSON and answers 201 ``{"id", "repeated"}``; 400 for no JSON, 401 for a
    wrong token, 409 for an id of other content, 413 for too long a body, 415 for another type, 422 for fields that do
    not fit, 507 for a full disk, 503 when nothing can be taken. ``GET /healthz`` says whether feedback is taken;
    ``GET /v1/status`` counts. A refusal's body is ``{"error": "one line"}``.

    Args:
        token: expected after ``Authorization: Bearer``; None to accept every request.
        labels: the closed label set, outside which a right answer is 422; empty for open-ended answers.
        limit_bytes: of a body.
    """
    # No documentation pages: they would load scripts from a CDN and describe the server to anyone.
    app = FastAPI(title="posttrain", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RequestRejected)
    async def refused(request: Request, error: RequestRejected) -> JSONResponse:
        # The unread rest of a body would be parsed as the next request.
        headers = {"Connection": "close"} if error.status == 413 else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": " ".join(error.line.split())}, error.status, headers)

    @app.post("/v1/feedback", status_code=201)
    async def post(request: Request) -> JSONResponse:
        _authorise(request, token)
        feedback = _parse_feedback(await _read_body(request, limit_bytes))
        if problem := unknown_answer(feedback, labels):
            raise RequestRejected(422, problem)
        try:
            # The inbox fsyncs in its own thread and shares one fsync among waiting requests.
            receipt = await asyncio.wrap_future(inbox.append(feedback))
        except Conflict as error:
            raise RequestRejected(409, str(error)) from None
        except Full as error:
            raise RequestRejected(507, str(error)) from None
        except UserError as error:
            raise RequestRejected(422, str(error)) from None
        except WorkError as error:
            raise RequestRejected(503, str(error)) from None
        return JSONResponse({"id": receipt.id, "repeated": receipt.repeated}, 201)

    @app.get("/healthz")
    async def health() -> JSONResponse:
        # Without a token, for load balancers; the counts of /v1/status need one.
        well = inbox.status()["writable"]
        return JSONResponse({"status": "ok" if well else "takes nothing"}, 200 if well else 503)

    @app.get("/v1/status")
    async def status(request: Request) -> JSONResponse:
        _authorise(request, token)
        return JSONResponse({"inbox": inbox.status()})

    return app


def _authorise(request: Request, token: str | None) -> None:
    if token is None:
        return
    header = request.headers.get("authorization", "").encode()
    # Comparison in constant time: the response time must not reveal how much of a token is right.
    if not hmac.compare_digest(header, f"Bearer {token}".encode()):
        raise RequestRejected(401, "the token is missing or wrong; send `Authorization: Bearer TOKEN`")


async def _read_body(request: Request, limit: int) -> bytes:
    # Browsers let any page post other types across origins; JSON needs a preflight request, which fails here.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRejected(415, "send `Content-Type: application/json`")
    body = bytearray()
    stream = request.stream()
    declared = request.headers.get("content-length", "0")
    # Such a client sends no body before it is invited, so there is nothing to drain.
    asks_first = request.headers.get("expect", "").lower() == "100-continue"
    try:
        if declared.isdigit() and int(declared) <= limit:
            async for chunk in stream:
                body += chunk
                # A chunked body declares no length: what arrives counts.
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        if body or not asks_first:
            await _drain_body(stream)
    except ClientDisconnect:
        raise RequestRejected(400, "the body ends too early") from None
    raise RequestRejected(413, f"the body is longer than {limit} bytes")


async def _drain_body(stream: AsyncIterator[bytes]) -> None:
    """Discards the rest of a body that is too long, for a limited time and size."""
    # Closing while the client still sends would reset the connection, and the client would never see the 413.
    budget = _DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for chunk in stream:
                budget -= len(chunk)
                if budget < 0:
                    return


def _parse_feedback(body: bytes) -> Feedback:
    try:
        # Python's parser accepts NaN and Infinity, which no other reader of the inbox would.
        values = json.loads(body.decode(), parse_constant=_reject_constant)
    except UnicodeError:
        raise RequestRejected(400, "holds bytes or characters that are not UTF-8") from None
    # Deep nesting exhausts the parser's stack: a request must not end the server.
    except RecursionError:
        raise RequestRejected(400, "broken JSON: nested too deeply") from None
    except ValueError as error:
        raise RequestRejected(400, f"broken JSON: {error}") from None
    if not isinstance(values, dict):
        raise RequestRejected(400, "send one JSON object")
    if isinstance(problem := check_row(values, "feedback", 1), Problem):
        raise RequestRejected(400, problem.message)
    try:
        return Feedback.read(values, "feedback")
    except UserError as error:
        raise RequestRejected(422, str(error)) from None


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"`{constant}` is not JSON")


def serve(app: Any, host: str, port: int, announce: Any) -> None:
    """Serves an app until SIGTERM or Ctrl-C; finishes requests in progress first.

    Args:
        port: 0 for any that is free.
        announce: called with the address once it listens, such as ``http://127.0.0.1:8600``.

    Raises:
        UserError: the address cannot be listened on.
    """
    import signal
    import socket
    import threading

    # An optional extra, which only this function needs.
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Bound before uvicorn starts, so that port 0 can be announced and a taken port is a user's error.
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise UserError(what, where="--port", fix="give another port or host") from None
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=10))

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal again after its shutdown; our handler absorbs it, so that the process exits with 0.
    listens = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)} if listens else {}
    try:
        with listener:
            address = f"[{host}]" if ":" in host else host
            announce(f"http://{address}:{listener.getsockname()[1]}")
            server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
