"""The API of review and guidelines: items with their answers side by side, decisions, and versions of the guideline."""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from threading import Lock
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from posttrain.label.answer_kinds import KINDS
from posttrain.label.answers import encode_votes
from posttrain.label.audit import record_change
from posttrain.label.people import FROM_FILE
from posttrain.label.quality.consensus import dawid_skene, gold_labels
from posttrain.label.queue_rows import Item
from posttrain.label.tokens import NotFound
from posttrain.store.errors import UserError
from posttrain.store.section import MAX_INTEGER
from posttrain.web.access import Sender, Site, least
from posttrain.web.api.bodies import ERRORS, Body, ItemId, Language, Note
from posttrain.web.api.labelling import BatchName, columns, shown_reason
from posttrain.web.guideline_text import render_markdown

_FIT_SECONDS = 10.0  # between fits of one batch, as each reviewer's page asks for them
_LEAST_ITEMS = 30
_LIKELIEST = 5
_LEAST_PROBABILITY = 0.01


class GivenAnswer(BaseModel):
    """An answer, skip or flag as reviewers see it."""

    annotator: str
    status: str
    answer: Any
    note: str | None
    seconds: float | None
    guideline: int
    created_at: datetime


class Probability(BaseModel):
    """How probable it is that an answer is right, given all answers and how often each annotator errs."""

    answer: Any
    probability: float


class ReviewItem(BaseModel):
    """An item with its answers side by side."""

    id: int
    batch: str
    record: str
    kind: str
    content: dict[str, Any]
    labels: list[str] | None
    suggestion: dict[str, Any] | None
    reason: str | None
    status: str
    cause: str | None = Field(description="Why it is in review: flagged, skipped or disagreement.")
    resolution: dict[str, Any] | None
    answers: list[GivenAnswer]
    decidable: bool = Field(True, description="False for a dispute about the sender's own answer; others decide it.")
    posterior: list[Probability] = Field(
        default=[],
        description="The likeliest answers by the model of Dawid and Skene; empty for free texts and below 30 items.",
    )


class Resolution(Body):
    """A reviewer's decision."""

    answer: Any
    note: Note | None = None


class Drop(Body):
    note: Note | None = None


class Guideline(BaseModel):
    version: int
    text: str = Field(description="Markdown.")
    author: str
    note: str | None
    created_at: datetime


class RenderedGuideline(Guideline):
    html: str = Field(description="The text as HTML that is safe to show.")


class NewGuideline(Body):
    text: Annotated[str, Field(min_length=1, max_length=200_000)]
    note: Note | None = None


class OutdatedAnswer(BaseModel):
    """An answer given under an earlier guideline."""

    answer_id: int
    item: int
    record: str
    batch: str
    annotator: str
    answer: Any
    guideline: int


