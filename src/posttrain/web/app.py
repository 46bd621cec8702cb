"""The app of ``posttrain serve``: pages, static files, the API under ``/api``, and the inbox of feedback."""

from typing import Annotated

from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain.inspect.status import status
from posttrain.store.errors import UserError, WorkError
from posttrain.web.access import Principal, Site
from posttrain.web.api.app import api_app, defect_response, problem_response
from posttrain.web.app_page import STATIC, SignInNeeded, add_to_navigation, app_page, page_access, safe_path
from posttrain.web.label_pages import label_pages
from posttrain.web.loop_pages import loop_pages
from posttrain.web.request_bodies import RequestRejected, rejection_response
from posttrain.web.server import SECURITY_HEADERS
from posttrain.web.sign_in import sign_in_routes
from posttrain.web.team_pages import team_pages
from posttrain.web.translations import LANGUAGE_COOKIE, LANGUAGES, Translator, choose_language

_YEAR = 365 * 86_400


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


def labelling_app(site: Site, feedback: ASGIApp) -> ASGIApp:
    """Builds the whole app.

    Args:
        feedback: The app of the inbox, which answers every path that nothing else does.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.site = site
    _handle_errors(app)
    app.include_router(sign_in_routes(site))
    add_to_navigation("nav.home", "/", "viewer")
    app.include_router(label_pages(site))

    @app.get("/")
    def home(request: Request, principal: Annotated[Principal, page_access("viewer")]) -> Response:
        waiting = status(site.workspace, site.config)["waiting"] if site.config is not None else None
        return app_page(request, principal, "home.html", waiting=waiting)

    @app.get("/language/{language}")
    def language(language: str, next: str = "") -> Response:
        response = RedirectResponse(safe_path(next), 303)
        if language in LANGUAGES:
            response.set_cookie(LANGUAGE_COOKIE, language, max_age=_YEAR, samesite="lax")
        return response

    app.include_router(loop_pages(site))
    app.include_router(team_pages(site))
    app.mount("/static", StaticFiles(directory=STATIC))
    app.mount("/api", api_app(site))
    app.mount("/", feedback)
    return SecuredResponses(app)


def _handle_errors(app: FastAPI) -> None:
    """Answers errors with a page where a browser shows one, and with a line of JSON elsewhere."""
    app.add_exception_handler(Exception, defect_response)

    @app.exception_handler(SignInNeeded)
    async def sign_in(request: Request, error: SignInNeeded) -> Response:
        return RedirectResponse(f"/sign-in?next={safe_path(request.url.path)}", 303)

    @app.exception_handler(RequestRejected)
    async def rejected(request: Request, error: RequestRejected) -> Response:
        if not _shows_pages(request):
            return rejection_response(error)
        page = app_page(request, None, "error.html", error.status, problem=error.line)
        page.headers.update(error.headers)
        return page

    @app.exception_handler(UserError)
    @app.exception_handler(WorkError)
    async def mistaken(request: Request, error: UserError | WorkError) -> Response:
        answer = problem_response(error)
        if not _shows_pages(request):
            return answer
        return app_page(request, None, "error.html", answer.status_code, problem=str(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        if not _shows_pages(request):
            return JSONResponse({"error": str(error.detail).lower()}, error.status_code, error.headers)
        line = Translator(choose_language(request))("error.page") if error.status_code == 404 else error.detail
        return app_page(request, None, "error.html", error.status_code, problem=line)


def _shows_pages(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")
