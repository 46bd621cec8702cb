"""Server-sent events: the loop's state, rows of training curves and log lines, as they are written."""

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio.to_thread import run_sync

from posttrain.inspect.status import status
from posttrain.store.errors import UserError, WorkError
from posttrain.store.secrets import mask_text
from posttrain.web.access import Site
from posttrain.web.api.bodies import plain
from posttrain.web.request_bodies import RequestRejected

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
            # The file was begun anew.
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

    def subscribe(self, name: str, last: int = 0) -> AsyncIterator[str]:
        """Returns the stream of an account.

        Args:
            last: Number of the last event that the client has; 0 for none.

        Raises:
            RequestRejected: 429 if the account or the server has too many streams.
        """
        if self._streams[name] >= MAX_STREAMS_OF_ACCOUNT or self._streams.total() >= MAX_STREAMS:
            raise RequestRejected(429, "too many open streams; close a page", {"Retry-After": "10"})
        return self._stream(name, last)

    async def _stream(self, name: str, last: int) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        end, comment = loop.time() + STREAM_SECONDS, loop.time() + _COMMENT_SECONDS
        self._streams[name] += 1
        try:
            if self._poller is None or self._poller.done():
                self._poller = asyncio.create_task(self._poll())
            # A server that was started anew counts from 1 again.
            last = last if last <= self._number else 0
            yield "retry: 2000\n\n"
            if last == 0 and self._state:
                # Of the state only the newest: the others are history by now.
                for event in [event for event in self._events if event.kind != "status"]:
                    yield event.encode()
                last = self._number
                yield Event(last, "status", self._state).encode()
            while not self.site.ending.is_set() and loop.time() < end:
                for event in [event for event in self._events if event.number > last]:
                    last = event.number
                    yield event.encode()
                if loop.time() > comment:
                    # Proxies close silent connections, and a lost client is noticed by writing to it.
                    comment = loop.time() + _COMMENT_SECONDS
                    yield ": still here\n\n"
                async with self._changed:
                    try:
                        await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
                    except TimeoutError:
                        continue
        finally:
            self._streams[name] -= 1
            if self._streams.total() == 0 and self._poller is not None:
                self._poller.cancel()

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
