"""Stores feedback in files that are only appended to, so that no acknowledged entry is lost.

The files are segments (`posttrain.data.feedback.segment`) of lines with checksums (`posttrain.store.hashing`). An
entry is acknowledged once an fsync has followed its bytes; entries that arrive during one share the next (group
commit, DeWitt et al. 1984, doi:10.1145/602259.602261).
"""

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from posttrain.data.feedback.entries import Feedback, read_entry
from posttrain.data.feedback.segment import Segment, open_segment_path, seal_stale_segments, sealed_segments
from posttrain.store.database import utc_now
from posttrain.store.errors import UserError, WorkError
from posttrain.store.files import disk_errors, hold_lock, make_folder, sync_folder, to_storage_error, write_atomically
from posttrain.store.hashing import encode_line, read_lines

log = logging.getLogger("posttrain")

SEGMENT_BYTES = 64 * 2**20

POLL_SECONDS = 0.25  # between an idle writer's checks for a request to seal

_MAX_BATCH = 4096


class Conflict(UserError):
    """Other feedback was acknowledged under this id."""


class Full(UserError):
    """The disk refused; nothing was acknowledged and nothing of the entry is left."""


@dataclass(frozen=True)
class Receipt:
    """Acknowledges an entry; ``repeated``: the same feedback had been acknowledged before."""

    id: str
    repeated: bool


@dataclass
class _PendingEntry:
    id: str
    content: str
    line: bytes
    done: "Future[Receipt]"


class Inbox(AbstractContextManager["Inbox"]):
    """Opens an inbox for writing, by one process at a time; from any of its threads.

    Ids and digests of all entries are held in memory, about 200 bytes an entry.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Opens or creates the inbox, and cleans up after a crash.

        Args:
            segment_bytes: size from which a segment is sealed.

        Raises:
            UserError: another process has it open, or the disk refused.
        """
        self.folder = folder
        self._limit = segment_bytes
        self._known: dict[bytes, bytes] = {}
        # Feedback needs no workspace: its store is made here, if there is none.
        make_folder(folder / "segments", with_store=True)
        with ExitStack() as opening:
            busy = "another posttrain collects into this inbox"
            opening.enter_context(hold_lock(folder / "lock", busy_message=busy))
            with disk_errors(folder / "segments"):
                self._segment = self._recover()
            self._lock = opening.pop_all()
        self._wake = threading.Condition()
        self._pending: dict[str, _PendingEntry] = {}
        self._queue: list[_PendingEntry] = []
        self._broken: Exception | None = None
        self._closing = False
        self._writer = threading.Thread(target=self._write_all, name="inbox", daemon=True)
        self._writer.start()

    def append(self, feedback: Feedback) -> "Future[Receipt]":
        """Accepts an entry; the future is done when it is on the disk.

        Its errors: `Conflict`; `Full`; `WorkError` when the inbox is closed, or the disk refused even to undo.
        """
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()  # a client that disconnects does not withdraw its entry
        try:
            content = feedback.content()
            stamp = utc_now().isoformat(timespec="milliseconds")
            line = encode_line({"received": stamp, "feedback": feedback.model_dump(mode="json")})
        except ValueError as error:
            future.set_exception(UserError(f"cannot be stored: {error}"))
            return future
        with self._wake:
            if self._closing or self._broken is not None:
                future.set_exception(WorkError(f"the inbox is closed{f': {self._broken}' if self._broken else ''}"))
                return future
            # A client that lost our reply sends again: the same content is acknowledged, other content refused.
            if (digest := self._known.get(_id_digest(feedback.id))) is not None:
                _resolve(future, feedback.id, digest == _content_digest(content), repeated=True)
                return future
            if (waiting := self._pending.get(feedback.id)) is not None:
                # The first copy is not on the disk yet, so the repeat waits for the same fsync.
                if waiting.content == content:
                    waiting.done.add_done_callback(lambda done: _copy_result(done, future))
                else:
                    _resolve(future, feedback.id, False)
                return future
            entry = _PendingEntry(feedback.id, content, line, future)
            self._pending[feedback.id] = entry
            self._queue.append(entry)
            self._wake.notify()
        return future

    def status(self) -> dict[str, Any]:
        """Counts acknowledged and waiting entries, sealed segments, and bytes of the open one."""
        with self._wake:
            return {
                "entries": len(self._known),
                "waiting": len(self._pending),
                "sealed": self._segment.number - 1,
                "open_bytes": self._segment.size,
                "writable": self._broken is None and not self._closing,
            }

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Acknowledges what waits, and releases the inbox."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify()
        # The lock is released last: another process may open the inbox only after the writer has ended.
        self._writer.join()
        self._segment.close()
        self._lock.close()

    def _recover(self) -> Segment:
        """Reads the ids of all entries, and opens the segment to write to."""
        # A crash can leave several open segments; only the last one may still grow.
        last = seal_stale_segments(self.folder)
        paths = sealed_segments(self.folder)
        number = last or 1 + max((int(path.stem) for path in paths), default=0)
        for path in [*paths, open_segment_path(self.folder, number)]:
            if path.exists():
                self._remember(path)
        return Segment(self.folder, number)

    def _remember(self, path: Path) -> None:
        lines = read_lines(path.read_bytes())
        for number in lines.damaged:
            log.warning("%s:%d: does not match its checksum; ignoring the line", path, number)
        for number, value in zip(lines.numbers, lines.values, strict=True):
            try:
                feedback = read_entry(value)
            except UserError as error:
                # One line, from a stranger's hand, must not keep all others out.
                log.warning("%s:%d: is not feedback (%s); ignoring the line", path, number, error)
                continue
            self._known[_id_digest(feedback.id)] = _content_digest(feedback.content())

    def _write_all(self) -> None:
        """Runs the writer's thread: one write and one fsync for all waiting entries."""
        while True:
            with self._wake:
                if not self._queue and not self._closing:
                    self._wake.wait(POLL_SECONDS)
                batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
                done = self._closing and not batch
            if batch:
                self._commit(batch)
            if self._broken is None:
                self._seal_if_due()
            if done:
                return

    def _commit(self, batch: list[_PendingEntry]) -> None:
        error: Exception | None = self._broken
        if error is None:
            try:
                # One write and one fsync for the whole batch: the fsync costs far more than the bytes.
                self._segment.append(b"".join(entry.line for entry in batch))
            except OSError as problem:
                # Part of a refused write may be on the disk; left there, it would run into the next entry's line.
                error = self._undo(problem)
        with self._wake:
            for entry in batch:
                del self._pending[entry.id]
                if error is None:
                    # Known only once it is on the disk: a repeat must not be acknowledged for an entry that failed.
                    self._known[_id_digest(entry.id)] = _content_digest(entry.content)
        for entry in batch:
            if error is None:
                _resolve(entry.done, entry.id, True)
            else:
                entry.done.set_exception(error)

    def _undo(self, problem: OSError) -> Exception:
        """Removes what a refused write left, and returns the error for those who wait."""
        path = self._segment.path
        log.warning("%s: %s; nothing of it was acknowledged", path, problem.strerror)
        try:
            self._segment.undo()
        except OSError as error:
            return self._give_up(error)
        user_error = to_storage_error(problem, path)
        return (
            Full(user_error.what, where=user_error.where, fix=user_error.fix)
            if user_error
            else WorkError(f"{path}: {problem}")
        )

    def _give_up(self, error: OSError) -> Exception:
        """Stops accepting entries: only a restart can tell what the disk holds."""
        log.error("%s: %s; the inbox accepts nothing until it is reopened", self._segment.path, error)
        with self._wake:
            self._broken = WorkError(f"{self._segment.path}: {error}")
        return self._broken

    def _seal_if_due(self) -> None:
        """Starts another segment if this one is full, or if `seal_inbox` requests it."""
        request = self.folder / "seal"
        requested = request.exists()
        if self._segment.size and (requested or self._segment.size >= self._limit):
            try:
                self._begin_another()
            except OSError as error:
                log.warning("%s: cannot be sealed: %s; it keeps growing", self._segment.path, error.strerror)
        if requested:
            request.unlink(missing_ok=True)

    def _begin_another(self) -> None:
        # The new segment is opened before the full one is sealed: if the disk refuses, the full one stays in use.
        full, another = self._segment, Segment(self.folder, self._segment.number + 1)
        try:
            full.seal()
        except OSError:
            another.close()
            raise
        with self._wake:
            self._segment = another
        full.close()
        # The rename is durable only when its folder is synced.
        sync_folder(another.path.parent)


