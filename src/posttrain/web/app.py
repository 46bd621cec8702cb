"""The app of ``posttrain serve``: pages, static files, the API under ``/api``, and the inbox of feedback."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain import __version__
from posttrain.inspect.status import status
from posttrain.label.tokens import Conflict, NotFound
from posttrain.store.errors import (
    DamagedDatabaseError,
    DatabaseAwayError,
    LockedError,
    StorageError,
    UserError,
    WorkError,
    shorten,
    to_line,
)
from posttrain.web.access import LOOP, Principal, Site
from posttrain.web.api.labelling import labelling_routes
from posttrain.web.api.loop import loop_routes
from posttrain.web.api.people import people_routes
from posttrain.web.api.review import review_routes
from posttrain.web.app_page import (
    STATIC,
    SignInNeeded,
    add_to_navigation,
    app_page,
    own_address,
    page_access,
    safe_path,
)
from posttrain.web.label_pages import label_pages
from posttrain.web.loop_pages import loop_pages
from posttrain.web.metrics import metrics_routes
from posttrain.web.request_bodies import JsonBodies, RequestRejected, rejection_response
from posttrain.web.server import SECURITY_HEADERS
from posttrain.web.sign_in import sign_in_routes
from posttrain.web.team_pages import team_pages
from posttrain.web.translations import LANGUAGE_COOKIE, LANGUAGES, translator_of

log = logging.getLogger("posttrain")

_YEAR = 365 * 86_400
_FEEDBACK_PATHS = ("/v1/", "/healthz", "/openapi.json")


class SecuredResponses:
    """Adds the security headers to every answer, and forbids caches to keep what is not a static file."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                # Static files have no secrets, and their names change with no release: they are checked by their tag.
                is_static = scope["path"].startswith("/static/")
                headers.setdefault("Cache-Control", "no-cache" if is_static else "no-store")
            await send(message)

        await self._app(scope, receive, secured)


def labelling_app(site: Site, feedback: FastAPI) -> ASGIApp:
    """Builds the whole app.

    Args:
        feedback: The app of the inbox, which answers every path that nothing else does.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.site = site
    _handle_page_errors(app)
    app.include_router(sign_in_routes(site))
    add_to_navigation("nav.home", "/", "viewer")
    app.include_router(label_pages(site))

    @app.get("/")
    def home(request: Request, principal: Annotated[Principal, page_access("viewer")]) -> Response:
        # Annotators have nothing to do with commands and files; the batches say what there is to label.
        reads_loop = principal.may(LOOP)
        waiting = status(site.workspace, site.config)["waiting"] if site.config is not None and reads_loop else None
        batches = [site.queue.progress(batch.name) for batch in site.queue.batches("open")]
        people = [account for account in site.accounts.all() if account.role != "model" and account.closed_at is None]
        return app_page(
            request,
            principal,
            "home.html",
            waiting=waiting,
            reads_loop=reads_loop,
            paused=site.accounts.get(principal.name).paused,
            batches=[batch for batch in batches if batch.resolved < batch.items],
            own_answers={batch.batch: site.queue.count_answers(batch.batch, principal.name) for batch in batches},
            is_alone=len(people) < 2,
        )

    @app.get("/language/{language}")
    def language(language: str, next: str = "") -> Response:
        response = RedirectResponse(safe_path(next), 303)
        if language in LANGUAGES:
            response.set_cookie(LANGUAGE_COOKIE, language, max_age=_YEAR, samesite="lax")
        return response

    app.include_router(loop_pages(site))
    app.include_router(team_pages(site))
    metrics = metrics_routes(site)
    app.include_router(metrics)
    app.mount("/static", StaticFiles(directory=STATIC))
    api = api_app(site)
    _describe_too(api, feedback.openapi(), get_openapi(title="", version="", routes=metrics.routes))
    app.mount("/api", api)
    app.mount("/", _unless_page(feedback))
    return SecuredResponses(app)


def _unless_page(feedback: ASGIApp) -> ASGIApp:
    """Passes on what a program may ask the inbox; a mistyped address is answered with a page."""

    async def passed_on(scope: Scope, receive: Receive, send: Send) -> None:
        if _shows_pages(Request(scope)) and not scope["path"].startswith(_FEEDBACK_PATHS):
            raise HTTPException(404)
        await feedback(scope, receive, send)

    return passed_on


def _handle_page_errors(app: FastAPI) -> None:
    """Answers errors with a page where a browser shows one, and with a line of JSON elsewhere."""
    app.add_exception_handler(Exception, defect_response)

    @app.exception_handler(SignInNeeded)
    async def sign_in(request: Request, error: SignInNeeded) -> Response:
        return RedirectResponse(f"/sign-in?next={quote(own_address(request), safe='/')}", 303)

    @app.exception_handler(RequestRejected)
    async def rejected(request: Request, error: RequestRejected) -> Response:
        if not _shows_pages(request):
            return rejection_response(error)
        page = app_page(request, None, "error.html", error.status, problem=error.line)
        page.headers.update(error.headers)
        return page

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        if not _shows_pages(request):
            return error_response(request, 422, _invalid_line(error))
        return app_page(request, None, "error.html", 422, problem=_invalid_line(error))

    @app.exception_handler(UserError)
    @app.exception_handler(WorkError)
    async def mistaken(request: Request, error: UserError | WorkError) -> Response:
        if not _shows_pages(request):
            return problem_response(request, error)
        return await rejected(request, _rejection(request, error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        if not _shows_pages(request):
            return JSONResponse({"error": str(error.detail).lower()}, error.status_code, error.headers)
        line = translator_of(request)("error.page") if error.status_code == 404 else error.detail
        return app_page(request, None, "error.html", error.status_code, problem=line)


def _shows_pages(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


_DESCRIPTION = """Labelling and the state of the loop, as the pages use them.

