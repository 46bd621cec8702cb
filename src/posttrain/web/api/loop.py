"""The API of the loop: its state, rounds and models, promotion and rollback, and the stream of what happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from posttrain.inspect.status import status
from posttrain.label.audit import record_change
from posttrain.label.tokens import Conflict, NotFound
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.state import RoundState
from posttrain.store.errors import UserError
from posttrain.web.access import Sender, Site, least
from posttrain.web.api.bodies import ERRORS, TOO_MANY, Body, Note, plain
from posttrain.web.api.events import EventFeed

ModelId = Annotated[str, Field(min_length=1, max_length=100)]


class State(BaseModel):
    """The state of the loop, as `posttrain status --json` prints it."""

    round: int | None
    rounds_wanted: int
    champion: dict[str, Any] | None
    waiting: str | None
    rounds: list[dict[str, Any]]
    final: dict[str, Any] | None


class Model(BaseModel):
    """A model of the registry."""

    id: str
    round: int | None
    decision: str | None
    champion: bool
    size: int = Field(description="Bytes.")
    created_at: str
    metrics: dict[str, float | None]


class DeploymentEntry(BaseModel):
    """A model that became the champion, and why."""

    id: int
    model_id: str
    round: int | None
    action: str
    reason: str
    created_at: str
    hook: str


class Promotion(Body):
    """Makes a model the champion, bypassing the gate."""

    model: ModelId = Field(description="Full id of the model.")
    confirm: ModelId = Field(description="The same id again, as the page asks for it.")
    reason: Note = "by hand"


class RollbackRequest(Body):
    """Puts an earlier champion back in service."""

    to: ModelId | None = Field(None, description="Full id of an earlier champion; null: undoes the last promotion.")
    confirm: ModelId = Field(description="Id of the model that leaves service, as the page asks for it.")
    reason: Note = "by hand"


class RollbackResult(BaseModel):
    """The models that left and entered service; `done`: they had before."""

    source: str
    target: str
    done: bool


_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Server-sent events; `data` is JSON."}
}


def loop_routes(site: Site) -> APIRouter:
    """Builds the routes."""
    router = APIRouter(responses=ERRORS, tags=["loop"])
    feed = EventFeed(site)

    @router.get("/status", **least("viewer"))
    def state() -> State:
        """Returns where the loop stands and what it waits for."""
        if site.config is None:
            raise NotFound("this folder has no posttrain.yaml, and so no loop")
        return State(**plain(status(site.workspace, site.config)))

    @router.get("/models", **least("viewer"))
    def models() -> list[Model]:
        """Lists all models with their round, decision and metrics."""
        metadata = site.workspace.metadata
        champion = ModelRegistry(site.workspace).champion
        rounds = {entry.candidate: entry for entry in metadata.rounds() if entry.candidate}
        listed = []
        for row in metadata.artifacts("model"):
            entry = rounds.get(row.id)
            state = RoundState.from_row(entry) if entry else RoundState()
            listed.append(
                Model(
                    id=row.id,
                    round=entry.number if entry else None,
                    decision=state.action,
                    champion=champion is not None and champion.model_id == row.id,
                    size=row.size,
                    created_at=row.created_at.isoformat(),
                    metrics=plain(dict(state.metrics or {})),
                )
            )
        return listed

    @router.get("/deployments", **least("viewer"))
    def deployments() -> list[DeploymentEntry]:
        """Lists the models that were in service, oldest first, with the reason of each change."""
        rows = site.workspace.metadata.deployments()
        return [DeploymentEntry(**{**vars(row), "created_at": row.created_at.isoformat()}) for row in rows]

    @router.post("/models/promote", **least("owner"))
    def promote(body: Promotion, sender: Sender) -> DeploymentEntry:
        """Makes a model the champion at once."""
        if body.confirm != body.model:
            raise Conflict("`confirm` must be the id of the model that is promoted")
        registry = _registry()
        before = registry.champion
        row = site.workspace.metadata.artifact(body.model)
        if row is None or row.kind != "model":
            raise NotFound(f"`{body.model}` is no model of this workspace")
        with _conflicts():
            deployment = registry.promote(body.model, round=None, reason=f"{body.reason} ({sender.name})")
        _record(sender, "promote", before.model_id if before else None, deployment.model_id)
        return DeploymentEntry(**{**vars(deployment), "created_at": deployment.created_at.isoformat()})

    @router.post("/models/rollback", **least("owner"))
    def rollback(body: RollbackRequest, sender: Sender) -> RollbackResult:
        """Puts an earlier champion back in service at once; repeated, it is the same rollback."""
        registry = _registry()
        with _conflicts():
            plan = registry.plan_rollback(body.to)
            if body.confirm != plan.source:
                raise Conflict(f"`confirm` must be the id of the model that leaves service, {plan.source}")
            result = registry.rollback(f"{body.reason} ({sender.name})", to=plan.target)
        if not result.done:
            _record(sender, "roll back", result.source, result.target)
        return RollbackResult(**vars(result))

    @router.get("/events", **least("viewer"), response_class=StreamingResponse, responses=_STREAM | TOO_MANY)
    def events(request: Request, sender: Sender) -> StreamingResponse:
        """Streams events: `status`, `training` (rows of the training curves) and `log` (lines), as they are written."""
        last = request.headers.get("last-event-id", "")
        stream = feed.subscribe(sender.name, int(last) if last.isascii() and last.isdigit() and len(last) < 18 else 0)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    def _registry() -> ModelRegistry:
        if site.config is None:
            raise NotFound("this folder has no posttrain.yaml, and so no models in service")
        return ModelRegistry(site.workspace, site.config.deploy)

    def _record(sender: Sender, action: str, before: str | None, after: str) -> None:
        record_change(site.workspace.metadata, sender.name, action, after, {"champion": before}, {"champion": after})

    return router


@contextmanager
def _conflicts() -> Iterator[None]:
    """Answers 409 where the registry refuses: nothing is wrong with the request's form."""
    try:
        yield
    except UserError as error:
        raise error if isinstance(error, Conflict) else Conflict(str(error)) from None
