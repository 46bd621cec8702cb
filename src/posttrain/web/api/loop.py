"""The API of the loop: its state, rounds and models, promotion and rollback, and the stream of what happens."""

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from posttrain.inspect.status import status
from posttrain.label.audit import record_change
from posttrain.label.tokens import Conflict, NotFound
from posttrain.loop.model_registry import ModelRegistry
from posttrain.loop.state import RoundState
from posttrain.store.errors import LockedError, UserError, WorkError, is_user_mistake
from posttrain.store.secrets import mask_text
from posttrain.web.access import LOOP, Sender, Site, find_principal, least
from posttrain.web.api.bodies import ERRORS, TOO_MANY, Body, Note, plain
from posttrain.web.request_bodies import RequestRejected

ModelId = Annotated[str, Field(min_length=1, max_length=100)]


class State(BaseModel):
    """The state of the loop, as `posttrain status --json` prints it."""

    round: int | None
    rounds_wanted: int | None
    champion: dict[str, Any] | None
    waiting: str | None
    rounds: list[dict[str, Any]]
    final: dict[str, Any] | None
    rollback: dict[str, Any] | None
    canary: dict[str, Any] | None


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
    """The models that left and entered service, or of a canary and the champion that stays; `done`: before."""

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

    @router.get("/status", **least(LOOP))
    def state() -> State:
        """Returns where the loop stands and what it waits for."""
        if site.config is None:
            raise NotFound("this folder has no posttrain.yaml, and so no loop")
        return State(**plain(status(site.workspace, site.config)))

    @router.get("/models", **least(LOOP))
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

    @router.get("/deployments", **least(LOOP))
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
            raise NotFound(f"`{body.model}` is not a model of this workspace")
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
            result = registry.rollback(f"{body.reason} ({sender.name})", to=None if plan.ends_canary else plan.target)
        if not result.done:
            _record(sender, "roll back", result.source, result.target)
        return RollbackResult(**vars(result))

    @router.get("/events", **least(LOOP), response_class=StreamingResponse, responses=_STREAM | TOO_MANY)
    async def events(request: Request, sender: Sender) -> StreamingResponse:
        """Streams events: `status`, `training` (rows of the training curves) and `log` (lines), as they are written."""
        last = request.headers.get("last-event-id", "")
        number = int(last) if last.isascii() and last.isdigit() and len(last) < 18 else 0
        return _Events(feed.subscribe(sender.name, number, lambda: _reads(request)))

    def _reads(request: Request) -> bool:
        principal = find_principal(request, site)
        return principal is not None and principal.may(LOOP)

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
        if isinstance(error, Conflict | LockedError) or not is_user_mistake(error):
            raise
        raise Conflict(str(error)) from None


log = logging.getLogger("posttrain")

MAX_STREAMS = 32
MAX_STREAMS_OF_ACCOUNT = 4

POLL_SECONDS = 1.0
# A browser connects again by itself, and its session and role are then checked again.
STREAM_SECONDS = 600.0
_COMMENT_SECONDS = 15.0

_KEPT = 2000
_FIRST_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class Event:
    """An event: its number, its kind, and its content as JSON."""

    number: int
    kind: str
    data: str

    def encode(self) -> str:
        """Returns the event as the stream has it."""
        # JSON has no line ends but within texts, where they are escaped.
        return f"id: {self.number}\nevent: {self.kind}\ndata: {self.data}\n\n"


class LineReader:
    """Reads the lines that are added to a file, from its last 64 kB on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = max(0, self._size() - _FIRST_BYTES)
        self._is_cut = self._at > 0

    def lines(self) -> Iterator[str]:
        """Yields the whole lines since the last call; a line that is still being written comes later."""
        size = self._size()
        if size < self._at:
            # The file was begun again.
            self._at, self._is_cut = 0, False
        if size == self._at:
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            block = file.read(_READ_BYTES)
        end = block.rfind(b"\n") + 1
        if not end and len(block) == _READ_BYTES:
            end = len(block)
        self._at += end
        for line in block[:end].split(b"\n")[1 if self._is_cut else 0 :]:
            if line:
                yield line.decode("utf-8", "replace")
        self._is_cut = self._is_cut and not end

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


class Stream:
    """The events for one account: it counts from the moment that it is admitted until it is released."""

    def __init__(self, events: AsyncGenerator[str, None], release: Callable[[], None]) -> None:
        self._events, self._release = events, release

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        try:
            return await anext(self._events)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Ends the stream, also one of which nothing was read."""
        release, self._release = self._release, lambda: None
        release()
        await self._events.aclose()


