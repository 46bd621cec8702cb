"""Groups writes of several threads into one transaction, as each commit waits for the disk twice."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from posttrain.store.errors import UserError, is_user_mistake
from posttrain.store.journaled_database import JournaledDatabase

T = TypeVar("T")


class CommitGroup:
    """Runs writes that arrive at the same time in one transaction.

    Args:
        database: The database; a thread that is in a transaction of it already runs its write there.
        largest: Number of writes that one transaction takes at most.
    """

    def __init__(self, database: JournaledDatabase, largest: int = 64) -> None:
        self.database, self.largest = database, largest
        self._guard = threading.Lock()
        self._waiting: list[_Write] = []
        self._is_busy = False  # whether a thread is committing, for all that wait

    def run(self, function: Callable[[], T], order: int = 0) -> T:
        """Runs ``function`` in a transaction; returns its result once it is committed.

        Args:
            function: Writes to the database, and to nothing else: it may be run a second time, by another thread. It
                raises `UserError` before it has changed a row.
            order: Within a transaction writes are run by this number, so that two processes lock rows in one order.

        Raises:
            Exception: whatever ``function`` raised; nothing of it is stored.
        """
        if self.database.in_transaction():
            return function()
        write = _Write(function, order)
        with self._guard:
            self._waiting.append(write)
            commits, self._is_busy = not self._is_busy, True
        if not commits:
            # Woken when it is committed, or when it is this thread's turn to commit. Not a lock: a thread whose write
            # is done would queue for it behind those that are still to commit.
            write.woken.wait()
        if not write.finished:
            self._commit_until(write)
        if write.error is not None:
            raise write.error
        result: T = write.result
        return result

    def _commit_until(self, write: "_Write") -> None:
        """Commits until a write is finished, and passes the turn on."""
        try:
            while not write.finished:
                self._commit()
        finally:
            with self._guard:
                self._is_busy = bool(self._waiting)
                if self._waiting:
                    self._waiting[0].woken.set()

    def _commit(self) -> None:
        with self._guard:
            writes, self._waiting = self._waiting[: self.largest], self._waiting[self.largest :]
        writes.sort(key=lambda write: write.order)
        failed: list[_Write] = []
        try:
            with self.database.transaction():
                for write in writes:
                    failed = [write]
                    write.run(self.database)
                failed = []
        except BaseException as error:
            # A write that failed, as in a deadlock with another process, undid the others with it.
            again = bool(failed) and len(writes) > 1 and isinstance(error, Exception)
            for write in writes:
                write.error = None if again else error
                if again:
                    write.run_alone(self.database)
            if not isinstance(error, Exception):
                raise
        finally:
            for write in writes:
                write.finished = True
                write.woken.set()


class _Write:
    def __init__(self, function: Callable[[], Any], order: int) -> None:
        self.function, self.order = function, order
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished, self.woken = False, threading.Event()

    def run(self, database: JournaledDatabase) -> None:
        changes, self.error = database.count_changes(), None
        try:
            self.result = self.function()
        except UserError as error:
            # The transaction can continue only without a trace of this write.
            if not is_user_mistake(error) or database.count_changes() > changes:
                raise
            self.error = error

    def run_alone(self, database: JournaledDatabase) -> None:
        try:
            with database.transaction():
                self.result = self.function()
        except Exception as error:  # noqa: BLE001 - raised by `run` in the thread that asked for it
            self.error = error