def review_routes(site: Site) -> APIRouter:
    """Builds the routes."""
    router = APIRouter(responses=ERRORS, tags=["review"])
    queue, metadata = site.queue, site.workspace.metadata
    posteriors = _Posteriors(site)

    @router.get("/review", **least("reviewer"))
    def review(
        sender: Sender,
        translate: Language,
        batch: BatchName | None = None,
        item: Annotated[
            int | None, Query(ge=1, le=MAX_INTEGER, description="Only this item, in review or not.")
        ] = None,
        count: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> list[ReviewItem]:
        """Lists the items in review, each with its answers side by side and how probable each answer is."""
        items = queue.review_list(batch)[:count] if item is None else [queue.item(item)]
        shown = [_review_item(each, posteriors.get(each), queue.may_decide(each, sender.name)) for each in items]
        for each in shown:
            each.reason = shown_reason(each.reason, translate)
            for given in each.answers:
                # The only note that the program writes.
                given.note = translate.line(given.note) if given.note == FROM_FILE else given.note
        return shown

    @router.post("/items/{id}/resolve", **least("reviewer"))
    def resolve(id: ItemId, body: Resolution, sender: Sender) -> ReviewItem:
        """Decides an item for good, whatever was answered; a later decision replaces an earlier one.

        A dispute about the sender's own answer is for another reviewer or an owner, if there is one: 409.
        """
        with metadata.transaction():
            before = queue.item(id).resolution
            item = queue.resolve(id, sender.name, body.answer, body.note)
            _record(sender, "resolve item", str(id), before, item.resolution)
        return _review_item(item)

    @router.post("/items/{id}/drop", **least("reviewer"))
    def drop(id: ItemId, body: Drop, sender: Sender) -> ReviewItem:
        """Takes an item out of the result."""
        with metadata.transaction():
            before = queue.item(id).resolution
            item = queue.drop(id, sender.name, body.note)
            _record(sender, "drop item", str(id), before, item.resolution)
        return _review_item(item)

    @router.get("/guidelines", **least("viewer"))
    def guidelines() -> list[Guideline]:
        """Lists all versions of the guideline, oldest first."""
        return [Guideline(**row) for row in queue.guidelines()]

    @router.post("/guidelines", status_code=201, **least("reviewer"))
    def add_guideline(body: NewGuideline, sender: Sender) -> Guideline:
        """Adds a version of the guideline, which counts from now on."""
        if not body.text.strip():
            raise UserError("the guideline is empty", fix="write what each label means")
        with metadata.transaction():
            before = queue.guideline()
            version = queue.add_guideline(body.text, sender.name, body.note)
            if before is None or before["version"] != version:
                texts = [None if text is None else {"text": text} for text in (before and before["text"], body.text)]
                _record(sender, "add guideline", f"version {version}", *texts)
            return Guideline(**(queue.guideline(version) or {}))

    @router.get("/guidelines/outdated", **least("reviewer"))
    def outdated(
        version: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None, batch: BatchName | None = None
    ) -> list[OutdatedAnswer]:
        """Lists answers that were given under an earlier guideline, and may need another look."""
        return [OutdatedAnswer(**row) for row in queue.outdated_answers(version, batch)]

    @router.get("/guidelines/{version}", **least("viewer"))
    def guideline(version: Annotated[int, Path(ge=1, le=MAX_INTEGER)]) -> RenderedGuideline:
        """Returns a version of the guideline, also as HTML."""
        row = queue.guideline(version)
        if row is None:
            raise NotFound(f"there is no version {version} of the guideline")
        return RenderedGuideline(**row, html=render_markdown(row["text"]))

    def _record(sender: Sender, action: str, target: str, before: Any, after: Any) -> None:
        record_change(metadata, sender.name, action, target, before, after)

    return router


class _Posteriors:
    """Fits the model of Dawid and Skene to the answers of a batch, and keeps the last fit for some seconds."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = Lock()
        self._kept: dict[str, tuple[float, dict[int, list[Probability]]]] = {}

    def get(self, item: Item) -> list[Probability]:
        """Returns the likeliest answers to an item, the likeliest first."""
        if not KINDS[item.kind].votes:
            return []
        with self._lock:
            fitted_at, posteriors = self._kept.get(item.batch, (-_FIT_SECONDS, {}))
            if time.monotonic() - fitted_at >= _FIT_SECONDS:
                posteriors = self._fit(item.batch, item.kind)
                self._kept[item.batch] = (time.monotonic(), posteriors)
            return posteriors.get(item.id, [])

    def _fit(self, batch: str, kind: str) -> dict[int, list[Probability]]:
        answers = self.site.queue.answers(batch)
        votes = encode_votes(answers)
        # With few items the model is sure of what nobody can know.
        if len(votes.items) < _LEAST_ITEMS:
            return {}
        try:
            fitted = dawid_skene(votes, expected=gold_labels(votes, answers["expected"].to_pylist()))
        except UserError:
            return {}  # more different answers than the model is for
        values = [label if kind == "choice" else json.loads(label) for label in votes.labels]
        best = np.argsort(-fitted.posterior, axis=1)[:, :_LIKELIEST]
        return {
            int(item): [
                Probability(answer=values[label], probability=round(float(row[label]), 4))
                for label in order
                if row[label] >= _LEAST_PROBABILITY
            ]
            for item, row, order in zip(votes.items, fitted.posterior, best, strict=True)
        }


def _review_item(item: Item, posterior: Sequence[Probability] = (), decidable: bool = True) -> ReviewItem:
    values = columns(item, ReviewItem)
    values |= {"cause": item.cause, "posterior": list(posterior), "decidable": decidable}
    return ReviewItem(**values | {"answers": [GivenAnswer(**columns(answer, GivenAnswer)) for answer in item.answers]})
