"""Reads the bodies of requests within limits, and answers what cannot be taken in one line."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.data.reading.json_rows import broken_json_problem
from posttrain.data.reading.rows import Problem, check_row, one_line
from posttrain.store.text_files import reject_constant, unique_pairs

LIMIT_BYTES = 2**20

# How much of a body that is too long is read before the connection is closed.
_DRAIN_BYTES = 2**26
_DRAIN_SECONDS = 10.0


class RequestRejected(Exception):
    """Ends a request with a status and a one-line error."""

    def __init__(self, status: int, line: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(line)
        self.status, self.line, self.headers = status, line, headers or {}


def rejection_response(error: RequestRejected) -> JSONResponse:
    """Returns ``{"error": line}`` with the status of a rejection."""
    headers = dict(error.headers)
    # The unread rest of a body would be parsed as the next request.
    if error.status == 413:
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": one_line(error.line)}, error.status, headers)


async def read_json(request: Request, limit: int, name: str = "body") -> dict[str, Any]:
    """Reads a body that is one JSON object.

    Args:
        limit: Bytes that the body may have.
        name: What errors call the object.

    Raises:
        RequestRejected: 400 for no JSON object or one that cannot be stored, 413 for too long a body, 415 for another
            content type.
    """
    return parse_object(await read_body(request, limit, "application/json"), name)


async def read_body(request: Request, limit: int, expected: str) -> bytes:
    """Reads a body of the content type ``expected`` and at most ``limit`` bytes.

    Raises:
        RequestRejected: 400 if it ends too early, 413, 415.
    """
    # Browsers let any page post other types across origins; JSON needs a preflight request, which fails here.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != expected:
        raise RequestRejected(415, f"send `Content-Type: {expected}`")
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


class JsonBodies:
    """Passes on requests whose body, if there is one, is one JSON object within the limit, and answers the others."""

    def __init__(self, app: ASGIApp, limit: int = LIMIT_BYTES) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive), self._limit, "application/json")
            parse_object(body, "body")
        except RequestRejected as error:
            await rejection_response(error)(scope, receive, send)
            return
        unread = True

        async def replay() -> Message:
            nonlocal unread
            if unread:
                unread = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        await self._app(scope, replay, send)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def parse_object(body: bytes, name: str) -> dict[str, Any]:
    """Parses a JSON object that can be stored: UTF-8, no key twice, no endless nesting, no NaN.

    Raises:
        RequestRejected: 400 if it is none.
    """
    try:
        values = _DECODER.decode(body.decode())
    except UnicodeError:
        raise RequestRejected(400, "holds bytes or characters that are not UTF-8") from None
    # Deep nesting exhausts the parser's stack: a request must not end the server.
    except (ValueError, RecursionError) as error:
        raise RequestRejected(400, broken_json_problem(error, name, 1).message) from None
    if not isinstance(values, dict):
        raise RequestRejected(400, "send one JSON object")
    if isinstance(problem := check_row(values, name, 1), Problem):
        raise RequestRejected(400, problem.message)
    return values


# Python alone would accept NaN and Infinity, which no other reader of the inbox would, and the last of two values of
# one key, of which the sender may have meant the first.
_DECODER = json.JSONDecoder(object_pairs_hook=unique_pairs, parse_constant=reject_constant)