def _id_digest(id: str) -> bytes:
    # Every id is held in memory, so a digest stands for it; 128 bits make collisions negligible.
    return xxhash.xxh3_128_digest(id.encode())


def _content_digest(content: str) -> bytes:
    return bytes.fromhex(content[:32])


def _resolve(future: "Future[Receipt]", id: str, same: bool, *, repeated: bool = False) -> None:
    if same:
        future.set_result(Receipt(id, repeated))
    else:
        what = f"another feedback has the id `{id}`"
        future.set_exception(Conflict(what, fix="choose an id that is new"))


def _copy_result(done: "Future[Receipt]", future: "Future[Receipt]") -> None:
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(Receipt(done.result().id, True))


def seal_inbox(folder: Path, *, patience: float = 10.0) -> None:
    """Seals all that is acknowledged by now, whether a server has the inbox open or none.

    Args:
        patience: seconds to wait for the process that has it open.

    Raises:
        UserError: that process does not answer, or the disk refused.
    """
    segments = [path for path in (folder / "segments").glob("[0-9]*.open") if path.stat().st_size]
    if not segments:
        return
    request = folder / "seal"
    write_atomically(request, b"")
    end = time.monotonic() + patience
    while request.exists():
        try:
            # If no server has the inbox open, opening it here does the sealing; else the server sees the request.
            with Inbox(folder):
                pass  # closing it seals the segment and removes the request
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(POLL_SECONDS / 2)
    if remaining := [path for path in segments if path.exists()]:
        raise UserError(
            "cannot be sealed", where=str(remaining[0]), fix="free some space and run the same command again"
        )
