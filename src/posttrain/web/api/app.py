"""The HTTP API under ``/api``: its routes, its OpenAPI document, and how it answers errors."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from posttrain import __version__
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import StorageError, UserError, WorkError, shorten, to_line
from posttrain.web.access import Site
from posttrain.web.api.labelling import labelling_routes
from posttrain.web.api.loop import loop_routes
from posttrain.web.api.people import people_routes
from posttrain.web.api.review import review_routes
from posttrain.web.request_bodies import JsonBodies, RequestRejected, rejection_response

_DESCRIPTION = """Labelling and the state of the loop, as the pages use them.

A program sends `Authorization: Bearer TOKEN`; an owner makes tokens on the page of people or by `posttrain accounts
token`. A page sends its cookie, and with every change the header `x-csrf-token`. Each operation names its least role in
`x-least-role`; higher roles may call it, too. Errors are `{"error": "one line"}`."""

_LONGEST_LINE = 500


def api_app(site: Site) -> FastAPI:
    """Builds the API; it is mounted under ``/api``."""
    # No documentation pages: they would load scripts from a CDN.
    app = FastAPI(title="posttrain", version=__version__, description=_DESCRIPTION, docs_url=None, redoc_url=None)
    app.state.site = site
    app.include_router(people_routes(site))
    app.include_router(labelling_routes(site))
    app.include_router(review_routes(site))
    app.include_router(loop_routes(site))
    app.add_middleware(JsonBodies)
    _handle_errors(app)
    return app


def defect_response(request: Request, error: Exception) -> Response:
    """Answers a request that met a defect; the server logs its traceback."""
    return error_response(500, f"the server has a defect ({type(error).__name__}); its log says more")


def error_response(status: int, line: str, headers: Any = None) -> JSONResponse:
    """Returns ``{"error": line}``."""
    return JSONResponse({"error": shorten(to_line(line), _LONGEST_LINE)}, status, headers)


def problem_response(error: UserError | WorkError) -> JSONResponse:
    """Answers a user's mistake or failed work with the status of its kind."""
    if isinstance(error, WorkError):
        return error_response(503, str(error))
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 422)
    return error_response(status, str(error))


def _handle_errors(app: FastAPI) -> None:
    app.add_exception_handler(Exception, defect_response)

    @app.exception_handler(RequestRejected)
    async def rejected(request: Request, error: RequestRejected) -> Response:
        return rejection_response(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, str(error.detail).lower(), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # Only the first: the others are often its consequences.
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"][1:])
        message = problem["msg"].removeprefix("Value error, ")
        return error_response(422, f"`{shorten(where)}`: {message}" if where else message)

    @app.exception_handler(UserError)
    @app.exception_handler(WorkError)
    async def mistaken(request: Request, error: UserError | WorkError) -> Response:
        return problem_response(error)


_STATUSES: dict[type[UserError], int] = {NotFound: 404, Conflict: 409, StorageError: 507}
