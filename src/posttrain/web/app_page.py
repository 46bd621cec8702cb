"""Renders the pages of the server: navigation by role, language, and the session's CSRF value."""

import re
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from posttrain.web.access import Principal, find_principal
from posttrain.web.page import template_environment
from posttrain.web.request_bodies import RequestRejected
from posttrain.web.translations import LANGUAGES, Translator, choose_language, translator_of

STATIC = str(files("posttrain.web").joinpath("static"))

NAVIGATION: dict[str, tuple[str, str]] = {}
"""Path of each page by the id of its name, and its least role, in the order of the navigation; pages add theirs."""


class SignInNeeded(Exception):
    """Ends a request for a page with the page for signing in."""


def page_access(role: str) -> Any:
    """Returns what a page's parameter depends on, ``Annotated[Principal, page_access("viewer")]``: the account of the
    request, which has this role or a higher one, or that of `posttrain.web.access.LOOP`.

    Who is not signed in is sent to sign in first; who has a lower role is answered 403.
    """

    def principal_of_page(request: Request) -> Principal:
        principal = find_principal(request, request.app.state.site)
        if principal is None:
            raise SignInNeeded
        if not principal.may(role):
            raise RequestRejected(403, translator_of(request)("error.role"))
        return principal

    return Depends(principal_of_page)


def add_to_navigation(key: str, path: str, role: str) -> None:
    """Adds a page to the navigation of everyone with at least this role.

    Args:
        key: Id of its name in `posttrain.web.translations`, such as ``nav.label``.
    """
    NAVIGATION[key] = (path, role)


def app_page(
    request: Request, principal: Principal | None, template: str, status: int = 200, **content: object
) -> Response:
    """Renders a page as it is for this request's account and language.

    Args:
        principal: None for pages before signing in.
        template: One that extends ``app.html``.
        content: Everything that the template names besides ``_`` (the translator), ``principal`` and ``navigation``.
    """
    language = choose_language(request)
    navigation = [
        (path, key) for key, (path, role) in NAVIGATION.items() if principal is not None and principal.may(role)
    ]
    page = template_environment().get_template(template)
    text = page.render(
        _=Translator(language),
        language=language,
        languages=LANGUAGES,
        path=request.url.path,
        principal=principal,
        navigation=navigation,
        **{"here": own_address(request), **content},
    )
    return HTMLResponse(text.encode("utf-8", "replace"), status, {"Content-Language": language})


def own_address(request: Request) -> str:
    """Returns the path and query of a request, to come back to; without the query if that holds odd characters."""
    path = safe_path(request.url.path)
    query = quote(request.url.query, safe="=&%+:@/?-._~")
    return path if not query or safe_path(f"{path}?{query}") == "/" else f"{path}?{query}"


def safe_path(path: str) -> str:
    """Returns a path of this server to continue to, else ``/``: a link must not lead to another site."""
    # A browser takes `//host` and `/\\host` for other hosts, and skips control characters.
    return path if re.fullmatch(r"/(?![/\\])[A-Za-z0-9_.~/?=&%:@+-]*", path) and "//" not in path else "/"
