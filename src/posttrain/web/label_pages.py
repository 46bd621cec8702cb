"""The pages of labelling: where people label, review disagreements, and write the guideline."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from posttrain.label.queue_leases import LEASE_MINUTES
from posttrain.store.section import MAX_INTEGER
from posttrain.web.access import Principal, Site
from posttrain.web.app_page import add_to_navigation, app_page, page_access
from posttrain.web.guideline_text import compare, render_markdown
from posttrain.web.translations import translator_of

_OUTDATED = 200  # answers that are listed; their number is always shown


def label_pages(site: Site) -> APIRouter:
    """Builds the routes."""
    router = APIRouter(include_in_schema=False)
    queue = site.queue
    add_to_navigation("nav.label", "/label", "annotator")
    add_to_navigation("nav.review", "/review", "reviewer")
    add_to_navigation("nav.guidelines", "/guidelines", "viewer")

    @router.get("/label")
    def label(
        request: Request,
        principal: Annotated[Principal, page_access("annotator")],
        batch: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        return app_page(
            request,
            principal,
            "label.html",
            batch=batch,
            lease_seconds=60 * LEASE_MINUTES,
            texts=_script_texts(request, "label."),
            **_newest_guideline(),
        )

    @router.get("/review")
    def review(
        request: Request,
        principal: Annotated[Principal, page_access("reviewer")],
        batch: Annotated[str, Query(max_length=200)] = "",
        item: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    ) -> Response:
        texts = _script_texts(request, "label.") | _script_texts(request, "review.")
        return app_page(request, principal, "review.html", batch=batch, item=item, texts=texts, **_newest_guideline())

    @router.get("/guidelines")
    def guidelines(
        request: Request,
        principal: Annotated[Principal, page_access("viewer")],
        old: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
        new: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    ) -> Response:
        versions = queue.guidelines()
        texts = {row["version"]: row["text"] for row in versions}
        latest = max(texts, default=0)
        shown = new if new is not None and new in texts else latest
        before = old if old is not None and old in texts else max(0, shown - 1)
        outdated = queue.outdated_answers() if principal.may("reviewer") else []
        return app_page(
            request,
            principal,
            "guidelines.html",
            versions=list(reversed(versions)),
            latest=latest,
            shown=shown,
            before=before,
            rendered=render_markdown(texts.get(shown, "")),
            draft=texts.get(latest, ""),
            difference=compare(texts.get(before, ""), texts[shown]) if before and shown else [],
            outdated=outdated[:_OUTDATED],
            outdated_count=len(outdated),
            may_write=principal.may("reviewer"),
            texts=_script_texts(request, "guidelines."),
        )

    def _newest_guideline() -> dict[str, Any]:
        newest = queue.guideline()
        return {
            "guideline": newest["version"] if newest else 0,
            "guideline_html": render_markdown(newest["text"]) if newest else "",
        }

    return router


def _script_texts(request: Request, prefix: str) -> dict[str, str]:
    """Returns the texts that a page's scripts show, by their ids without the prefix."""
    return translator_of(request).with_prefix(prefix)
