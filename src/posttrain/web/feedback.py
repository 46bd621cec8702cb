"""HTTP app of the feedback inbox: ``POST /v1/feedback`` answers once the entry is on disk."""

import asyncio
import hmac
from collections.abc import Collection
from typing import Any, Literal

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from posttrain import __version__
from posttrain.data.feedback.entries import Feedback, unknown_answer
from posttrain.data.feedback.inbox import Conflict, Full, Inbox
from posttrain.store.errors import UserError, WorkError
from posttrain.web.request_bodies import LIMIT_BYTES, RequestRejected, read_json, rejection_response


class Acknowledgement(BaseModel):
    """The entry ``id`` is on the disk; ``repeated``: it was before."""

    id: str
    repeated: bool


class Refusal(BaseModel):
    """Says in one line why nothing was taken."""

    error: str


class Health(BaseModel):
    status: Literal["ok", "takes nothing"]


class InboxStatus(BaseModel):
    """Counts entries and sealed segments, and bytes of the open segment."""

    entries: int
    waiting: int
    sealed: int
    open_bytes: int
    writable: bool


class Status(BaseModel):
    inbox: InboxStatus


_REASONS = {
    400: "The body is not a JSON object, or a key occurs twice in it.",
    401: "The token is missing or wrong.",
    408: "The request took too long.",
    409: "Another entry has this id.",
    413: "The body is too long.",
    415: "The body is not `application/json`.",
    421: "The `Host` is not served here.",
    422: "A field does not fit, or the right answer is not in the label set.",
    503: "There are too many connections, or nothing is taken until the server is started again.",
    507: "The disk is full.",
}


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Refusal, "description": _REASONS[status]} for status in statuses}


def feedback_app(
    inbox: Inbox, *, token: str | None = None, labels: Collection[str] = (), limit_bytes: int = LIMIT_BYTES
) -> FastAPI:
    """Builds the app that collects feedback into ``inbox``; the caller closes the inbox.

    ``POST /v1/feedback`` takes a `Feedback` as JSON and answers 201 ``{"id", "repeated"}``; 400 for no JSON, 401 for a
    wrong token, 409 for an id of other content, 413 for too long a body, 415 for another type, 422 for fields that do
    not fit, 507 for a full disk, 503 when nothing can be taken. ``GET /healthz`` says whether feedback is taken;
    ``GET /v1/status`` counts; ``GET /openapi.json`` describes them all. A refusal's body is ``{"error": "one line"}``.

    Args:
        token: expected after ``Authorization: Bearer``; None to accept every request.
        labels: the closed label set, outside which a right answer is 422; empty for open-ended answers.
        limit_bytes: of a body.
    """
    # No documentation pages: they would load scripts from a CDN.
    app = FastAPI(title="posttrain", version=__version__, docs_url=None, redoc_url=None)
    schema = Feedback.model_json_schema()
    # Only describes the token: `_authorise` checks it, before the body is read.
    bearer = [Depends(HTTPBearer(auto_error=False))] if token is not None else []

    @app.exception_handler(RequestRejected)
    async def refused(request: Request, error: RequestRejected) -> JSONResponse:
        return rejection_response(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail).lower()}, error.status_code, error.headers)

    @app.post(
        "/v1/feedback",
        status_code=201,
        summary="Takes an entry of feedback; it is on the disk when the answer comes",
        response_model=Acknowledgement,
        responses=_refusals(400, 401, 408, 409, 413, 415, 421, 422, 503, 507),
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        dependencies=bearer,
    )
    async def post(request: Request) -> JSONResponse:
        _authorise(request, token)
        feedback = _parse_feedback(await read_json(request, limit_bytes, "feedback"))
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

    @app.get(
        "/healthz",
        summary="Says whether feedback is taken",
        response_model=Health,
        responses={503: {"model": Health, "description": "Nothing is taken until the server is started again."}},
    )
    async def health() -> JSONResponse:
        # Without a token, for load balancers; the counts of /v1/status need one.
        well = inbox.status()["writable"]
        return JSONResponse({"status": "ok" if well else "takes nothing"}, 200 if well else 503)

    @app.get(
        "/v1/status",
        summary="Counts the entries of the inbox",
        response_model=Status,
        responses=_refusals(401, 421),
        dependencies=bearer,
    )
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


def _parse_feedback(values: dict[str, Any]) -> Feedback:
    try:
        return Feedback.read(values, "feedback")
    except UserError as error:
        raise RequestRejected(422, str(error)) from None
