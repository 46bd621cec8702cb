"""The pages of the team: quality of the labels, people, the log of changes, and one's own account."""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from posttrain.label.accounts import Account
from posttrain.label.audit import list_actions, list_changes
from posttrain.label.tokens import RANKS
from posttrain.loop.label_reports import label_reports
from posttrain.store.section import MAX_INTEGER
from posttrain.web.access import Principal, Site
from posttrain.web.app_page import add_to_navigation, app_page, page_access
from posttrain.web.quality_report import quality_sections, quality_tiles

_WAIT_SECONDS = 2.0
_CHANGES = 50
_PEOPLE_TABS = ("/people", "/people/audit")

Viewer = Annotated[Principal, page_access("viewer")]
Reviewer = Annotated[Principal, page_access("reviewer")]
Owner = Annotated[Principal, page_access("owner")]
Text = Annotated[str, Query(max_length=200, pattern=r"^[^\x00]*$")]


@dataclass(frozen=True)
class PersonRow:
    """An account with its work.

    Attributes:
        answers: Number of answers that count.
        gold: ``value``, ``count``, ``n``, ``low`` and ``high`` of the gold items; None before the first.
        seconds: Median time of an answer; None where none is timed.
        last: Time of the last answer; None before the first.
    """

    account: Account
    answers: int
    gold: dict[str, Any] | None
    seconds: float | None
    last: datetime | None

    @property
    def state(self) -> str:
        """Returns ``active``, ``paused`` or ``closed``."""
        return "closed" if self.account.closed_at else "paused" if self.account.paused else "active"


def team_pages(site: Site) -> APIRouter:
    """Builds the routes."""
    add_to_navigation("nav.quality", "/quality", "reviewer")
    add_to_navigation("nav.people", "/people", "reviewer")
    router = APIRouter(include_in_schema=False)
    accounts, tokens, metadata = site.accounts, site.accounts.tokens, site.workspace.metadata

    @router.get("/quality")
    def quality(request: Request, principal: Reviewer, batch: Text = "") -> Response:
        report = site.quality.get(batch or None, _WAIT_SECONDS)
        by_model = any("suggestions" in run.inputs for run in metadata.runs(stage="label", status="done"))
        accepted = [row for row in label_reports(site.workspace) if row["models"]] if by_model else []
        return app_page(
            request,
            principal,
            "quality.html",
            tabs=(),
            batches=[each.name for each in site.queue.batches()][::-1],
            batch=batch,
            tiles=quality_tiles(report) if report else [],
            sections=quality_sections(report, accepted[::-1]) if report else [],
        )

    @router.get("/people")
    def people(request: Request, principal: Reviewer) -> Response:
        report = site.quality.get(wait=_WAIT_SECONDS)
        work = accounts.work()
        rows = [_person_row(account, work.get(account.name), report) for account in accounts.all()]
        return app_page(
            request,
            principal,
            "people.html",
            tabs=_PEOPLE_TABS if principal.may("owner") else (),
            rows=sorted(rows, key=lambda row: (row.account.closed_at is not None, row.account.name)),
            invitations=[row for row in tokens.all() if row.kind == "invitation"] if principal.may("owner") else [],
            roles=list(RANKS)[::-1],
            is_late=report is None,
        )

    @router.get("/people/audit")
    def audit(
        request: Request,
        principal: Owner,
        actor: Text = "",
        action: Text = "",
        before: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    ) -> Response:
        changes = list_changes(metadata, before=before, count=_CHANGES + 1, actor=actor or None, action=action or None)
        return app_page(
            request,
            principal,
            "audit.html",
            tabs=_PEOPLE_TABS,
            changes=changes[:_CHANGES],
            following=changes[_CHANGES - 1].number if len(changes) > _CHANGES else None,
            actors=sorted({"terminal", *(account.name for account in accounts.all())}),
            actions=list_actions(metadata),
            actor=actor,
            action=action,
            before=before,
            json=_json,
        )

    @router.get("/account")
    def account(request: Request, principal: Viewer) -> Response:
        return app_page(
            request,
            principal,
            "account.html",
            tabs=(),
            account=accounts.get(principal.name),
            tokens=[row for row in tokens.all(owner=principal.name) if row.kind == "api"],
        )

    return router


def _person_row(account: Account, done: tuple[int, datetime] | None, report: dict[str, Any] | None) -> PersonRow:
    answers, last = done or (0, None)
    report = report or {"work": [], "gold": {"by_annotator": {}}}
    work = [part for part in report["work"] if part["annotator"] == account.name]
    # Of several kinds of answers the most frequent one's: a mean of medians says nothing.
    most = max(work, key=lambda part: part["labels"], default=None)
    gold = report["gold"]["by_annotator"].get(account.name)
    return PersonRow(account, answers, gold, most["median_seconds"] if most else None, last)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)
