"""The API of labelling: items, answers, batches and their quality."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from posttrain.label.queue_rows import PausedError, Receipt, Task
from posttrain.label.tokens import NotFound
from posttrain.select.reasons import reason_in_words
from posttrain.store.section import MAX_INTEGER
from posttrain.web.access import Sender, Site, least
from posttrain.web.api.bodies import ERRORS, Body, ItemId, Language, Note
from posttrain.web.translations import Translator

Seconds = Annotated[float | None, Field(ge=0, le=1e6, description="Time from showing the item; null: since its lease.")]
BatchName = Annotated[str, Query(max_length=200, pattern=r"^[^\x00-\x1f]+$", description="Only of this batch.")]
OfBatch = Annotated[str | None, Field(max_length=200, description="The next item: only of this batch.")]
Besides = Annotated[
    list[Annotated[int, Field(ge=1, le=MAX_INTEGER)]],
    Field(max_length=4, description="Items that the sender has a lease of: not these but one more, to show it later."),
]
AndNext = Annotated[bool, Field(description="Also return the next item, which saves a request.")]


class ShownTask(BaseModel):
    """An item as its annotator sees it."""

    item: int
    batch: str
    kind: str = Field(description="Kind of the answer, such as `choice`; see docs/labelling.md.")
    content: dict[str, Any]
    labels: list[str] | None
    suggestion: dict[str, Any] | None
    reason: str | None = Field(description="Why the record was selected.")
    guideline: int
    ends_at: datetime | None = Field(description="When the lease of the item ends.")


class NextTask(BaseModel):
    """The next item; null: there is none at the moment, or the account is paused for the reason given."""

    task: ShownTask | None
    paused: str | None = None


class Stored(BaseModel):
    """The answer, skip or flag is on the disk. `repeated`: it was before."""

    answer_id: int
    repeated: bool
    paused: str | None = Field(description="The sentence to its person if the account was paused now.")
    next: ShownTask | None = None


class NextRequest(Body):
    batch: OfBatch = None
    besides: Besides = Field(default_factory=list)


class Answer(Body):
    """An answer, of the shape that the item's kind has."""

    answer: Any
    note: Note | None = None
    seconds: Seconds = None
    next: AndNext = False
    batch: OfBatch = None
    besides: Besides = Field(default_factory=list)


class Skip(Body):
    reason: Note | None = None
    seconds: Seconds = None
    next: AndNext = False
    batch: OfBatch = None
    besides: Besides = Field(default_factory=list)


class Flag(Body):
    """Sends an item to review; the answer may be left out."""

    note: Annotated[str, Field(min_length=1, max_length=2000)]
    answer: Any = None
    seconds: Seconds = None
    next: AndNext = False
    batch: OfBatch = None
    besides: Besides = Field(default_factory=list)


class Undo(Body):
    item: Annotated[
        int | None, Field(ge=1, le=MAX_INTEGER, description="The item of the last answer: sent twice, it undoes one.")
    ] = None


class Lease(BaseModel):
    ends_at: datetime


class BatchState(BaseModel):
    """A batch and its progress; gold items are not counted."""

    name: str
    round: int | None
    kind: str
    labels: list[str] | None
    status: str
    created_at: datetime
    finished_at: datetime | None
    items: int
    open: int
    review: int
    done: int
    dropped: int
    answers: int
    mine: int = Field(description="Answers of the sender.")
    left: int
    rate: float | None
    done_at: datetime | None


