"""Where feedback waits: files that are only added to, so that nothing acknowledged is lost.

``segments/000001.open`` is being written; full or asked for, it is renamed to ``000001.jsonl`` and never changed again.
Each line carries a checksum (`posttrain.data.checked_lines`). An entry is acknowledged once an fsync has followed its
bytes; entries that arrive during one share the next (group commit, DeWitt et al. 1984, doi:10.1145/602259.602261).
"""

import logging
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from posttrain.data.checked_lines import encode, read_lines
from posttrain.data.feedback import Feedback
from posttrain.store.clock import now
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import make_folder, refused, sync_folder, writing
from posttrain.store.lock import exclusive

log = logging.getLogger("posttrain")

SEGMENT_BYTES = 64 * 2**20
LOOK_SECONDS = 0.25  # how often an idle writer looks for a wish to seal
_MOST_AT_ONCE = 4096


class Conflict(UserError):
    """Another feedback was acknowledged under this id."""


class Full(UserError):
    """The disk refused; nothing was acknowledged and nothing is left of the entry."""


@dataclass(frozen=True)
class Receipt:
    """``repeated``: the same feedback had been acknowledged before."""

    id: str
    repeated: bool


@dataclass
class _Waiting:
    id: str
    content: str
    line: bytes
    done: "Future[Receipt]"