A program sends `Authorization: Bearer TOKEN`; an owner makes tokens on the page of people or by `posttrain accounts
token`. Feedback needs the token of the variable POSTTRAIN_TOKEN instead. A page sends its cookie, and with every change
the header `x-csrf-token`. Each operation names its least role in `x-least-role`; higher roles may call it, too, but for
the one in `x-not-role`. Errors are `{"error": "one line"}`, in Chinese where `Accept-Language` asks for it."""

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
    _handle_api_errors(app)
    return app


def _describe_too(api: FastAPI, *documents: Mapping[str, Any]) -> None:
    """Adds to the API's document what this server answers outside ``/api``."""
    describe = api.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        for other in documents:
            for path, item in other["paths"].items():
                document["paths"][path] = {**item, "servers": [{"url": "/"}]}
            for kind, entries in other.get("components", {}).items():
                document["components"].setdefault(kind, {}).update(entries)
        return document

    api.openapi = openapi  # type: ignore[method-assign]


def _invalid_line(error: RequestValidationError) -> str:
    # Only the first: the others are often its consequences.
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"][1:])
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"`{shorten(where)}`: {message}" if where else message


def defect_response(request: Request, error: Exception) -> Response:
    """Answers a request that met a defect; the server logs its traceback."""
    return error_response(request, 500, f"the server has a defect ({type(error).__name__}); its log says more")


def error_response(request: Request, status: int, line: str, headers: Any = None) -> JSONResponse:
    """Returns ``{"error": line}`` in the language of the request."""
    line = translator_of(request).line(line)
    return JSONResponse({"error": shorten(to_line(line), _LONGEST_LINE)}, status, headers)


def problem_response(request: Request, error: UserError | WorkError) -> JSONResponse:
    """Answers a user's mistake or failed work with the status of its kind."""
    rejection = _rejection(request, error)
    return error_response(request, rejection.status, rejection.line, rejection.headers)


def _rejection(request: Request, error: UserError | WorkError) -> RequestRejected:
    """Returns the status and the line of an error; the address of a database is for the log alone."""
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 422)
    of_database = isinstance(error.__cause__, SQLAlchemyError)
    if not of_database and request.app.state.site.workspace.metadata.location not in str(error):
        return RequestRejected(status, str(error))
    log.warning("%s %s: %s", request.method, request.url.path, error)
    if status == 503 and not isinstance(error, DamagedDatabaseError):
        return RequestRejected(status, "the database does not answer; try again", {"Retry-After": _RETRY_SECONDS})
    line = error.what if isinstance(error, UserError) else "the database failed; the server's log says more"
    return RequestRejected(status, line)


def _handle_api_errors(app: FastAPI) -> None:
    app.add_exception_handler(Exception, defect_response)

    @app.exception_handler(RequestRejected)
    async def rejected(request: Request, error: RequestRejected) -> Response:
        return rejection_response(RequestRejected(error.status, translator_of(request).line(error.line), error.headers))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return error_response(request, error.status_code, str(error.detail).lower(), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(request, 422, _invalid_line(error))

    @app.exception_handler(UserError)
    @app.exception_handler(WorkError)
    async def mistaken(request: Request, error: UserError | WorkError) -> Response:
        return problem_response(request, error)


_RETRY_SECONDS = "5"

_STATUSES: dict[type[Exception], int] = {
    NotFound: 404,
    Conflict: 409,
    LockedError: 409,
    DatabaseAwayError: 503,
    StorageError: 507,
    WorkError: 503,
}