def labelling_routes(site: Site) -> APIRouter:
    """Builds the routes."""
    router = APIRouter(responses=ERRORS, tags=["labelling"])
    queue = site.queue

    @router.post("/items/next", **least("annotator"))
    def next_item(body: NextRequest, sender: Sender, translate: Language) -> NextTask:
        """Leases the sender the next item, or returns the one that the sender has a lease of."""
        if body.batch is not None and queue.batch(body.batch) is None:
            raise NotFound(f"there is no batch `{body.batch}`")
        return _next(sender, translate, body.batch, body.besides)

    @router.post("/items/{id}/answer", status_code=201, **least("annotator"))
    def answer(id: ItemId, body: Answer, sender: Sender, translate: Language) -> Stored:
        """Stores an answer; it is on the disk when the reply comes, and sending it again changes nothing."""
        receipt = queue.answer(id, sender.name, body.answer, note=body.note, seconds=body.seconds)
        return _stored(receipt, sender, body, translate)

    @router.post("/items/{id}/skip", status_code=201, **least("annotator"))
    def skip(id: ItemId, body: Skip, sender: Sender, translate: Language) -> Stored:
        """Leaves an item to others."""
        receipt = queue.skip(id, sender.name, body.reason, seconds=body.seconds)
        return _stored(receipt, sender, body, translate)

    @router.post("/items/{id}/flag", status_code=201, **least("annotator"))
    def flag(id: ItemId, body: Flag, sender: Sender, translate: Language) -> Stored:
        """Sends an item to review."""
        receipt = queue.flag(id, sender.name, body.note, body.answer, seconds=body.seconds)
        return _stored(receipt, sender, body, translate)

    @router.post("/undo", **least("annotator"))
    def undo(body: Undo, sender: Sender, translate: Language) -> NextTask:
        """Takes the sender's last answer, skip or flag back, and leases the sender the item again."""
        task = queue.undo(sender.name, body.item)
        return NextTask(task=None if task is None else _shown(task, translate))

    @router.put("/items/{id}/lease", **least("annotator"))
    def renew(id: ItemId, sender: Sender) -> Lease:
        """Extends the sender's lease of an item."""
        return Lease(ends_at=queue.renew(id, sender.name))

    @router.delete("/items/{id}/lease", status_code=204, response_class=Response, **least("annotator"))
    def give_back(id: ItemId, sender: Sender) -> None:
        """Ends the sender's lease of an item, so that others are given it."""
        queue.give_back(id, sender.name)

    @router.get("/batches", **least("viewer"))
    def batches(sender: Sender, name: BatchName | None = None) -> list[BatchState]:
        """Lists the batches with their progress, oldest first."""
        # The settings stay here: with the seed an annotator could tell gold items and planted suggestions.
        return [
            BatchState(
                **vars(queue.progress(batch.name)) | columns(batch, BatchState),
                mine=queue.count_answers(batch.name, sender.name),
            )
            for batch in queue.batches()
            if name in (None, batch.name)
        ]

    @router.get("/quality", **least("reviewer"))
    def quality(batch: BatchName | None = None) -> dict[str, Any]:
        """Reports agreement, gold accuracy, consensus, confusions, work, outlook and alarms."""
        return site.quality.get(batch) or {}

    def _next(sender: Sender, translate: Translator, batch: str | None, besides: Sequence[int]) -> NextTask:
        try:
            task = queue.next(sender.name, batch, besides)
        except PausedError as error:
            return NextTask(task=None, paused=translate.line(str(error)))
        return NextTask(task=None if task is None else _shown(task, translate))

    def _stored(receipt: Receipt, sender: Sender, body: Answer | Skip | Flag, translate: Translator) -> Stored:
        # Without the item's status: of a gold item, and of one that is checked, it differs from that of the others.
        following = _next(sender, translate, body.batch, body.besides) if body.next else NextTask(task=None)
        return Stored(
            answer_id=receipt.answer_id,
            repeated=receipt.repeated,
            paused=translate.line(receipt.paused) if receipt.paused else following.paused,
            next=following.task,
        )

    return router


def _shown(task: Task, translate: Translator) -> ShownTask:
    return ShownTask(**columns(task, ShownTask) | {"reason": shown_reason(task.reason, translate)})


def shown_reason(reason: str | None, translate: Translator) -> str | None:
    """Returns why a record was selected, in the words of those who answer."""
    return translate.line(reason_in_words(reason)) if reason else reason


def columns(row: Any, model: type[BaseModel]) -> dict[str, Any]:
    """Returns the fields of a row that a model shows."""
    return {name: value for name, value in vars(row).items() if name in model.model_fields}