class Inbox:
    """An inbox open for writing, by one process at a time; from any of its threads.

    Ids and digests of all entries are held in memory, about 200 bytes an entry.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open or make the inbox, and tidy up after a crash.

        Args:
            segment_bytes: from this size on a segment is sealed.

        Raises:
            UserError: another process has it open, or the disk refused.
        """
        self.folder = folder
        self._segments = folder / "segments"
        self._limit = segment_bytes
        make_folder(self._segments)
        self._lock = exclusive(folder / "lock", taken="another posttrain collects into this inbox")
        self._lock.__enter__()
        try:
            self._known: dict[bytes, bytes] = {}
            with writing(self._segments):
                self._recover()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        self._wake = threading.Condition()
        self._pending: dict[str, _Waiting] = {}
        self._queue: list[_Waiting] = []
        self._broken: Exception | None = None
        self._closing = False
        self._writer = threading.Thread(target=self._write_all, name="inbox", daemon=True)
        self._writer.start()

    def append(self, feedback: Feedback) -> "Future[Receipt]":
        """Take one in; the future is done when it is on the disk.

        Its errors: `Conflict`; `Full`; `WorkError` when the inbox is closed, or the disk refused even to undo.
        """
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()  # a client that hangs up takes nothing back
        try:
            content = feedback.content()
            stamp = now().isoformat(timespec="milliseconds")
            line = encode({"received": stamp, "feedback": feedback.model_dump(mode="json")})
        except ValueError as error:
            future.set_exception(UserError(f"cannot be stored: {error}"))
            return future
        with self._wake:
            if self._closing or self._broken is not None:
                future.set_exception(WorkError(f"the inbox is closed{f': {self._broken}' if self._broken else ''}"))
                return future
            if (known := self._known.get(_key(feedback.id))) is not None:
                _answer(future, feedback.id, known == _short(content), repeated=True)
                return future
            if (waiting := self._pending.get(feedback.id)) is not None:
                if waiting.content == content:
                    waiting.done.add_done_callback(lambda done: _pass_on(done, future))
                else:
                    _answer(future, feedback.id, False)
                return future
            entry = _Waiting(feedback.id, content, line, future)
            self._pending[feedback.id] = entry
            self._queue.append(entry)
            self._wake.notify()
        return future

    def status(self) -> dict[str, Any]:
        """Counts: entries acknowledged, those waiting for the disk, segments sealed, bytes of the open one."""
        with self._wake:
            return {
                "entries": len(self._known),
                "waiting": len(self._pending),
                "sealed": self._number - 1,
                "open_bytes": self._size,
                "writable": self._broken is None and not self._closing,
            }

    def close(self) -> None:
        """Acknowledge what waits and let go."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        self._writer.join()
        os.close(self._descriptor)
        self._lock.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self) -> None:
        """Read what is there, cut off what was never acknowledged, and open the segment to write to."""
        for path in sealed(self.folder):
            self._remember(path)
        self._number = 1 + max((int(path.stem) for path in sealed(self.folder)), default=0)
        path = self._path
        if path.exists():
            found = self._remember(path)
            if found < path.stat().st_size:
                log.warning("%s: the last line was never finished or acknowledged; it is cut off", path)
                os.truncate(path, found)
        self._descriptor = self._create(self._number)
        os.fsync(self._descriptor)  # what a killed process left in the cache counts as acknowledged from now on
        self._size = os.fstat(self._descriptor).st_size

    def _remember(self, path: Path) -> int:
        """Take the ids of a segment in; returns the bytes of its whole lines."""
        lines = read_lines(path.read_bytes())
        for number in lines.damaged:
            log.warning("%s:%d: does not match its checksum; it is left where it is and not used", path, number)
        for value in lines.values:
            feedback = Feedback.model_validate(value["feedback"])
            self._known[_key(feedback.id)] = _short(feedback.content())
        return lines.whole

    @property
    def _path(self) -> Path:
        return self._segment(self._number)

    def _segment(self, number: int) -> Path:
        return self._segments / f"{number:06d}.open"

    def _create(self, number: int) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self._segment(number), flags, 0o666)
        sync_folder(self._segments)
        return descriptor

    def _write_all(self) -> None:
        """The writer's thread: one write and one fsync for all that wait."""
        while True:
            with self._wake:
                if not self._queue and not self._closing:
                    self._wake.wait(LOOK_SECONDS)
                batch, self._queue = self._queue[:_MOST_AT_ONCE], self._queue[_MOST_AT_ONCE:]
                done = self._closing and not batch
            if batch:
                self._commit(batch)
            if self._broken is None:
                self._seal_if_due()
            if done:
                return

    def _commit(self, batch: list[_Waiting]) -> None:
        error: Exception | None = self._broken
        if error is None:
            try:
                self._write(b"".join(entry.line for entry in batch))
            except OSError as problem:
                error = self._undo(problem)
        with self._wake:
            for entry in batch:
                del self._pending[entry.id]
                if error is None:
                    self._known[_key(entry.id)] = _short(entry.content)
        for entry in batch:
            if error is None:
                _answer(entry.done, entry.id, True)
            else:
                entry.done.set_exception(error)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self._size += len(data)

    def _undo(self, problem: OSError) -> Exception:
        """Take back what a refused write left; what it means for those who wait."""
        log.warning("%s: %s; nothing of it was acknowledged", self._path, problem.strerror)
        try:
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
        except OSError as error:
            return self._give_up(error)
        told = refused(problem, self._path)
        return Full(told.what, where=told.where, fix=told.fix) if told else WorkError(f"{self._path}: {problem}")

    def _give_up(self, error: OSError) -> Exception:
        """Accept nothing any more: what the disk holds is known only after a new start."""
        log.error("%s: %s; the inbox takes nothing until it is opened again", self._path, error)
        with self._wake:
            self._broken = WorkError(f"{self._path}: {error}")
        return self._broken

    def _seal_if_due(self) -> None:
        """Begin another segment when this one is full, or when `posttrain.data.sealing.seal` has asked for it."""
        wish = self.folder / "seal"
        wished = wish.exists()
        if self._size and (wished or self._size >= self._limit):
            try:
                self._begin_another()
            except OSError as error:
                log.warning("%s: cannot be sealed: %s; it grows on", self._path, error.strerror)
        if wished:
            wish.unlink(missing_ok=True)

    def _begin_another(self) -> None:
        before, full = self._descriptor, self._path
        descriptor = self._create(self._number + 1)
        try:
            os.replace(full, full.with_suffix(".jsonl"))
        except OSError:
            os.close(descriptor)
            raise
        with self._wake:
            self._number += 1
            self._descriptor, self._size = descriptor, 0
        os.close(before)
        sync_folder(self._segments)


def sealed(folder: Path) -> list[Path]:
    """The sealed segments of an inbox, oldest first."""
    return sorted((folder / "segments").glob("[0-9]*.jsonl"))


def _key(id: str) -> bytes:
    return xxhash.xxh3_128_digest(id.encode())


def _short(content: str) -> bytes:
    return bytes.fromhex(content[:32])


def _answer(future: "Future[Receipt]", id: str, same: bool, *, repeated: bool = False) -> None:
    if same:
        future.set_result(Receipt(id, repeated))
    else:
        what = f"another feedback has the id `{id}`"
        future.set_exception(Conflict(what, fix="choose an id that is new"))


def _pass_on(done: "Future[Receipt]", future: "Future[Receipt]") -> None:
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(Receipt(done.result().id, True))