class _Events(StreamingResponse):
    """Sends a stream, and closes it whatever ends the request: a generator that never began cleans up nothing."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()


class EventFeed:
    """Looks for events while somebody listens, and hands each to all who do.

    Args:
        site: The server's workspace; its event ``ending`` ends all streams.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._number = 0
        self._streams: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._poller: asyncio.Task[None] | None = None
        self._state = ""
        self._log = LineReader(site.workspace.home / "run.log")
        self._curves: dict[Path, LineReader] = {}

    def subscribe(self, name: str, last: int = 0, is_allowed: Callable[[], bool] = lambda: True) -> Stream:
        """Admits a stream of an account; called in the server's loop, so that no two are admitted at once.

        Args:
            last: Number of the last event that the client has; 0 for none.
            is_allowed: Returns whether the account may still read; asked in a thread before each batch of events.

        Raises:
            RequestRejected: 429 if the account or the server has too many streams.
        """
        if self._streams[name] >= MAX_STREAMS_OF_ACCOUNT or self._streams.total() >= MAX_STREAMS:
            raise RequestRejected(429, "too many open streams; close a page", {"Retry-After": "10"})
        self._streams[name] += 1
        return Stream(self._read(last, is_allowed), partial(self._release, name))

    def _release(self, name: str) -> None:
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]
        if not self._streams and self._poller is not None:
            self._poller.cancel()
            self._poller = None

    async def _read(self, last: int, is_allowed: Callable[[], bool]) -> AsyncGenerator[str, None]:
        loop = asyncio.get_running_loop()
        end, comment = loop.time() + STREAM_SECONDS, loop.time() + _COMMENT_SECONDS
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        # A server that was started again counts from 1 again.
        last = last if last <= self._number else 0
        yield "retry: 2000\n\n"
        if last == 0 and self._state:
            # Of the state only the newest: the others are history by now.
            for event in [event for event in self._events if event.kind != "status"]:
                yield event.encode()
            last = self._number
            yield Event(last, "status", self._state).encode()
        while not self.site.ending.is_set() and loop.time() < end:
            events = [event for event in self._events if event.number > last]
            if events or loop.time() > comment:
                try:
                    if not await run_sync(is_allowed):
                        return
                except (UserError, WorkError):
                    # Nobody can tell while the database is away: the events wait. To end the stream would end it for
                    # good, as browsers do not connect again after the 503 that would follow.
                    events = []
            for event in events:
                last = event.number
                yield event.encode()
            if loop.time() > comment:
                # Proxies close silent connections, and a lost client is noticed by writing to it.
                comment = loop.time() + _COMMENT_SECONDS
                yield ": still here\n\n"
            # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes as its time ends.
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS), self._changed:
                    await self._changed.wait()

    async def _poll(self) -> None:
        while not self.site.ending.is_set():
            try:
                news = await run_sync(self._look)
            except (UserError, WorkError, OSError) as error:
                log.warning("the state of the loop cannot be read: %s", error)
                news = []
            for kind, data in news:
                self._number += 1
                self._events.append(Event(self._number, kind, data))
            if news:
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(POLL_SECONDS)

    def _look(self) -> list[tuple[str, str]]:
        """Returns kind and content of what is new."""
        news = []
        if self.site.config is not None:
            state = _encode(status(self.site.workspace, self.site.config))
            if state != self._state:
                self._state = state
                news.append(("status", state))
        for path in sorted((self.site.workspace.home / "metrics").glob("*.jsonl")):
            reader = self._curves.get(path)
            if reader is None:
                reader = self._curves[path] = LineReader(path)
            news += [("training", _encode({"run": path.stem, "row": _row(line)})) for line in reader.lines()]
        news += [("log", _encode({"line": mask_text(line)})) for line in self._log.lines()]
        return news


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _encode(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False, default=str)
